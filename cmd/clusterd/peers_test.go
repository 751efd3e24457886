package main

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
)

// TestPeersThatAreAway: a peer that died before this node was started stays in
// the file. Without it `clusterctl recover` named it by its id, at no address.
func TestPeersThatAreAway(t *testing.T) {
	peer := func(id, addr string) nodedir.SeenPeer {
		return nodedir.SeenPeer{ID: id, Name: "n" + id, Addr: netip.MustParseAddrPort(addr)}
	}
	one, two, three := peer("1", "192.0.2.1:6443"), peer("2", "192.0.2.2:6443"), peer("3", "192.0.2.3:6443")
	moved := peer("2", "192.0.2.22:6443")
	got := keptPeers([]nodedir.SeenPeer{one, moved}, []nodedir.SeenPeer{two, three, peer("4", "192.0.2.4:6443")}, func(id string) bool { return id == "4" })
	if diff := cmp.Diff([]nodedir.SeenPeer{one, moved, three}, got, cmpopts.EquateComparable(netip.AddrPort{})); diff != "" {
		t.Error(diff)
	}
}
