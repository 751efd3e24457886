package pathprobe

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// listenUDP opens a socket whose packets are never cut into fragments, and may
// be as long as the interface takes: what ICMP messages said of the way is not
// trusted (IP_PMTUDISC_PROBE, ip(7)).
func listenUDP(at netip.AddrPort) (*net.UDPConn, error) {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		cerr := c.Control(func(fd uintptr) {
			if at.Addr().Is4() {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE)
			} else {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE)
			}
		})
		if cerr != nil {
			return cerr
		}
		return err
	}}
	conn, err := lc.ListenPacket(context.Background(), "udp", at.String())
	if err != nil {
		return nil, err
	}
	return conn.(*net.UDPConn), nil
}

// kernelMTU is that of the interface by which the kernel sends to addr. That of
// the route is not asked: it may follow from what was measured, and must not keep
// a way that was mended from being found.
func kernelMTU(addr netip.Addr) (int, error) {
	routes, err := netlink.RouteGet(addr.AsSlice())
	if err != nil || len(routes) == 0 {
		return 0, fmt.Errorf("way to %s: %w", addr, err)
	}
	link, err := netlink.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return 0, fmt.Errorf("way to %s: %w", addr, err)
	}
	return link.Attrs().MTU, nil
}
