package netnstest

import (
	"errors"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Capture hands look every frame that the interface sends and receives, from the
// link layer's header on, until the test ends. within runs a function in the
// namespace of the interface, as NS.Do does. look is called from one goroutine of
// Capture's and must not keep the frame.
func Capture(t testing.TB, within func(func() error), device string, look func(frame []byte)) {
	t.Helper()
	const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8 // in network order
	var fd int
	within(func() error {
		link, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all); err != nil {
			return err
		}
		return errors.Join(unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: link.Attrs().Index}),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}))
	})
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, 1<<16)
		for {
			select {
			case <-done:
				return
			default:
			}
			n, _, err := unix.Recvfrom(fd, buf, 0)
			if err != nil {
				continue // the time is over; look whether to end
			}
			look(buf[:n])
		}
	})
	t.Cleanup(func() {
		close(done)
		wg.Wait()
		_ = unix.Close(fd)
	})
}
