// Package netnstest gives tests network namespaces of their own, so that what
// they do to the network is neither seen outside nor left behind.
package netnstest

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/clusterd/clusterd/netsetup/netns"
)

// NeedRoot skips a test unless CLUSTERD_ROOT is set. Once it is asked for, it
// fails rather than skips when it cannot run.
func NeedRoot(t testing.TB) {
	t.Helper()
	if os.Getenv("CLUSTERD_ROOT") == "" {
		t.Skip("needs root: CLUSTERD_ROOT=1 go test -run Root ./netsetup/... ./agent/...")
	}
	if os.Geteuid() != 0 {
		t.Fatal("CLUSTERD_ROOT is set, but this is not root")
	}
}

// NS is a network namespace that lives as long as its test.
type NS struct {
	t    testing.TB
	Path string
}

// New makes a network namespace with the loopback up; it is dropped when the
// test ends. What tests left that were killed is dropped before.
func New(t testing.TB) *NS {
	t.Helper()
	sweep.Do(func() {
		if err := dropRemains(); err != nil {
			t.Logf("namespaces of killed tests: %v", err)
		}
	})
	mine, err := marked(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	dir, err := netns.Open(filepath.Join(t.TempDir(), mine))
	if err != nil {
		t.Fatal(err)
	}
	path, err := dir.Create("ns")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := dir.Delete("ns"); err != nil {
			t.Errorf("drop the namespace: %v", err)
		}
	})
	ns := &NS{t: t, Path: path}
	ns.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	})
	return ns
}

// Do runs fn inside the namespace and fails the test on an error. fn must
// not call the test's Fatal: it runs in a goroutine of its own.
func (n *NS) Do(fn func() error) {
	n.t.Helper()
	if err := netns.Do(n.Path, fn); err != nil {
		n.t.Fatal(err)
	}
}

// Join connects a and b by a veth pair whose ends are named by ifA and ifB,
// both up. Addresses are the caller's.
func Join(t testing.TB, a *NS, ifA string, b *NS, ifB string) {
	t.Helper()
	target, err := os.Open(b.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = target.Close() }()
	a.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = ifA
		veth := &netlink.Veth{
			LinkAttrs:     attrs,
			PeerName:      ifB,
			PeerNamespace: netlink.NsFd(int(target.Fd())),
		}
		if err := netlink.LinkAdd(veth); err != nil {
			return fmt.Errorf("veth %s: %w", ifA, err)
		}
		return netlink.LinkSetUp(veth)
	})
	b.Do(func() error {
		link, err := netlink.LinkByName(ifB)
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(link)
	})
}
