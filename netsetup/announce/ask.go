package announce

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/internal/nlretry"
)

// answerTime is how long answers are waited for: neighbours of one segment answer in
// milliseconds.
const answerTime = 500 * time.Millisecond

// questions are the sockets, by family, where answers to questions come in, and nothing
// else. They belong to the namespace they were opened in. For one caller at a time.
type questions struct{ four, six int }

func openQuestions() (*questions, error) {
	four, err := answers(true)
	if err != nil {
		return nil, err
	}
	six, err := answers(false)
	if err != nil {
		_ = unix.Close(four)
		return nil, err
	}
	return &questions{four, six}, nil
}

func (q *questions) close() {
	if q != nil {
		_, _ = unix.Close(q.four), unix.Close(q.six)
	}
}

// macs are the hardware addresses of this machine, all of which may answer for its
// addresses in the segment of link. None where link is no Ethernet.
func (a *Announcer) macs(link netlink.Link) (map[string]bool, error) {
	mac := link.Attrs().HardwareAddr
	if len(mac) != 6 {
		return nil, nil
	}
	links, err := nlretry.List(a.h.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	own := map[string]bool{string(mac): true}
	for _, l := range links {
		own[string(l.Attrs().HardwareAddr)] = true
	}
	return own, nil
}

// ask asks the neighbours for addresses (RFC 5227, RFC 4862), and returns those for which
// another machine than that with the hardware addresses own answers within a time; it
// returns as soon as all are answered for. Where there is no Ethernet it asks nobody.
func (a *Announcer) ask(q *questions, link netlink.Link, own map[string]bool, addrs []netip.Addr, within time.Duration) (map[netip.Addr]bool, error) {
	if len(own) == 0 {
		return nil, nil
	}
	mac := link.Attrs().HardwareAddr
	asked := map[bool]map[netip.Addr]bool{true: {}, false: {}}
	for _, addr := range addrs {
		asked[addr.Is4()][addr] = true
	}
	answered := map[netip.Addr]bool{}
	for four, wanted := range asked {
		if len(wanted) == 0 {
			continue
		}
		protocol, fd := network(unix.ETH_P_IPV6), q.six
		if four {
			protocol, fd = network(unix.ETH_P_ARP), q.four
		}
		if err := drain(fd); err != nil { // of a former question; it is bound to nothing now
			return nil, err
		}
		if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: link.Attrs().Index}); err != nil {
			return nil, fmt.Errorf("listen for neighbours: %w", err)
		}
		defer func() {
			_ = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: network(unix.ETH_P_LOOPBACK), Ifindex: link.Attrs().Index})
		}()
		for addr := range wanted {
			frame := solicitation(mac, addr)
			if four {
				frame = arpRequest(mac, netip.IPv4Unspecified(), addr)
			}
			to := &unix.SockaddrLinklayer{Ifindex: link.Attrs().Index, Protocol: protocol, Halen: 6}
			copy(to.Addr[:], frame[:6])
			if err := unix.Sendto(a.fd, frame, 0, to); err != nil {
				return nil, fmt.Errorf("ask who has %s: %w", addr, err)
			}
		}
		missing := len(wanted)
		if err := hear(fd, within, func(frame []byte) (goOn bool) {
			if addr, by := answer(frame); wanted[addr] && !own[string(by)] && !answered[addr] {
				answered[addr] = true
				missing--
			}
			return missing > 0
		}); err != nil {
			return nil, err
		}
	}
	return answered, nil
}

// network is a protocol's number in the order of bytes of the network.
func network(protocol uint16) uint16 { return protocol<<8 | protocol>>8 }

// answers opens a socket to which the kernel gives what answer reads, once it is bound:
// all else that a node receives must neither cost it a copy nor drive an answer out.
func answers(four bool) (fd int, err error) {
	const ethernet, ip6 = 14, 40
	match := []bpf.Instruction{ // neighbour advertisements
		bpf.LoadAbsolute{Off: ethernet + 6, Size: 1}, bpf.JumpIf{Val: unix.IPPROTO_ICMPV6, SkipFalse: 3},
		bpf.LoadAbsolute{Off: ethernet + ip6, Size: 1}, bpf.JumpIf{Val: neighborAdvertisement, SkipFalse: 1},
	}
	if four { // ARP of IPv4
		match = []bpf.Instruction{
			bpf.LoadAbsolute{Off: 12, Size: 2}, bpf.JumpIf{Val: unix.ETH_P_ARP, SkipFalse: 3},
			bpf.LoadAbsolute{Off: ethernet + 2, Size: 2}, bpf.JumpIf{Val: unix.ETH_P_IP, SkipFalse: 1},
		}
	}
	raw, err := bpf.Assemble(append(match, bpf.RetConstant{Val: 1 << 16}, bpf.RetConstant{Val: 0}))
	if err != nil {
		return -1, fmt.Errorf("filter of a packet socket: %w", err)
	}
	filter := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		filter[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	// Nothing comes in before it is bound.
	if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, fmt.Errorf("open a packet socket: %w", err)
	}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}); err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("filter of a packet socket: %w", err)
	}
	return fd, nil
}

// neighborAdvertisement is its type in ICMPv6 (RFC 4861).
const neighborAdvertisement = 136

// hear passes on the frames that come within a time, as long as each says so. What has
// come in is read in any case, however late this program is given a processor.
func hear(fd int, within time.Duration, each func(frame []byte) (goOn bool)) error {
	buf := make([]byte, 2048)
	late := 0
	for end := time.Now().Add(within); ; {
		left := max(0, time.Until(end))
		if left == 0 {
			if late++; late > 4096 { // it never ends otherwise while frames come in
				return nil
			}
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int((left+time.Millisecond-1)/time.Millisecond))
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for neighbours: %w", err)
		}
		if n <= 0 {
			if left == 0 {
				return nil
			}
			continue
		}
		size, err := unix.Read(fd, buf)
		if err != nil {
			return fmt.Errorf("hear neighbours: %w", err)
		}
		if !each(buf[:size]) {
			return nil
		}
	}
}

// drain drops what has come in.
func drain(fd int) error {
	buf := make([]byte, 1)
	for {
		_, _, err := unix.Recvfrom(fd, buf, unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("hear neighbours: %w", err)
		}
	}
}

// answer is the address that a frame says its sender has, and the sender; not valid:
// it says nothing of the kind. Pure.
func answer(f []byte) (netip.Addr, net.HardwareAddr) {
	const ethernet, ip6 = 14, 40
	if len(f) < ethernet {
		return netip.Addr{}, nil
	}
	by, body := net.HardwareAddr(f[6:12]), f[ethernet:]
	switch {
	case f[12] == 0x08 && f[13] == 0x06 && len(body) >= 28 && body[2] == 0x08 && body[3] == 0 && body[4] == 6 && body[5] == 4:
		if addr := netip.AddrFrom4([4]byte(body[14:18])); !addr.IsUnspecified() { // an answer, or a machine that tells of itself
			return addr, body[8:14]
		}
	case f[12] == 0x86 && f[13] == 0xdd && len(body) >= ip6+24 && body[6] == unix.IPPROTO_ICMPV6 && body[7] == 255 && body[ip6] == neighborAdvertisement:
		return netip.AddrFrom16([16]byte(body[ip6+8 : ip6+24])), by
	}
	return netip.Addr{}, nil
}
