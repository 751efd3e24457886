package e2e

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/features"
)

// failover is how long after a node's last packet its pods that may be doubled run
// elsewhere, on a machine that is not overloaded.
const failover = 5 * time.Second

// TestE2EFailover: pods that tolerate a lost node for no time run on others soon after
// it was switched off, or cut off. One try in time shows that nothing in the way waits
// for longer; the others are the machine's.
func TestE2EFailover(t *testing.T) {
	features.Shows(t, 210)
	e := start(t)
	ns := e.namespace("failover")
	d := deployment("web", 4)
	d.Spec.Template.Spec.Tolerations = gone(0)
	e.createDeployment(ns, d)
	for _, fault := range []struct {
		how        string
		lose, back func(node string) error
	}{
		{"switched off", func(node string) error {
			// Its kernel is this one, and would answer on.
			return errors.Join(e.Partition(node), e.PowerOff(node))
		}, func(node string) error { return errors.Join(e.Heal(node), e.Start(t.Context(), node)) }},
		{"cut off", e.Partition, e.Heal},
	} {
		const tries = 4
		best := time.Duration(math.MaxInt64)
		for try := 1; try <= tries && best > failover; try++ {
			e.podsReady(ns, "app=web", 4)
			lost := e.other(e.leader(), "n1") // n1 is asked
			began := time.Now()
			e.must(fault.lose(lost))
			e.eventually(lost+" is not Ready", func(ctx context.Context) error {
				n, err := e.api.CoreV1().Nodes().Get(ctx, lost, metav1.GetOptions{})
				if err == nil && nodeReady(n) {
					err = errors.New("still Ready")
				}
				return err
			})
			noticed := time.Since(began)
			e.eventually("4 pods run on the others", func(ctx context.Context) error {
				list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=web"})
				n := 0
				for i := range list.Items {
					if p := &list.Items[i]; p.Spec.NodeName != lost && p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil {
						n++
					}
				}
				if err == nil && n < 4 {
					err = fmt.Errorf("%d of 4", n)
				}
				return err
			})
			took := time.Since(began)
			best = min(best, took)
			t.Logf("%s %s: not Ready after %s, its pods run elsewhere after %s (load %.1f)",
				lost, fault.how, noticed.Round(10*time.Millisecond), took.Round(10*time.Millisecond), loadAverage())
			e.must(fault.back(lost))
			e.eventually(lost+" is Ready and nothing of what it lost is there", func(ctx context.Context) error {
				n, err := e.api.CoreV1().Nodes().Get(ctx, lost, metav1.GetOptions{})
				if err == nil && (!nodeReady(n) || len(n.Spec.Taints) > 0) {
					err = fmt.Errorf("%+v, %+v", n.Status.Conditions, n.Spec.Taints)
				}
				return err
			})
			// All are on two nodes now: so that each has its part again.
			e.must(e.api.CoreV1().Pods(ns).DeleteCollection(t.Context(), metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](1)}, metav1.ListOptions{}))
			e.eventually("old pods are gone", func(ctx context.Context) error {
				list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
				for i := range list.Items {
					if list.Items[i].DeletionTimestamp != nil {
						return errors.Join(err, fmt.Errorf("%s is on its way out", list.Items[i].Name))
					}
				}
				return err
			})
		}
		if best > failover {
			say := t.Errorf
			if loadAverage() > 4*float64(runtime.NumCPU()) {
				say = t.Logf // this machine cannot tell
			}
			say("%s: pods ran elsewhere after %s at best, want %s at most", fault.how, best.Round(10*time.Millisecond), failover)
		}
	}
}

// loadAverage is how many programs have wanted a processor in the last minute.
func loadAverage() (n float64) {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	if _, err := fmt.Sscan(string(b), &n); err != nil {
		return 0
	}
	return n
}
