package e2e

import (
	"context"
	"errors"
	"fmt"
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
// while another server can, stay Ready; one that is switched off is not Ready long
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
	since := e.readySince("a1")

	t.Run("restarted", func(t *testing.T) {
		if err := e.Kill("a1"); err != nil {
			t.Fatal(err)
		}
		if err := e.Start(t.Context(), "a1"); err != nil {
			t.Fatal(err)
		}
		e.staysReady("a1", since)
	})
	t.Run("out of the leader's reach alone", func(t *testing.T) {
		hole := &netlink.Route{Dst: netlink.NewIPNet(leader.Addr.AsSlice()), Type: unix.RTN_BLACKHOLE}
		if err := e.Do("a1", func() error { return netlink.RouteAdd(hole) }); err != nil {
			t.Fatal(err)
		}
		e.staysReady("a1", since)
		if err := e.Do("a1", func() error { return netlink.RouteDel(hole) }); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("switched off", func(t *testing.T) {
		began := time.Now()
		if err := e.PowerOff("a1"); err != nil {
			t.Fatal(err)
		}
		// Its kernel is this one, and would answer on.
		if err := e.Partition("a1"); err != nil {
			t.Fatal(err)
		}
		noticed := e.eventually("a1 is not Ready", func(ctx context.Context) error {
			n, err := e.api.CoreV1().Nodes().Get(ctx, "a1", metav1.GetOptions{})
			if err == nil && nodeReady(n) {
				err = errors.New("still Ready")
			}
			return err
		})
		// Leases are renewed every 10 s.
		if lease := nodelifecycle.Grace - 10*time.Second; noticed > lease {
			t.Errorf("noticed after %s: its Lease alone shows it after %s and more", noticed, lease)
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

// readySince is when the node's condition Ready became what it is, which must be True.
func (e *env) readySince(name string) metav1.Time {
	e.t.Helper()
	n, err := e.api.CoreV1().Nodes().Get(e.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
			return c.LastTransitionTime
		}
	}
	e.t.Fatalf("%s is not Ready: %+v", name, n.Status.Conditions)
	return metav1.Time{}
}

// staysReady watches the node for longer than a suspicion and the questions that
// follow it take.
func (e *env) staysReady(name string, since metav1.Time) {
	e.t.Helper()
	for end := time.Now().Add(8 * time.Second); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
		if at := e.readySince(name); !at.Equal(&since) {
			e.t.Fatalf("%s was not Ready in between: it is since %s, before it was since %s", name, at, since)
		}
	}
}
