package netpol

import (
	"context"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/clusterd/clusterd/netsetup/policy"
)

// noRules is an Enforcer that has nothing to do.
type noRules struct{}

func (noRules) Set([]policy.Group) error { return nil }
func (noRules) Run(context.Context)      {}

// TestGuardWithoutAPI: while the API cannot be read a static pod starts, and
// one from the API does not.
func TestGuardWithoutAPI(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, err := New(Config{
			NodeName: "n1", Client: fake.NewClientset(), Enforcer: noRules{},
			Static: func(uid types.UID) bool { return uid == "static" },
		})
		if err != nil {
			t.Fatal(err)
		}
		// Nothing runs, so nothing was ever read.
		addrs := []netip.Addr{netip.MustParseAddr("10.244.0.7")}
		if err := m.Guard(t.Context(), "static", addrs); err != nil {
			t.Errorf("static pod: %v", err)
		}
		if err := m.Guard(t.Context(), "other", addrs); err == nil {
			t.Error("a pod of the API started before the policies were read")
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := m.Guard(ctx, "static", addrs); err == nil {
			t.Error("the caller's end is no leave to start")
		}
	})
}

// countedRules counts how often rules are set.
type countedRules struct{ sets atomic.Int32 }

func (c *countedRules) Set([]policy.Group) error { c.sets.Add(1); return nil }
func (*countedRules) Run(context.Context)        {}

// The bug: changes were gathered only until the node's first pod had started, as
// one that runs was taken for one that waits to start: every change of any pod of
// the cluster translated all policies by itself.
func TestChangesAreGathered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rules := &countedRules{}
		pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "d", UID: "web"}, Spec: v1.PodSpec{NodeName: "n1"}}
		one := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "d"}}
		m, err := New(Config{NodeName: "n1", Client: fake.NewClientset(pod, one), Enforcer: rules})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		wg.Go(func() { _ = m.Run(ctx) })
		if err := m.Guard(ctx, "web", []netip.Addr{netip.MustParseAddr("10.244.0.7")}); err != nil {
			t.Fatal(err)
		}
		settle := func() { time.Sleep(time.Second); synctest.Wait() } // of the bubble
		settle()
		before := rules.sets.Load()
		m.touch()
		synctest.Wait()
		m.touch()
		settle()
		if n := rules.sets.Load() - before; n != 1 {
			t.Errorf("two changes at once, with a pod that runs: the rules were set %d times, want once", n)
		}
		// One that waits is not held up.
		began := time.Now()
		if err := m.Guard(ctx, "web", []netip.Addr{netip.MustParseAddr("10.244.0.8")}); err != nil || time.Since(began) >= batch {
			t.Errorf("a pod waited %s (%v)", time.Since(began), err)
		}
	})
}
