package nodeipam

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// TestStarvedNodes: nodes that there is no network for get one event, and are
// not tried again until a node with a network goes.
func TestStarvedNodes(t *testing.T) {
	const nodes, networks = 8, 4
	c := schedtest.New(t)
	for i := range nodes {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("n%d", i), UID: types.UID(fmt.Sprint("u", i))}}
		if _, err := c.Client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	env := loop.Env{
		Client: c.Client, Informers: informers.NewSharedInformerFactory(c.Client, 0),
		Events: loop.NewEvents(c.Client, clock.RealClock{}), Clock: clock.RealClock{},
	}
	l, err := New(env, []Range{{netip.MustParsePrefix("10.0.0.0/22"), 24}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	env.Informers.StartWithContext(ctx)
	wg.Go(func() {
		if err := l.Run(ctx); err != nil {
			t.Errorf("loop ended with %v", err)
		}
	})
	wg.Go(func() { _ = env.Events.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait(); env.Informers.Shutdown() })

	with := func() (names []string) {
		list, err := c.Client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, node := range list.Items {
			if node.Spec.PodCIDR != "" {
				names = append(names, node.Name)
			}
		}
		return names
	}
	events := func() (n int32) {
		list, err := c.Client.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range list.Items {
			n += max(1, e.Count)
		}
		return n
	}
	wait := func(what string, holds func() bool) {
		t.Helper()
		for end := time.Now().Add(time.Minute); !holds(); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("waited for %s: %v have networks, %d events", what, with(), events())
			}
		}
	}
	wait("four networks and an event for each of the others", func() bool { return len(with()) == networks && events() == nodes-networks })
	if err := c.Client.CoreV1().Nodes().Delete(t.Context(), with()[0], metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	wait("the freed network to be given", func() bool { return len(with()) == networks })
	// Those that are still without one were looked at again, and got no further event.
	if n := events(); n != nodes-networks {
		t.Errorf("%d events for %d nodes without a network", n, nodes-networks)
	}
}

// TestSecondRange: a node that has a network of the first range keeps it and gets
// one of the second, a new one gets both.
func TestSecondRange(t *testing.T) {
	c := schedtest.New(t)
	for name, cidr := range map[string]string{"old": "10.0.1.0/24", "new": ""} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)}, Spec: corev1.NodeSpec{PodCIDR: cidr}}
		if cidr != "" {
			node.Spec.PodCIDRs = []string{cidr}
		}
		if _, err := c.Client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	env := loop.Env{
		Client: c.Client, Informers: informers.NewSharedInformerFactory(c.Client, 0),
		Events: loop.NewEvents(c.Client, clock.RealClock{}), Clock: clock.RealClock{},
	}
	l, err := New(env, []Range{{netip.MustParsePrefix("10.0.0.0/22"), 24}, {netip.MustParsePrefix("fd00::/48"), 64}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	env.Informers.StartWithContext(ctx)
	wg.Go(func() {
		if err := l.Run(ctx); err != nil {
			t.Errorf("loop ended with %v", err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait(); env.Informers.Shutdown() })
	got := map[string][]string{}
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		list, err := c.Client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		done := true
		for _, n := range list.Items {
			got[n.Name] = n.Spec.PodCIDRs
			done = done && len(n.Spec.PodCIDRs) == 2
		}
		if done {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("after a minute: %v", got)
		}
	}
	six := netip.MustParsePrefix("fd00::/48")
	for name, cidrs := range got {
		if p := netip.MustParsePrefix(cidrs[1]); p.Bits() != 64 || !six.Contains(p.Addr()) {
			t.Errorf("%s: %v", name, cidrs)
		}
	}
	if got["old"][0] != "10.0.1.0/24" || got["new"][0] == got["old"][0] || got["new"][1] == got["old"][1] {
		t.Errorf("networks: %v", got)
	}
}
