package alloc_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"

	"github.com/clusterd/clusterd/apis"
	"github.com/clusterd/clusterd/apis/server/alloc"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// services are the Services that exist, with their address.
type services struct {
	mu   sync.Mutex
	held map[alloc.Owner]netip.Addr
}

func (s *services) holds(_ context.Context, owner alloc.Owner, address netip.Addr) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.held[owner] == address, nil
}

func newStorage(t *testing.T) storage.Interface {
	t.Helper()
	config := &storagebackend.ConfigForResource{Config: storagebackend.Config{Codec: apis.Codecs.LegacyCodec(coordinationv1.SchemeGroupVersion)}}
	store, _, err := servertest.NewMemory().Decorator()(config, alloc.Prefix, alloc.Key(alloc.Prefix),
		func() runtime.Object { return &coordinationv1.Lease{} }, func() runtime.Object { return &coordinationv1.LeaseList{} }, nil, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return store
}

func newAddresses(t *testing.T, store storage.Interface, cidr string, holds alloc.Holds) *alloc.Addresses {
	t.Helper()
	a, err := alloc.New(store, netip.MustParsePrefix(cidr), holds, alloc.Others{})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func owner(name string) alloc.Owner {
	return alloc.Owner{Namespace: "default", Name: name, UID: types.UID("uid of " + name)}
}

func TestAnAbandonedAddressIsTakenBack(t *testing.T) {
	s := &services{held: map[alloc.Owner]netip.Addr{}}
	now := time.Unix(1_700_000_000, 0)
	a := newAddresses(t, newStorage(t), "10.0.0.0/28", s.holds)
	a.SetNow(func() time.Time { return now })
	address := netip.MustParseAddr("10.0.0.5")

	// Reserved, and its server died before the Service was written.
	if err := a.Take(t.Context(), address, owner("lost")); err != nil {
		t.Fatal(err)
	}
	if err := a.Take(t.Context(), address, owner("new")); !errors.Is(err, alloc.ErrTaken) {
		t.Errorf("a moment later: %v, want ErrTaken", err)
	}
	if err := a.Take(t.Context(), address, owner("lost")); err != nil {
		t.Errorf("the same owner again: %v", err)
	}
	now = now.Add(time.Hour)
	if err := a.Take(t.Context(), address, owner("new")); err != nil {
		t.Errorf("an hour later: %v", err)
	}
	s.held[owner("new")] = address
	now = now.Add(time.Hour)
	if err := a.Take(t.Context(), address, owner("third")); !errors.Is(err, alloc.ErrTaken) {
		t.Errorf("while a Service holds it: %v, want ErrTaken", err)
	}
	if err := a.Release(t.Context(), address, owner("lost")); err != nil {
		t.Errorf("release by the former owner: %v", err)
	}
	if err := a.Take(t.Context(), address, owner("third")); !errors.Is(err, alloc.ErrTaken) {
		t.Errorf("after a release by another: %v, want ErrTaken", err)
	}
}

func TestServersNeverGiveTheSameAddress(t *testing.T) {
	s := &services{held: map[alloc.Owner]netip.Addr{}}
	store := newStorage(t)
	servers := []*alloc.Addresses{newAddresses(t, store, "10.0.0.0/24", s.holds), newAddresses(t, store, "10.0.0.0/24", s.holds)}
	var mu sync.Mutex
	given := map[netip.Addr]string{}
	var group sync.WaitGroup
	for i := range 254 {
		group.Go(func() {
			name := fmt.Sprint("s", i)
			address, err := servers[i%2].TakeAny(t.Context(), owner(name))
			if err != nil {
				t.Errorf("%s: %v", name, err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if other, ok := given[address]; ok {
				t.Errorf("%s went to %s and %s", address, other, name)
			}
			given[address] = name
		})
	}
	group.Wait()
	if len(given) != 254 {
		t.Errorf("%d addresses given, want all 254", len(given))
	}
	if _, err := servers[0].TakeAny(t.Context(), owner("more")); !errors.Is(err, alloc.ErrFull) {
		t.Errorf("%v, want ErrFull", err)
	}
}

// TestOthers: a second range is used when the first is full, and what is kept for
// one Service is not given to others.
func TestOthers(t *testing.T) {
	s := &services{held: map[alloc.Owner]netip.Addr{}}
	first, second, kept := netip.MustParsePrefix("10.0.0.0/29"), netip.MustParsePrefix("192.0.2.0/29"), netip.MustParseAddr("192.0.2.3")
	var ranges []netip.Prefix
	a, err := alloc.New(newStorage(t), first, s.holds, alloc.Others{
		Ranges: func(context.Context) ([]netip.Prefix, error) { return ranges, nil },
		Reserved: func(_ context.Context, address netip.Addr, by alloc.Owner) (bool, error) {
			return address == kept && by != owner("heir"), nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	fill := func(want netip.Prefix, n int) {
		t.Helper()
		for i := range n {
			name := fmt.Sprint(want, i)
			address, err := a.TakeAny(t.Context(), owner(name))
			if err != nil || !want.Contains(address) || address == kept {
				t.Fatalf("%s: got %s, %v", name, address, err)
			}
		}
	}
	fill(first, 6)
	if address, err := a.TakeAny(t.Context(), owner("more")); !errors.Is(err, alloc.ErrFull) {
		t.Fatalf("got %s, %v, want ErrFull", address, err)
	}
	if err := a.Take(t.Context(), kept, owner("heir")); !errors.Is(err, alloc.ErrOutside) {
		t.Errorf("before there is a second range: %v, want ErrOutside", err)
	}
	ranges = []netip.Prefix{netip.MustParsePrefix("2001:db8::/108"), netip.MustParsePrefix("198.51.100.0/31"), first, second}
	fill(second, 5)
	if address, err := a.TakeAny(t.Context(), owner("more")); !errors.Is(err, alloc.ErrFull) {
		t.Errorf("got %s, %v, want ErrFull", address, err)
	}
	if err := a.Take(t.Context(), kept, owner("more")); !errors.Is(err, alloc.ErrTaken) {
		t.Errorf("what is kept for another: %v, want ErrTaken", err)
	}
	if err := a.Take(t.Context(), kept, owner("heir")); err != nil {
		t.Error(err)
	}
	// A range that is gone takes nothing from those who have it.
	ranges = nil
	if err := a.Release(t.Context(), kept, owner("heir")); err != nil {
		t.Error(err)
	}
	ranges = []netip.Prefix{second}
	if err := a.Take(t.Context(), kept, owner("heir")); err != nil {
		t.Errorf("after its release: %v", err)
	}
}

func TestSixthVersion(t *testing.T) {
	a := newAddresses(t, newStorage(t), "fd00:10::/108", (&services{}).holds)
	address, err := a.TakeAny(t.Context(), owner("six"))
	if err != nil || !netip.MustParsePrefix("fd00:10::/108").Contains(address) {
		t.Errorf("%v %v", address, err)
	}
}
