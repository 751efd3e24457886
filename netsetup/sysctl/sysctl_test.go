package sysctl

import (
	"errors"
	"os"
	"testing"

	"github.com/clusterd/clusterd/netsetup/netnstest"
)

func TestKeysStayBelowNet(t *testing.T) {
	for _, key := range []string{"kernel.hostname", "net/../../kernel/hostname", "net..x", "", "net.a/b"} {
		if _, err := Get(key); err == nil {
			t.Errorf("Get(%q) passed", key)
		}
	}
}

func TestUnknownKey(t *testing.T) {
	if err := Set(map[string]string{"net.ipv4.nosuch_key": "1"}); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("got %v", err)
	}
}

func TestRootRouter(t *testing.T) {
	netnstest.NeedRoot(t)
	ns := netnstest.New(t)
	ns.Do(func() error {
		for range 2 {
			if err := Set(Router()); err != nil {
				return err
			}
		}
		for k, want := range Router() {
			if got, err := Get(k); err != nil || got != want {
				t.Errorf("%s = %q, %v; want %q", k, got, err, want)
			}
		}
		return nil
	})
}

// TestRootKeepRouters: interfaces that accept router advertisements go on with it when the
// machine becomes one, and what an administrator chose stays.
func TestRootKeepRouters(t *testing.T) {
	netnstest.NeedRoot(t)
	ns, other := netnstest.New(t), netnstest.New(t)
	for _, name := range []string{"hears", "deaf"} {
		netnstest.Join(t, ns, name, other, name)
	}
	ns.Do(func() error {
		const hears, deaf = "net.ipv6.conf.hears.accept_ra", "net.ipv6.conf.deaf.accept_ra"
		if err := Set(map[string]string{hears: "1", deaf: "0"}); err != nil {
			return err
		}
		if err := errors.Join(KeepRouters(), Set(Router6())); err != nil {
			return err
		}
		for key, want := range map[string]string{hears: "2", deaf: "0", "net.ipv6.conf.all.forwarding": "1"} {
			if got, err := Get(key); err != nil || got != want {
				t.Errorf("%s = %q, %v; want %q", key, got, err, want)
			}
		}
		// It is a router now, and a 1 that is set later is intended.
		if err := Set(map[string]string{hears: "1"}); err != nil {
			return err
		}
		if err := KeepRouters(); err != nil {
			return err
		}
		if got, err := Get(hears); err != nil || got != "1" {
			t.Errorf("a router's own choice became %q, %v", got, err)
		}
		return nil
	})
}
