package e2e

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/features"
)

const evictKey = "example.com/evict"

// tolerating is a pod of a node that may stay for so many seconds once the node has
// the taint.
func tolerating(name, node string, seconds int64) *corev1.Pod {
	p := pod(name, "sleep")
	p.Labels["tolerates"] = "yes"
	p.Spec.NodeName = node
	p.Spec.Tolerations = []corev1.Toleration{{Key: evictKey, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: ptr.To(seconds)}}
	return p
}

// showTaintEviction taints nodes whose pods tolerate that for a time.
func (e *env) showTaintEviction(t *testing.T, ns string) {
	evict := func(node string) { e.ctl("taint", "node", node, evictKey+"=now:NoExecute") }
	spare := func(node string) { e.ctl("taint", "node", node, evictKey+"-") }
	watched := func() watch.Interface {
		t.Helper()
		list, err := e.api.CoreV1().Pods(ns).List(t.Context(), metav1.ListOptions{LabelSelector: "tolerates=yes"})
		if err != nil {
			t.Fatal(err)
		}
		w, err := e.api.CoreV1().Pods(ns).Watch(t.Context(), metav1.ListOptions{LabelSelector: "tolerates=yes", ResourceVersion: list.ResourceVersion})
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	t.Run("each pod at its own time", func(t *testing.T) {
		features.Conforms(t, 296)
		const early, late = 3 * time.Second, 9 * time.Second
		// Too early is a fault at once; late is one if it is so each time, since a busy
		// machine is late by itself.
		const lateness, tries = 5 * time.Second, 5
		for try := 1; ; try++ {
			first, second := fmt.Sprintf("early-%d", try), fmt.Sprintf("late-%d", try)
			e.create(ns, tolerating(first, "n2", int64(early.Seconds())))
			e.create(ns, tolerating(second, "n2", int64(late.Seconds())))
			e.podReady(ns, first)
			e.podReady(ns, second)
			w := watched()
			began := time.Now()
			evict("n2")
			asked := e.deletions(w, first, second)
			w.Stop()
			spare("n2")
			took := map[string]time.Duration{}
			for name, tolerated := range map[string]time.Duration{first: early, second: late} {
				// Times of the API are whole seconds: what is asked for at 3.9 is so at 3.
				if took[name] = asked[name].Sub(began); took[name] <= tolerated-time.Second {
					t.Fatalf("%s tolerates the taint for %s and was evicted after %s", name, tolerated, took[name])
				}
			}
			t.Logf("evicted after %v", took)
			if took[first] <= early+lateness && took[second] <= late+lateness {
				break
			}
			if try == tries {
				t.Fatalf("evicted after %v: late by more than %s, %d times", took, lateness, tries)
			}
		}
	})
	t.Run("taken away in time", func(t *testing.T) {
		features.Conforms(t, 297)
		const short, long = 10 * time.Second, 20 * time.Second
		for try := 1; ; try++ {
			spared, other := fmt.Sprintf("spared-%d", try), fmt.Sprintf("other-%d", try)
			was := e.create(ns, tolerating(spared, "n2", int64(short.Seconds())))
			e.create(ns, tolerating(other, "n3", int64(long.Seconds())))
			e.podReady(ns, spared)
			e.podReady(ns, other)
			w := watched()
			began := time.Now()
			evict("n2")
			evict("n3")
			spare("n2")
			if took := time.Since(began); took > short-time.Second && try < 5 {
				t.Logf("the taint was there for %s, which is not in time", took)
				e.deletions(w, other)
				w.Stop()
				spare("n3")
				continue
			}
			// When another node's pod goes that may stay for twice the time, this one's
			// time has been over for as long.
			e.deletions(w, other)
			w.Stop()
			spare("n3")
			if now := e.get(ns, spared); now.UID != was.UID || now.DeletionTimestamp != nil || !podReady(now) || now.Status.ContainerStatuses[0].RestartCount != 0 {
				t.Errorf("the taint went in time, and the pod's status is %s, deleted at %v", brief(now), now.DeletionTimestamp)
			}
			return
		}
	})
}

// deletions waits until somebody has asked for the deletion of each of these pods, and
// returns when that was, by the API server's clock.
func (e *env) deletions(w watch.Interface, names ...string) map[string]time.Time {
	e.t.Helper()
	at := map[string]time.Time{}
	limit := time.After(testTimeout)
	for len(at) < len(names) {
		select {
		case event, open := <-w.ResultChan():
			p, ok := event.Object.(*corev1.Pod)
			if !open || !ok {
				e.t.Fatalf("the watch has ended or failed: %+v", event.Object)
			}
			if p.DeletionTimestamp != nil && at[p.Name].IsZero() && slices.Contains(names, p.Name) {
				at[p.Name] = p.DeletionTimestamp.Add(-time.Duration(ptr.Deref(p.DeletionGracePeriodSeconds, 0)) * time.Second)
			}
		case <-limit:
			e.t.Fatalf("of %q, %v were deleted within %s", names, at, testTimeout)
		}
	}
	return at
}

// showTwoNodes: at least two nodes take any pod.
func (e *env) showTwoNodes(t *testing.T) {
	features.Conforms(t, 161)
	e.eventually("two nodes are ready, schedulable and without taints", func(ctx context.Context) error { // which go after a node is Ready
		list, err := e.api.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		var open []string
		for _, n := range list.Items {
			if len(n.Spec.Taints) == 0 && !n.Spec.Unschedulable && nodeReady(&n) {
				open = append(open, n.Name)
			}
		}
		if len(open) < 2 {
			return fmt.Errorf("only %q are", open)
		}
		return nil
	})
}
