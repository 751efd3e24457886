package podnet

import (
	"context"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/netnstest"
)

func TestBucket(t *testing.T) {
	for _, tt := range []struct {
		bits         uint64
		rate         uint64
		burst, queue uint32
	}{
		{1_000, 125, 25_000, 25_000 + 128<<10},
		{1_000_000, 125_000, 128 << 10, 256 << 10},
		{1_000_000_000, 125_000_000, 1_250_000, 7_500_000},
		{1_000_000_000_000_000, 125_000_000_000_000, 256 << 20, 512 << 20},
	} {
		if rate, burst, queue := bucket(tt.bits); rate != tt.rate || burst != tt.burst || queue != tt.queue {
			t.Errorf("%d bits: got %d %d %d, want %d %d %d", tt.bits, rate, burst, queue, tt.rate, tt.burst, tt.queue)
		}
	}
}

// limits are the rates, in bytes a second, of the two ends of a pod's pair; 0:
// there is none.
func (n node) limits(t *testing.T, p Pod) string {
	t.Helper()
	rate := func(h *netlink.Handle, name string) (rate uint64) {
		link, err := h.LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		all, err := h.QdiscList(link)
		if err != nil {
			t.Fatal(err)
		}
		for _, q := range all {
			if tbf, ok := q.(*netlink.Tbf); ok {
				rate = tbf.Rate
			}
		}
		return rate
	}
	var inside *netlink.Handle
	if err := netns.Do(p.NetNS, func() (err error) {
		inside, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer inside.Close()
	return fmt.Sprint(rate(n.net.h, p.HostIf), rate(inside, "eth0"))
}

func TestRootLimit(t *testing.T) {
	netnstest.NeedRoot(t)
	n := newNode(t)
	if err := n.net.EnsureBridge(bridge); err != nil {
		t.Fatal(err)
	}
	p := n.pod(t, "a", "10.42.1.2/24")
	if err := n.net.Attach(p); err != nil {
		t.Fatal(err)
	}
	limit := func(in, out uint64) {
		t.Helper()
		if err := n.net.Limit(Limits{NetNS: p.NetNS, HostIf: p.HostIf, In: in, Out: out}); err != nil {
			t.Fatalf("%d %d: %v", in, out, err)
		}
	}
	for _, tt := range []struct {
		in, out uint64
		want    string
	}{
		{0, 0, "0 0"}, {1_000, 1_000, "125 125"}, {80_000_000_000, 0, "10000000000 0"}, {0, 1_000_000, "0 125000"}, {0, 0, "0 0"},
		{8_000_000, 8_000_000, "1000000 1000000"}, {8_000_000, 8_000_000, "1000000 1000000"},
	} {
		limit(tt.in, tt.out)
		if got := n.limits(t, p); got != tt.want {
			t.Errorf("limits %d %d: the rates are %s, want %s", tt.in, tt.out, got, tt.want)
		}
	}
	// The pod is attached again, as after a crash: what bounds it stays.
	if err := n.net.Attach(p); err != nil {
		t.Fatal(err)
	}

	var l net.Listener
	if err := netns.Do(p.NetNS, func() (err error) {
		l, err = new(net.ListenConfig).Listen(t.Context(), "tcp", "10.42.1.2:0")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	// 1.5 MB at 1 MB a second, of which the burst and a part of the queue go at
	// once. A busy machine makes it slower, never faster.
	const size, least = 1_500_000, time.Second
	for _, sends := range []bool{false, true} {
		received := make(chan error, 1)
		go func() {
			conn, err := l.Accept()
			if err == nil {
				defer func() { _ = conn.Close() }()
				if sends {
					_, err = conn.Write(make([]byte, size))
				} else {
					_, err = io.CopyN(io.Discard, conn, size)
				}
			}
			received <- err
		}()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		var conn net.Conn
		n.Do(func() (err error) {
			conn, err = new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
			return err
		})
		_ = conn.SetDeadline(time.Now().Add(time.Minute))
		start := time.Now()
		var err error
		if sends {
			_, err = io.CopyN(io.Discard, conn, size)
		} else {
			_, err = conn.Write(make([]byte, size))
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := <-received; err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took < least {
			t.Errorf("the pod sends: %t: %d bytes went in %s", sends, size, took)
		}
		_ = conn.Close()
		cancel()
	}
	limit(0, 0)
	if got := n.limits(t, p); got != "0 0" {
		t.Errorf("the rates are %s after they were taken away", got)
	}
}
