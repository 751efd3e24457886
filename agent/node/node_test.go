package node_test

import (
	"context"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/clusterd/clusterd/agent/node"
	"github.com/clusterd/clusterd/features"
)

func ready(n *v1.Node) v1.NodeCondition {
	for _, c := range n.Status.Conditions {
		if c.Type == v1.NodeReady {
			return c
		}
	}
	return v1.NodeCondition{}
}

func TestNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := fake.NewClientset()
		var down atomic.Bool
		down.Store(true)
		dir := t.TempDir()
		n := node.New(node.Config{
			Name: "n1", IPs: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}, Client: api, Version: "v1.37.0", MaxPods: 50, DataDir: dir, Labels: map[string]string{"zone": "a"}, Port: 6443,
			Addresses: []v1.NodeAddress{{Type: v1.NodeExternalIP, Address: "203.0.113.1"}},
			Images: func(context.Context) ([]v1.ContainerImage, error) {
				return []v1.ContainerImage{{Names: []string{"small"}, SizeBytes: 1}, {Names: []string{"big"}, SizeBytes: 9}}, nil
			},
			Ready: func() []node.Fault {
				if down.Load() {
					return []node.Fault{{Reason: "NetworkNotReady", Message: "no range"}}
				}
				return nil
			},
		})
		if a := n.Object().Status.Allocatable; a.Pods().Value() != 50 || a.Cpu().IsZero() || a.Memory().IsZero() {
			t.Errorf("before the first answer of the API: %v", a)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := n.Run(ctx); err != nil {
				t.Error(err)
			}
		})
		defer wg.Wait()
		defer cancel()
		get := func() *v1.Node {
			t.Helper()
			o, err := api.CoreV1().Nodes().Get(ctx, "n1", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			return o
		}
		pass := func(d time.Duration) { time.Sleep(d); synctest.Wait() } // the bubble's time
		pass(time.Second)
		o := get()
		for k, want := range map[string]string{v1.LabelHostname: "n1", v1.LabelOSStable: "linux", v1.LabelArchStable: runtime.GOARCH, "zone": "a"} {
			if o.Labels[k] != want {
				t.Errorf("label %s: %q", k, o.Labels[k])
			}
		}
		if c := ready(o); c.Status != v1.ConditionFalse || c.Message != "no range" {
			t.Errorf("condition %+v", c)
		}
		if o.Status.Images[0].Names[0] != "big" || o.Status.Addresses[0].Address != "192.0.2.1" || o.Status.NodeInfo.KubeletVersion != "v1.37.0" || o.Status.DaemonEndpoints.KubeletEndpoint.Port != 6443 {
			t.Errorf("status %+v", o.Status)
		}
		var addrs []string
		for _, a := range o.Status.Addresses {
			addrs = append(addrs, string(a.Type)+" "+a.Address)
		}
		if want := []string{"InternalIP 192.0.2.1", "InternalIP 2001:db8::1", "ExternalIP 203.0.113.1", "Hostname n1"}; !slices.Equal(addrs, want) {
			t.Errorf("addresses %q, want %q", addrs, want)
		}
		down.Store(false)
		n.Poke()
		pass(time.Second)
		if c := ready(get()); c.Status != v1.ConditionTrue {
			t.Errorf("condition %+v", c)
		}

		// Nothing changes: the Lease is renewed, the status is not written.
		writes := func() (status, lease int) {
			for _, a := range api.Actions() {
				switch {
				case a.Matches("update", "nodes") && a.(k8stesting.UpdateAction).GetSubresource() == "status":
					status++
				case a.Matches("update", "leases") || a.Matches("create", "leases"):
					lease++
				}
			}
			return status, lease
		}
		s0, l0 := writes()
		pass(time.Minute)
		s1, l1 := writes()
		if l1-l0 != 6 {
			t.Errorf("%d renewals in a minute", l1-l0)
		}
		if s1 != s0 {
			// free memory and disk of the machine do not count; what else?
			t.Errorf("%d status writes in a minute without a change", s1-s0)
		}
		pass(5 * time.Minute)
		if s2, _ := writes(); s2 == s1 {
			t.Error("no status write in five minutes")
		}

		// Somebody else calls the node not ready: put right at once.
		o = get()
		for i := range o.Status.Conditions {
			if o.Status.Conditions[i].Type == v1.NodeReady {
				o.Status.Conditions[i].Status = v1.ConditionUnknown
			}
		}
		if _, err := api.CoreV1().Nodes().UpdateStatus(ctx, o, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		pass(time.Second)
		if c := ready(get()); c.Status != v1.ConditionTrue {
			t.Errorf("condition %+v", c)
		}

		// Deleted: it comes back.
		if err := api.CoreV1().Nodes().Delete(ctx, "n1", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		pass(time.Second)
		if c := ready(get()); c.Status != v1.ConditionTrue {
			t.Errorf("after deletion: %+v", c)
		}
	})
}

// TestStatusWritesAreSpread: nodes that started at the same moment do not write
// their unchanged statuses at the same moment for ever.
func TestStatusWritesAreSpread(t *testing.T) {
	features.ShowsWithDoubles(t, 170)
	synctest.Test(t, func(t *testing.T) {
		const nodes, period = 10, 5 * time.Minute
		var mu sync.Mutex
		writes := make([][]time.Time, nodes)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		dir := t.TempDir()
		for i := range nodes {
			// The other one builds a REST mapper at each update.
			api := fake.NewSimpleClientset() // what it leaves out is not used
			api.PrependReactor("update", "nodes", func(a k8stesting.Action) (bool, kruntime.Object, error) {
				if a.GetSubresource() == "status" {
					mu.Lock()
					writes[i] = append(writes[i], time.Now())
					mu.Unlock()
				}
				return false, nil, nil
			})
			n := node.New(node.Config{Name: "n1", IPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Client: api, DataDir: dir})
			wg.Go(func() {
				if err := n.Run(ctx); err != nil {
					t.Error(err)
				}
			})
		}
		time.Sleep(21 * time.Minute)
		mu.Lock()
		defer mu.Unlock()
		at := map[time.Time]bool{}
		for i, w := range writes {
			if len(w) < 4 {
				t.Fatalf("node %d has written %d times in 21 minutes", i, len(w))
			}
			w = w[len(w)-3:] // the first writes tell what has changed
			for j := 1; j < len(w); j++ {
				// It is looked at each 10.4 s at most.
				if d := w[j].Sub(w[j-1]); d < period || d > period*104/100+10400*time.Millisecond {
					t.Errorf("node %d writes after %s", i, d)
				}
			}
			at[w[2]] = true
		}
		if len(at) != nodes {
			t.Errorf("%d nodes write at %d moments", nodes, len(at))
		}
	})
}

// TestRead: the object is read from the API though the watch brings nothing, and
// reading goes on while the API does not answer.
func TestRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := fake.NewClientset(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "u", Labels: map[string]string{"disk": "ssd"}}})
		var refused atomic.Int32
		api.PrependReactor("get", "nodes", func(k8stesting.Action) (bool, kruntime.Object, error) {
			if refused.Add(1) <= 3 {
				return true, nil, context.DeadlineExceeded
			}
			return false, nil, nil
		})
		n := node.New(node.Config{Name: "n1", Client: api, DataDir: t.TempDir()})
		n.Read(t.Context())
		if got := n.Object(); got.Labels["disk"] != "ssd" || got.Status.Allocatable.Cpu().IsZero() {
			t.Errorf("read: labels %v, allocatable %v", got.Labels, got.Status.Allocatable)
		}
		if err := api.CoreV1().Nodes().Delete(t.Context(), "n1", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		n.Read(t.Context()) // a node that is no more ends it
	})
}
