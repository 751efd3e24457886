package lb

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/clusterd/clusterd/netsetup/nft"
)

// busy is a kernel whose rules change whenever they are read.
type busy struct{ nft.FakeTables }

func (*busy) Read(nft.Table, bool) (nft.State, error) { return nft.State{}, nft.ErrChanging }

// The bug: the first rules, and those after a failure, waited until the packet filter
// came to rest: on some machines for ever.
func TestBusyPacketFilter(t *testing.T) {
	kernel := &busy{}
	b := New(kernel, quiet())
	f := Frontend{Addr: netip.MustParseAddr("10.96.0.9"), Proto: tcp, Port: 80}
	to := &Backend{Endpoints: []Endpoint{{Addr: netip.MustParseAddrPort("10.42.1.2:8080")}}}
	for i := range nft.UnreadTries - 1 {
		if err := b.Update(map[Frontend]*Backend{f: to}); !errors.Is(err, nft.ErrChanging) {
			t.Fatalf("try %d: %v", i, err)
		}
	}
	if err := b.Update(map[Frontend]*Backend{f: to}); err != nil {
		t.Fatalf("the last try: %v", err)
	}
	have, err := kernel.FakeTables.Read(skeleton(Base{}), true)
	if err != nil || len(have.Sets["endpoints4"]) != 1 {
		t.Errorf("the endpoint is not in force: %+v, %v", have.Sets["endpoints4"], err)
	}
	// Once it is as wanted, it is not thrown away for being unreadable.
	if err := b.Check(true); !errors.Is(err, nft.ErrChanging) {
		t.Errorf("check: %v", err)
	}
}
