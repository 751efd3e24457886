package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// rebalancePasses is how long some passes of the rebalancer take on a busy machine.
const rebalancePasses = 6 * time.Minute

// TestE2ERebalance: a cluster whose leader moves pods. What was right when the pods
// were placed is right no more: two of three ReplicaSets' pods go where the scheduler
// would place them now, the others stay for the reasons that docs/scheduling.md has.
func TestE2ERebalance(t *testing.T) {
	t.Setenv("CLUSTERD_DEBUG_REBALANCE_SETTLED", "20s") // ten minutes
	e := startBare(t, 3, func(c *cluster.Config) { c.Args = append(c.Args, "--rebalance-interval", "1m") })
	e.ready(3)
	ns := e.namespace("rebalance")
	e.ctl("label", "node", "n1", "n2", "disk=fast")

	// All begin on n2: the only node of theirs that may be used.
	e.cordoned(ns, "n1")
	for _, name := range []string{"moves", "guarded", "stays"} {
		d := deployment(name, 1)
		d.Spec.Template.Spec.NodeSelector = map[string]string{"disk": "fast"}
		if name == "stays" {
			d.Spec.Template.Annotations = map[string]string{"clusterd.local/rebalance": "false"}
		}
		e.createDeployment(ns, d)
	}
	lone := pod("lone", "sleep")
	lone.Spec.NodeSelector = map[string]string{"disk": "fast"}
	e.create(ns, lone)
	_, err := e.api.PolicyV1().PodDisruptionBudgets(ns).Create(t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "guarded"},
		Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: ptr.To(intstr.FromInt32(1)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "guarded"}}},
	}, metav1.CreateOptions{})
	e.must(err)
	before := map[string]corev1.Pod{"lone": *e.podReady(ns, "lone")}
	for _, name := range []string{"moves", "guarded", "stays"} {
		before[name] = e.podsReady(ns, "app="+name, 1)[0]
	}
	for name, p := range before {
		if p.Spec.NodeName != "n2" {
			t.Fatalf("%s began on %s", name, p.Spec.NodeName)
		}
	}
	e.ctl("uncordon", "n1")

	// The node breaks the rule of them all now.
	e.ctl("label", "node", "n2", "disk-")
	moved := e.rebalanced(ns, "moves", before["moves"])
	if moved.Spec.NodeName != "n1" {
		t.Errorf("it was placed on %s", moved.Spec.NodeName)
	}
	e.within(rebalancePasses, "the eviction is explained by an event", func(ctx context.Context) error {
		list, err := e.api.CoreV1().Events(ns).List(ctx, metav1.ListOptions{FieldSelector: "reason=Rebalanced,involvedObject.name=" + before["moves"].Name})
		if err != nil {
			return err
		}
		for _, ev := range list.Items {
			if strings.Contains(ev.Message, "Evicted from node n2") {
				return nil
			}
		}
		return fmt.Errorf("%d events Rebalanced", len(list.Items))
	})
	// A pass that met the budget is counted.
	e.within(rebalancePasses, "the budget's refusal is counted", func(ctx context.Context) error {
		var seen []string
		for _, n := range e.Nodes() {
			api, _, err := e.Client(n.Name)
			if err != nil {
				return err
			}
			text, err := api.CoreV1().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
			if err != nil {
				return err
			}
			for line := range strings.Lines(string(text)) {
				if strings.HasPrefix(line, "clusterd_sched_rebalance_evictions_total") {
					seen = append(seen, strings.TrimSpace(line))
				}
			}
		}
		has := func(label string) bool {
			return slices.ContainsFunc(seen, func(line string) bool {
				return strings.Contains(line, `kind="rule"`) && strings.Contains(line, label) && !strings.HasSuffix(line, " 0")
			})
		}
		if !has(`result="budget"`) || !has(`result="evicted"`) {
			return fmt.Errorf("the metric is %q", seen)
		}
		return nil
	})
	for _, name := range []string{"guarded", "stays", "lone"} {
		now, err := e.api.CoreV1().Pods(ns).Get(t.Context(), before[name].Name, metav1.GetOptions{})
		if err != nil || now.UID != before[name].UID || now.DeletionTimestamp != nil {
			t.Errorf("%s was moved: %v", name, err)
		}
	}

	// Without its budget the other goes, too.
	e.must(e.api.PolicyV1().PodDisruptionBudgets(ns).Delete(t.Context(), "guarded", metav1.DeleteOptions{}))
	if p := e.rebalanced(ns, "guarded", before["guarded"]); p.Spec.NodeName != "n1" {
		t.Errorf("the guarded one was placed on %s", p.Spec.NodeName)
	}
}

// rebalanced waits until an app's pod is Ready that is not the former one.
func (e *env) rebalanced(ns, app string, former corev1.Pod) (now corev1.Pod) {
	e.t.Helper()
	e.within(rebalancePasses, app+" is moved", func(ctx context.Context) error {
		list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=" + app})
		if err != nil {
			return err
		}
		for _, p := range list.Items {
			if p.UID != former.UID && p.DeletionTimestamp == nil && podReady(&p) {
				now = p
				return nil
			}
		}
		return fmt.Errorf("%d pods, none of them new and Ready", len(list.Items))
	})
	return now
}
