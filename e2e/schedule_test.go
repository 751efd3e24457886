package e2e

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/features"
)

// schedulerProfiles are the default profile and one that fills nodes up.
const schedulerProfiles = `
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: default-scheduler
- schedulerName: packing
  pluginConfig:
  - name: NodeResourcesFit
    args: {scoringStrategy: {type: MostAllocated}}
  plugins:
    score:
      disabled: [{name: "*"}]
      enabled: [{name: NodeResourcesFit, weight: 5}]
`

// TestE2ESchedule lets the scheduler say no, and yes again.
func TestE2ESchedule(t *testing.T) {
	profiles := filepath.Join(t.TempDir(), "scheduler.yaml")
	if err := os.WriteFile(profiles, []byte(schedulerProfiles), 0o600); err != nil {
		t.Fatal(err)
	}
	e := startBare(t, 3, func(c *cluster.Config) { c.Args = []string{"--scheduler-config", profiles} })
	e.ready(3)
	ns := e.namespace("schedule")

	unschedulable := func(name string, words ...string) {
		t.Helper()
		p := e.podIs(ns, name, "unschedulable", func(p *corev1.Pod) error {
			c := podCondition(p, corev1.PodScheduled)
			if c == nil || c.Status != corev1.ConditionFalse || c.Reason != corev1.PodReasonUnschedulable {
				return errors.New("no such condition")
			}
			for _, w := range words {
				if !strings.Contains(c.Message, w) {
					return errors.New("message: " + c.Message)
				}
			}
			return nil
		})
		if p.Status.Phase != corev1.PodPending || p.Spec.NodeName != "" {
			t.Errorf("%s: phase %s on %q", name, p.Status.Phase, p.Spec.NodeName)
		}
	}
	// keptOff makes a pod that no node takes. The scheduler may see it before the change of
	// the nodes that keeps it off: then it is made again.
	keptOff := func(name string, words ...string) {
		t.Helper()
		e.eventually(name+" is kept off", func(context.Context) error {
			e.create(ns, pod(name, "sleep"))
			p := e.podIs(ns, name, "decided on", func(p *corev1.Pod) error {
				if c := podCondition(p, corev1.PodScheduled); c == nil {
					return errors.New("no condition")
				}
				return nil
			})
			if p.Spec.NodeName == "" {
				return nil
			}
			e.ctl("-n", ns, "delete", "pod", name, "--grace-period=0", "--force")
			return errors.New("it was put on " + p.Spec.NodeName)
		})
		unschedulable(name, words...)
	}
	t.Run("two untainted nodes", e.showTwoNodes)
	t.Run("node selector", func(t *testing.T) {
		features.Shows(t, 116, 131)
		features.Conforms(t, 364, 365)
		p := pod("ssd", "sleep")
		p.Spec.NodeSelector = map[string]string{"disk": "ssd"}
		e.create(ns, p)
		unschedulable("ssd", "0/3 nodes are available")
		e.ctl("label", "node", "n2", "disk=ssd")
		if got := e.podReady(ns, "ssd").Spec.NodeName; got != "n2" {
			t.Errorf("on %s", got)
		}
	})
	t.Run("resources", func(t *testing.T) {
		features.Shows(t, 114, 115)
		features.Conforms(t, 363)
		n, err := e.api.CoreV1().Nodes().Get(t.Context(), "n3", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		most := resource.NewMilliQuantity(n.Status.Allocatable.Cpu().MilliValue()*6/10, resource.DecimalSI)
		for _, name := range []string{"big-1", "big-2"} {
			p := pod(name, "sleep")
			p.Spec.NodeSelector = map[string]string{"kubernetes.io/hostname": "n3"}
			p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: *most}
			e.create(ns, p)
			if name == "big-1" {
				e.podReady(ns, name)
			}
		}
		unschedulable("big-2", "0/3 nodes are available", "1 Insufficient cpu")
		e.eventuallyHas([]string{"-n", ns, "describe", "pod", "big-2"}, "FailedScheduling", "Insufficient cpu")
		e.ctl("-n", ns, "annotate", "pod", "big-2", "clusterd.local/explain-scheduling=")
		unschedulable("big-2", "1 Insufficient cpu", "n1: NodeAffinity: node(s) didn't match", "n3: NodeResourcesFit: Insufficient cpu")
		e.ctl("-n", ns, "delete", "pod", "big-1", "--grace-period=1")
		e.podReady(ns, "big-2")
	})
	t.Run("cordon", func(t *testing.T) {
		features.Shows(t, 113)
		for _, n := range e.Nodes() {
			e.ctl("cordon", n.Name)
		}
		mustContain(t, "get nodes", e.ctl("get", "nodes"), "Ready,SchedulingDisabled")
		keptOff("nowhere", "3 node(s) were unschedulable")
		e.ctl("uncordon", "n1")
		if got := e.podReady(ns, "nowhere").Spec.NodeName; got != "n1" {
			t.Errorf("on %s", got)
		}
		for _, n := range e.Nodes() {
			e.ctl("uncordon", n.Name)
		}
	})
	t.Run("taints", func(t *testing.T) {
		features.Shows(t, 119)
		for _, n := range e.Nodes() {
			e.ctl("taint", "node", n.Name, "k=v:NoSchedule")
		}
		keptOff("kept-off", "untolerated taint")
		p := pod("tolerates", "sleep")
		p.Spec.Tolerations = []corev1.Toleration{{Key: "k", Operator: corev1.TolerationOpEqual, Value: "v", Effect: corev1.TaintEffectNoSchedule}}
		e.create(ns, p)
		e.podReady(ns, "tolerates")
		for _, n := range e.Nodes() {
			e.ctl("taint", "node", n.Name, "k-")
		}
		e.podReady(ns, "kept-off")
	})
	t.Run("profiles", func(t *testing.T) {
		features.Shows(t, 129)
		// Six pods of the default profile share the nodes; six that ask for the same
		// under the other name are packed on one. Scores are whole hundredths of a
		// node, so each pod asks for some of them.
		n, err := e.api.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		some := resource.NewMilliQuantity(n.Status.Allocatable.Cpu().MilliValue()*4/100, resource.DecimalSI)
		nodes := func(name, scheduler string) map[string]bool {
			d := deployment(name, 6)
			d.Spec.Template.Spec.SchedulerName = scheduler
			d.Spec.Template.Spec.Containers[0].Resources.Requests[corev1.ResourceCPU] = *some
			e.createDeployment(ns, d)
			on := map[string]bool{}
			for _, p := range e.podsReady(ns, "app="+name, 6) {
				on[p.Spec.NodeName] = true
			}
			return on
		}
		// That a node has no taint any more the scheduler may know after it sees a pod.
		for _, n := range e.Nodes() {
			e.create(ns, on(n.Name, pod("free-"+n.Name, "sleep")))
		}
		for _, n := range e.Nodes() {
			e.podReady(ns, "free-"+n.Name)
			e.ctl("-n", ns, "delete", "pod", "free-"+n.Name)
		}
		if on := nodes("apart", ""); len(on) != 3 {
			t.Errorf("the default profile uses %v", on)
		}
		if on := nodes("together", "packing"); len(on) != 1 {
			t.Errorf("the profile that packs uses %v", on)
		}
		e.ctl("-n", ns, "delete", "deployment", "apart", "together")
	})
	t.Run("another scheduler", func(t *testing.T) {
		features.Shows(t, 125, 126, 128)
		p := pod("foreign", "sleep")
		p.Spec.SchedulerName = "another-scheduler"
		p = e.create(ns, p)
		e.create(ns, pod("own", "sleep")) // made later, so looked at later
		e.podReady(ns, "own")
		if got := e.get(ns, "foreign"); got.Spec.NodeName != "" {
			t.Fatalf("it was put on %s", got.Spec.NodeName)
		}
		bind := func(uid string, node string) error {
			return e.api.CoreV1().Pods(ns).Bind(t.Context(), &corev1.Binding{
				ObjectMeta: metav1.ObjectMeta{Name: p.Name, UID: types.UID(uid)},
				Target:     corev1.ObjectReference{Kind: "Node", Name: node},
			}, metav1.CreateOptions{})
		}
		if err := bind("00000000-0000-0000-0000-000000000000", "n1"); !apierrors.IsConflict(err) {
			t.Errorf("a wrong uid: %v", err)
		}
		if err := bind(string(p.UID), "n1"); err != nil {
			t.Fatal(err)
		}
		if err := bind(string(p.UID), "n2"); !apierrors.IsConflict(err) {
			t.Errorf("a second binding: %v", err)
		}
		if got := e.podReady(ns, "foreign").Spec.NodeName; got != "n1" {
			t.Errorf("on %s", got)
		}
	})
	t.Run("drain", func(t *testing.T) {
		e.createDeployment(ns, deployment("web", 3))
		e.podsReady(ns, "app=web", 3)
		out := e.ctl("drain", "n2", "--ignore-daemonsets", "--force", "--delete-emptydir-data", "--timeout=110s")
		mustContain(t, "drain", out, "n2 drained")
		for _, p := range e.podsReady(ns, "app=web", 3) {
			if p.Spec.NodeName == "n2" {
				t.Errorf("%s is on n2", p.Name)
			}
		}
		e.ctl("uncordon", "n2")
	})
	t.Run("evicted by taints", func(t *testing.T) { e.showTaintEviction(t, ns) })
}
