package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/sched/nodelifecycle"
)

// TestE2EAgentLoss: an agent that restarts, and one that the leader cannot reach
// while another server can, are not taken for dead; one that is switched off is not Ready long
// before its Lease ends, and its pods that tolerate no time are replaced.
func TestE2EAgentLoss(t *testing.T) {
	e := startBare(t, 2, func(c *cluster.Config) { c.Agents = 2 })
	e.ready(4)
	ns := e.namespace("agentloss")
	d := deployment("web", 4)
	d.Spec.Template.Spec.Tolerations = gone(0)
	d.Spec.Template.Spec.NodeSelector = map[string]string{"node-role.kubernetes.io/agent": ""}
	e.createDeployment(ns, d)
	e.podsReady(ns, "app=web", 4)
	leader := e.node(e.leader())

	t.Run("restarted", func(t *testing.T) {
		e.staysAlive("a1", func() {
			e.must(e.Kill("a1"))
			e.must(e.Start(t.Context(), "a1"))
		}, func() {})
	})
	t.Run("out of the leader's reach alone", func(t *testing.T) {
		hole := &netlink.Route{Dst: netlink.NewIPNet(leader.Addr.AsSlice()), Type: unix.RTN_BLACKHOLE}
		e.staysAlive("a1",
			func() { e.must(e.Do("a1", func() error { return netlink.RouteAdd(hole) })) },
			func() { e.must(e.Do("a1", func() error { return netlink.RouteDel(hole) })) })
	})
	t.Run("switched off", func(t *testing.T) {
		began := time.Now()
		// One try in time shows it: a busy machine makes the others long.
		const tries = 3
		var noticed time.Duration
		for try := 1; ; try++ {
			// Its kernel is this one, and would answer on.
			e.must(errors.Join(e.PowerOff("a1"), e.Partition("a1")))
			var lost *corev1.Node
			noticed = e.eventually("a1 is not Ready", func(ctx context.Context) (err error) {
				lost, err = e.api.CoreV1().Nodes().Get(ctx, "a1", metav1.GetOptions{})
				if err == nil && nodeReady(lost) {
					err = errors.New("still Ready")
				}
				return err
			})
			lease, err := e.api.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(t.Context(), "a1", metav1.GetOptions{})
			e.must(err)
			i := slices.IndexFunc(lost.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeReady })
			after := lost.Status.Conditions[i].LastTransitionTime.Sub(lease.Spec.RenewTime.Time)
			if after < nodelifecycle.Grace {
				break
			}
			t.Logf("noticed %s after its Lease was renewed: that alone shows it after %s", after, nodelifecycle.Grace)
			if try == tries {
				t.Errorf("noticed too late %d times", tries)
				break
			}
			back := time.Now()
			e.must(errors.Join(e.Heal("a1"), e.Start(t.Context(), "a1")))
			e.backSince(back, "a1")
		}
		e.eventually("its pods are replaced on a2", func(ctx context.Context) error {
			list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=web"})
			if err != nil {
				return err
			}
			n := 0
			for _, p := range list.Items {
				if p.Spec.NodeName == "a2" && podReady(&p) && p.DeletionTimestamp == nil {
					n++
				}
			}
			if n != 4 {
				return fmt.Errorf("%d of 4", n)
			}
			return nil
		})
		t.Logf("an agent switched off: not Ready after %s, its pods replaced and Ready after %s",
			noticed.Round(time.Millisecond), time.Since(began).Round(time.Millisecond))
	})
}

// node returns the machine of that name.
func (e *env) node(name string) cluster.Node {
	for _, n := range e.Nodes() {
		if n.Name == name {
			return n
		}
	}
	e.t.Fatalf("no machine is called %s", name)
	return cluster.Node{}
}

// takenForDead is how often the leader has said that the node is unreachable.
func (e *env) takenForDead(name string) (n int32) {
	e.t.Helper()
	list, err := e.api.CoreV1().Events("").List(e.t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + name + ",reason=NodeNotReady"})
	if err != nil {
		e.t.Fatal(err)
	}
	for _, event := range list.Items {
		n += max(1, event.Count)
	}
	return n
}

// staysAlive lets a fault befall the node and looks for longer than a suspicion and the
// questions that follow it take whether the leader takes it for dead; then the fault is
// mended. On a machine that is too busy to answer in time it tries again.
func (e *env) staysAlive(name string, fault, mend func()) {
	e.t.Helper()
	const attempts = 3
	for attempt := 1; ; attempt++ {
		before := e.takenForDead(name)
		fault()
		stayed := true
		for end := time.Now().Add(10 * time.Second); stayed && time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
			stayed = e.takenForDead(name) == before
		}
		mend()
		if stayed {
			return
		}
		if attempt == attempts {
			e.t.Fatalf("%s was taken for dead %d times", name, attempts)
		}
		e.t.Logf("%s was taken for dead in attempt %d", name, attempt)
	}
}
