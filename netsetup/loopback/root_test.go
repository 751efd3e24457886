package loopback

import (
	"net"
	"net/netip"
	"testing"

	"github.com/clusterd/clusterd/netsetup/netnstest"
)

func TestRootLoopback(t *testing.T) {
	netnstest.NeedRoot(t)
	ns := netnstest.New(t)
	ns.Do(func() error {
		i, err := Open()
		if err != nil {
			return err
		}
		defer i.Close()
		for _, text := range []string{"10.96.0.10", "fd00:96::a"} {
			addr := netip.MustParseAddr(text)
			for range 2 {
				if err := i.Ensure(addr); err != nil {
					return err
				}
			}
			c, err := net.ListenPacket("udp", netip.AddrPortFrom(addr, 53).String())
			if err != nil {
				t.Errorf("the address cannot be listened on: %v", err)
			} else {
				c.Close()
			}
			for range 2 {
				if err := i.Remove(addr); err != nil {
					return err
				}
			}
			if c, err := net.ListenPacket("udp", netip.AddrPortFrom(addr, 53).String()); err == nil {
				t.Errorf("%s is still there", addr)
				c.Close()
			}
		}
		return nil
	})
}
