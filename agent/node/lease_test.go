package node_test

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/clusterd/clusterd/agent/node"
	"github.com/clusterd/clusterd/apis/coordination"
)

// fencer notes what it is asked for, and how the Lease is meanwhile.
type fencer struct {
	mu    sync.Mutex
	began time.Time
	held  bool
	lease func() string
	said  []string
	last  int64
}

func (f *fencer) note(what string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.said = append(f.said, what+" "+f.lease())
}

func (f *fencer) take() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := f.said
	f.said = nil
	return out
}

func (f *fencer) Promises(context.Context) bool { return true }
func (f *fencer) Now() int64                    { return int64(time.Since(f.began)) }
func (f *fencer) Held(context.Context) bool     { return f.held }
func (f *fencer) Renewed(_ context.Context, began int64) {
	f.note("renewed")
	f.last = began
}
func (f *fencer) End(context.Context) error    { f.note("end"); return nil }
func (f *fencer) Settle(context.Context) error { f.note("settle"); return nil }

// A Lease that was taken comes back in steps, and pods get time only while it is
// held.
func TestLeaseComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := fake.NewClientset()
		leases := api.CoordinationV1().Leases(node.LeaseNamespace)
		get := func() *coordinationv1.Lease {
			// Past the client, whose reactors hold its lock.
			l, err := api.Tracker().Get(coordinationv1.SchemeGroupVersion.WithResource("leases"), node.LeaseNamespace, "n1")
			if apierrors.IsNotFound(err) {
				return nil
			}
			if err != nil {
				t.Fatal(err)
			}
			return l.(*coordinationv1.Lease).DeepCopy()
		}
		f := &fencer{began: time.Now(), lease: func() string {
			switch l := get(); {
			case l == nil:
				return "none"
			case coordination.Taken(l):
				return "taken"
			case coordination.Returning(l):
				return "returning"
			case coordination.Promised(l):
				return "held"
			}
			return "held without a promise"
		}}
		// The twin of the API refuses no update: one with an old version is refused here.
		api.PrependReactor("update", "leases", func(a k8stesting.Action) (bool, kruntime.Object, error) {
			l := a.(k8stesting.UpdateAction).GetObject().(*coordinationv1.Lease)
			if had := get(); had != nil && *had.Spec.HolderIdentity != "n1" && !coordination.Returning(l) {
				return true, nil, apierrors.NewConflict(coordinationv1.Resource("leases"), "n1", nil)
			}
			return false, nil, nil
		})
		n := node.New(node.Config{Name: "n1", IPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Client: api, DataDir: t.TempDir(), Fence: f, LeaseTime: 40 * time.Second})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := n.Run(ctx); err != nil {
				t.Error(err)
			}
		})
		defer wg.Wait()
		defer cancel()
		pass := func(d time.Duration) { time.Sleep(d); synctest.Wait() }
		expect := func(when string, want ...string) {
			t.Helper()
			if got := f.take(); !slices.Equal(got, want) {
				t.Errorf("%s: %s; want %s", when, strings.Join(got, ", "), strings.Join(want, ", "))
			}
		}
		pass(5 * time.Second)
		expect("a new node", "end returning", "settle returning", "renewed held")
		pass(20 * time.Second)
		expect("in peace", "renewed held", "renewed held")
		if f.last < int64(19*time.Second) || f.last > int64(21*time.Second) {
			t.Errorf("the last renewal began at %s", time.Duration(f.last))
		}

		taken := get()
		coordination.Take(taken, "node-controller", time.Now())
		if err := api.Tracker().Update(coordinationv1.SchemeGroupVersion.WithResource("leases"), taken, node.LeaseNamespace); err != nil {
			t.Fatal(err)
		}
		pass(10 * time.Second)
		expect("taken", "end taken", "settle returning", "renewed held")
		if l := get(); *l.Spec.LeaseTransitions != 3 || *l.Spec.HolderIdentity != "n1" {
			t.Errorf("%+v", l.Spec)
		}

		for _, held := range []bool{true, false} {
			f.held = held
			if err := leases.Delete(ctx, "n1", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			pass(20 * time.Second)
			got := f.take()
			if ended := slices.Contains(got, "end returning"); ended == held || got[len(got)-1] != "renewed held" {
				t.Errorf("the Lease was deleted, pods may run %v: %s", held, got)
			}
		}
	})
}

func TestRenewDeadline(t *testing.T) {
	if d := node.RenewDeadline(40 * time.Second); d != 30*time.Second {
		t.Errorf("%s of a Lease of 40 s", d)
	}
}

// TestLeaseIsTriedAgainSoon: a renewal that failed does not wait for the next
// period, and then renewals go on at their pace.
func TestLeaseIsTriedAgainSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := fake.NewClientset()
		began := time.Now()
		var mu sync.Mutex
		var creates, updates []time.Duration
		api.PrependReactor("create", "leases", func(k8stesting.Action) (bool, kruntime.Object, error) {
			mu.Lock()
			defer mu.Unlock()
			if creates = append(creates, time.Since(began)); len(creates) < 3 {
				return true, nil, apierrors.NewNotFound(coordinationv1.Resource("namespaces"), node.LeaseNamespace)
			}
			return false, nil, nil
		})
		api.PrependReactor("update", "leases", func(k8stesting.Action) (bool, kruntime.Object, error) {
			mu.Lock()
			defer mu.Unlock()
			updates = append(updates, time.Since(began))
			return false, nil, nil
		})
		n := node.New(node.Config{Name: "n1", IPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Client: api, DataDir: t.TempDir(), LeaseTime: 40 * time.Second})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := n.Run(ctx); err != nil {
				t.Error(err)
			}
		})
		time.Sleep(25 * time.Second)
		cancel()
		wg.Wait()
		if len(creates) != 3 || creates[2]-creates[0] != 600*time.Millisecond {
			t.Errorf("it was made at %v", creates)
		}
		if len(updates) != 2 || updates[0]-creates[2] != 10*time.Second || updates[1]-updates[0] != 10*time.Second {
			t.Errorf("it was renewed at %v", updates)
		}
	})
}
