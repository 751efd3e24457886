package podnetwork

import (
	"log/slog"
	"net/netip"
	"slices"
	"testing"

	"github.com/clusterd/clusterd/netsetup/netnstest"
	"github.com/clusterd/clusterd/netsetup/podnet"
)

// TestRootNetworksOfFormerProcess: the next process knows whose the networks
// are before it knows the node's range, and keeps those of the pods that live;
// one that an earlier version named by its pod is found too.
func TestRootNetworksOfFormerProcess(t *testing.T) {
	netnstest.NeedRoot(t)
	ns, dir := netnstest.New(t), t.TempDir()
	former := newReadyNode(t, ns, dir, "10.42.1.0/24", 0)
	addr := map[string]netip.Addr{}
	for _, uid := range []string{"ended", "gone", "lives"} {
		_, ips, err := former.Attach(t.Context(), uid, false)
		if err != nil {
			t.Fatal(err)
		}
		addr[uid] = ips[0]
	}
	named, err := former.spaces.Create("uid-of-old")
	if err == nil {
		err = former.links.Attach(podnet.Pod{NetNS: named, HostIf: podnet.HostIf("uid-of-old"), Bridge: former.cfg.Bridge, Addrs: []podnet.Address{{Addr: netip.MustParsePrefix("10.42.1.200/24")}}})
	}
	if err != nil {
		t.Fatal(err)
	}
	former.close()

	n := readyNode{t: t, ns: ns}
	ns.Do(func() (err error) {
		n.Network, err = New(Config{NodeName: "n1", NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Dir: dir, Logger: slog.New(slog.DiscardHandler)})
		return err
	})
	defer n.close()
	pinned := func() []string {
		names, err := n.spaces.List()
		if err != nil {
			t.Fatal(err)
		}
		return names
	}
	for _, uid := range []string{"ended", "uid-of-old"} {
		if err := n.Detach(t.Context(), uid); err != nil {
			t.Errorf("%s: %v", uid, err)
		}
	}
	want := []string{addr["gone"].String(), addr["lives"].String()}
	slices.Sort(want)
	if got := pinned(); !slices.Equal(got, want) {
		t.Errorf("namespaces %v, want %v", got, want)
	}
	ns.Do(func() error { return n.open([]netip.Prefix{netip.MustParsePrefix("10.42.1.0/24")}) })
	if err := n.Live(t.Context(), func() []string { return []string{"lives"} }); err != nil {
		t.Error(err)
	}
	if got := pinned(); !slices.Equal(got, []string{addr["lives"].String()}) {
		t.Errorf("namespaces %v, want that of %v alone", got, addr["lives"])
	}
	if got := n.allocated(); len(got) != 1 || got["lives"] == "" {
		t.Errorf("on record: %v", got)
	}
	// The bug: a pod that came after the list of those that there are was made, and
	// before all was done, lost its address again.
	attached := make(chan error, 1)
	if err := n.Live(t.Context(), func() []string {
		if n.looking.TryRLock() {
			n.looking.RUnlock()
			t.Error("pods get a network while the list of those that there are is made")
		}
		go func() {
			_, _, err := n.Attach(t.Context(), "comes", false)
			attached <- err
		}()
		return []string{"lives"}
	}); err != nil {
		t.Error(err)
	}
	if err := <-attached; err != nil {
		t.Error(err)
	}
	if got := n.allocated(); len(got) != 2 || got["comes"] == "" || !slices.Contains(pinned(), got["comes"]) {
		t.Errorf("on record: %v, namespaces %v; want one of the pod that came too", got, pinned())
	}
	if err := n.Detach(t.Context(), "comes"); err != nil {
		t.Error(err)
	}
	if _, ips, err := n.Attach(t.Context(), "lives", false); err != nil || ips[0] != addr["lives"] {
		t.Errorf("attached again: %v %v, want %v", ips, err, addr["lives"])
	}
	if err := n.Detach(t.Context(), "lives"); err != nil {
		t.Error(err)
	}
	n.eventually("no interface", func() bool { return len(n.interfaces()) == 0 })
}
