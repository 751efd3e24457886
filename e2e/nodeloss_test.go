package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/features"
)

// gone says how long a pod stays on a node that is lost.
func gone(seconds int64) []corev1.Toleration {
	var out []corev1.Toleration
	for _, key := range []string{corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable} {
		out = append(out, corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: ptr.To(seconds)})
	}
	return out
}

// TestE2ENodeLoss switches a machine off: its pods are created again on the
// others, a bare pod is not; switched on again, it takes part again.
func TestE2ENodeLoss(t *testing.T) {
	features.Shows(t, 110, 210, 218, 236)
	e := start(t)
	ns := e.namespace("loss")
	d := deployment("web", 6)
	d.Spec.Template.Spec.Tolerations = gone(1)
	e.createDeployment(ns, d)
	pods := e.podsReady(ns, "app=web", 6)
	lost := e.other(e.leader(), "n1") // n1 is asked below
	onLost := 0
	for _, p := range pods {
		if p.Spec.NodeName == lost {
			onLost++
		}
	}
	if onLost == 0 {
		t.Fatalf("no pod is on %s", lost)
	}
	bare := pod("bare", "sleep")
	bare.Spec.NodeName = lost
	bare.Spec.Tolerations = gone(1)
	bareUID := e.create(ns, bare).UID
	e.podReady(ns, "bare")

	vip := balancedOn(t, e, ns, lost)
	var lostPods []string
	for _, p := range pods {
		if p.Spec.NodeName == lost {
			lostPods = append(lostPods, p.Name)
		}
	}
	began := time.Now()
	if err := e.PowerOff(lost); err != nil {
		t.Fatal(err)
	}
	// Its kernel is this one, and would answer on.
	if err := e.Partition(lost); err != nil {
		t.Fatal(err)
	}
	notReady := e.eventually(lost+" is not Ready", func(ctx context.Context) error {
		n, err := e.api.CoreV1().Nodes().Get(ctx, lost, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status == corev1.ConditionUnknown {
				return nil
			}
		}
		return fmt.Errorf("conditions %+v", n.Status.Conditions)
	})
	vip.moves(e, lostPods)
	t.Logf("a load balancer's address was on %s: the host is answered over another machine, by none of its pods, after %s",
		lost, time.Since(began).Round(time.Millisecond))
	e.eventually("6 pods are Ready on the others", func(ctx context.Context) error {
		list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=web"})
		if err != nil {
			return err
		}
		n := 0
		for _, p := range list.Items {
			if p.Spec.NodeName != lost && podReady(&p) && p.DeletionTimestamp == nil {
				n++
			}
		}
		if n != 6 {
			return fmt.Errorf("%d of 6", n)
		}
		return nil
	})
	t.Logf("%s switched off: not Ready after %s, its %d pods replaced and Ready after %s (they tolerate 1 s)",
		lost, notReady.Round(time.Millisecond), onLost, time.Since(began).Round(time.Millisecond))

	// The state of its pods is not known: they keep their phase and are not Ready.
	e.podIs(ns, "bare", "Running, not Ready, and on its way out", func(p *corev1.Pod) error {
		c := podCondition(p, corev1.PodReady)
		if p.Status.Phase != corev1.PodRunning || c == nil || c.Status != corev1.ConditionFalse || p.DeletionTimestamp == nil {
			return errors.New("it is not")
		}
		return nil
	})
	if out := e.ctl("-n", ns, "get", "pod", "bare"); !strings.Contains(out, "Terminating") {
		t.Errorf("get pod of a lost node:\n%s", out)
	}

	if err := e.Heal(lost); err != nil {
		t.Fatal(err)
	}
	if err := e.Start(t.Context(), lost); err != nil {
		t.Fatal(err)
	}
	e.eventually(lost+" is Ready again", func(ctx context.Context) error {
		n, err := e.api.CoreV1().Nodes().Get(ctx, lost, metav1.GetOptions{})
		if err == nil && !nodeReady(n) {
			err = errors.New("not Ready")
		}
		return err
	})
	e.podsReady(ns, "app=web", 6) // and the lost ones are forgotten
	e.eventually("the bare pod is gone", func(ctx context.Context) error {
		p, err := e.api.CoreV1().Pods(ns).Get(ctx, "bare", metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err == nil && p.UID != bareUID {
			t.Errorf("the bare pod was created again on %s", p.Spec.NodeName)
			return nil
		}
		return fmt.Errorf("still there (%v)", err)
	})
	after := pod("after", "sleep")
	after.Spec.NodeName = lost
	e.create(ns, after)
	e.podReady(ns, "after")
}

// TestE2EPartition cuts a node's cable: what runs there goes on, and once it
// is restored, nothing is there twice.
func TestE2EPartition(t *testing.T) {
	e := start(t)
	ns := e.namespace("partition")
	e.createDeployment(ns, deployment("web", 3)) // tolerates 300 s
	before := map[string]string{}
	for _, p := range e.podsReady(ns, "app=web", 3) {
		before[string(p.UID)] = p.Status.PodIP
	}
	cut := e.other(e.leader(), "n1")
	if err := e.Partition(cut); err != nil {
		t.Fatal(err)
	}
	e.eventually(cut+" is not Ready", func(ctx context.Context) error {
		n, err := e.api.CoreV1().Nodes().Get(ctx, cut, metav1.GetOptions{})
		if err == nil && nodeReady(n) {
			err = errors.New("still Ready")
		}
		return err
	})
	if err := e.Heal(cut); err != nil {
		t.Fatal(err)
	}
	e.eventually(cut+" is Ready again", func(ctx context.Context) error {
		n, err := e.api.CoreV1().Nodes().Get(ctx, cut, metav1.GetOptions{})
		if err == nil && !nodeReady(n) {
			err = errors.New("not Ready")
		}
		return err
	})
	for _, p := range e.podsReady(ns, "app=web", 3) {
		if before[string(p.UID)] != p.Status.PodIP || p.Status.ContainerStatuses[0].RestartCount != 0 {
			t.Errorf("%s did not live through it: %s", p.Name, brief(&p))
		}
	}
}
