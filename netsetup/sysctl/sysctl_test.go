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
