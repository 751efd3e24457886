package announce

import (
	"encoding/binary"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// tellTimes is how often an address is announced, tellEvery apart: a frame may be
// lost, and a switch may be learning.
const (
	tellTimes = 3
	tellEvery = 250 * time.Millisecond
)

// tell sends the announcement; losing it costs only the time until neighbours ask.
func (a *Announcer) tell(link netlink.Link, addr netip.Addr) {
	mac := link.Attrs().HardwareAddr
	if len(mac) != 6 {
		return // no Ethernet: there is no ARP
	}
	frame, protocol := arp(mac, addr), uint16(unix.ETH_P_ARP)
	if addr.Is6() {
		frame, protocol = advertisement(mac, addr), unix.ETH_P_IPV6
	}
	to := &unix.SockaddrLinklayer{Ifindex: link.Attrs().Index, Protocol: protocol<<8 | protocol>>8, Halen: 6}
	copy(to.Addr[:], frame[:6])
	send := func() {
		if err := unix.Sendto(a.fd, frame, 0, to); err != nil {
			a.cfg.Logger.Debug("an address could not be announced", "address", addr.String(), "err", err)
		}
	}
	send()
	for i := 1; i < tellTimes; i++ {
		time.AfterFunc(time.Duration(i)*tellEvery, send) // after Close it fails and says so
	}
}

// arp is a gratuitous ARP request: "who has addr? tell addr".
func arp(mac net.HardwareAddr, addr netip.Addr) []byte {
	return arpRequest(mac, addr, addr)
}

func arpRequest(mac net.HardwareAddr, from, who netip.Addr) []byte {
	f := append([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, mac...)
	f = append(f, 0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1)
	f = append(append(f, mac...), from.AsSlice()...)
	f = append(f, 0, 0, 0, 0, 0, 0)
	return append(f, who.AsSlice()...)
}

// advertisement is an unsolicited neighbour advertisement to all nodes
// (RFC 4861), with the override flag.
func advertisement(mac net.HardwareAddr, addr netip.Addr) []byte {
	all := netip.MustParseAddr("ff02::1")
	icmp := []byte{136, 0, 0, 0, 0x20, 0, 0, 0}
	icmp = append(icmp, addr.AsSlice()...)
	icmp = append(append(icmp, 2, 1), mac...)
	return icmp6(mac, addr, all, icmp)
}

// solicitation asks who has addr, as one that has none yet (RFC 4862).
func solicitation(mac net.HardwareAddr, addr netip.Addr) []byte {
	b := addr.As16()
	group := netip.AddrFrom16([16]byte{0xff, 0x02, 11: 1, 12: 0xff, 13: b[13], 14: b[14], 15: b[15]})
	return icmp6(mac, netip.IPv6Unspecified(), group, append([]byte{135, 0, 0, 0, 0, 0, 0, 0}, b[:]...))
}

// icmp6 is a frame from mac with a message of ICMPv6 to a group, whose checksum it fills
// in.
func icmp6(mac net.HardwareAddr, from, to netip.Addr, icmp []byte) []byte {
	sum := uint32(0)
	add := func(b []byte) {
		for i := 0; i < len(b); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(b[i:]))
		}
	}
	add(from.AsSlice())
	add(to.AsSlice())
	add([]byte{0, 0, 0, byte(len(icmp)), 0, 0, 0, unix.IPPROTO_ICMPV6})
	add(icmp)
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(icmp[2:], ^uint16(sum))
	group := to.As16()
	f := append([]byte{0x33, 0x33}, group[12:]...)
	f = append(f, mac...)
	f = append(f, 0x86, 0xdd, 0x60, 0, 0, 0, 0, byte(len(icmp)), unix.IPPROTO_ICMPV6, 255)
	f = append(append(f, from.AsSlice()...), to.AsSlice()...)
	return append(f, icmp...)
}
