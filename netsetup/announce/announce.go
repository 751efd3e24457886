// Package announce makes addresses this machine's in front of its neighbours:
// it puts them on the interface of a given address, from where the kernel
// answers who asks for them, and tells all neighbours at once (gratuitous ARP,
// unsolicited neighbour advertisement), so that an address that moved here from
// another machine is reached in a moment.
package announce

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/netsetup/internal/nlretry"
)

// Config of an Announcer; all fields are required but Logger.
type Config struct {
	// Node is an address of the interface on which addresses are announced.
	Node netip.Addr
	// File remembers which addresses are ours to take away, for the next process.
	File   string
	Logger *slog.Logger // default slog.Default()
}

// Announcer works in the network namespace in which it was opened. Safe for
// concurrent use.
type Announcer struct {
	cfg Config
	h   *netlink.Handle
	// fd sends frames. It belongs to the namespace it was opened in.
	fd int

	mu  sync.Mutex
	own []netip.Addr // those of the file
}

// Open binds an Announcer to the calling thread's network namespace. It
// announces nothing yet.
func Open(cfg Config) (*Announcer, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	a := &Announcer{cfg: cfg, fd: -1}
	b, err := os.ReadFile(cfg.File)
	if err == nil {
		err = json.Unmarshal(b, &a.own)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("announced addresses: %w", err)
	}
	if a.h, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	if a.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
		a.h.Close()
		return nil, fmt.Errorf("open a packet socket: %w", err)
	}
	return a, nil
}

// Close gives the sockets back; the addresses stay.
func (a *Announcer) Close() {
	a.h.Close()
	_ = unix.Close(a.fd)
}

// Set makes exactly those addresses this machine's; it may be called again at
// any time. One that cannot be set does not keep the others away.
func (a *Announcer) Set(want []netip.Addr) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(want) == 0 && len(a.own) == 0 {
		return nil
	}
	link, has, preferred, err := a.find()
	if err != nil {
		return fmt.Errorf("announce: %w", err)
	}
	// On disk before in the kernel: what is there is ours to take away.
	var record []netip.Addr
	for _, addr := range want {
		if !has[addr] || slices.Contains(a.own, addr) {
			record = append(record, addr)
		}
	}
	all := slices.Clone(record)
	for _, addr := range a.own {
		if !slices.Contains(all, addr) {
			all = append(all, addr)
		}
	}
	if !slices.Equal(all, a.own) {
		if err := a.save(all); err != nil {
			return err
		}
	}
	var errs []error
	kept := record
	for _, addr := range a.own {
		if slices.Contains(want, addr) {
			continue
		}
		if has[addr] {
			if err := a.h.AddrDel(link, single(addr)); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
				errs = append(errs, fmt.Errorf("remove %s: %w", addr, err))
				kept = append(kept, addr)
				continue
			}
			a.cfg.Logger.Info("an address is no longer announced here", "address", addr.String())
		}
	}
	for _, addr := range record {
		if has[addr] && !preferred[addr] {
			continue
		}
		if err := a.h.AddrReplace(link, single(addr)); err != nil {
			errs = append(errs, fmt.Errorf("add %s: %w", addr, err))
			continue
		}
		if has[addr] {
			continue // of a version before, which the machine would send from
		}
		a.cfg.Logger.Info("an address is announced here", "address", addr.String(), "interface", link.Attrs().Name)
		a.tell(link, addr)
	}
	if !slices.Equal(kept, a.own) {
		errs = append(errs, a.save(kept))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("announce: %w", err)
	}
	return nil
}

// Own are the addresses that are announced here.
func (a *Announcer) Own() []netip.Addr {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.own)
}

func (a *Announcer) save(addrs []netip.Addr) error {
	b, err := json.Marshal(addrs)
	if err == nil {
		err = durable.ReplaceFile(a.cfg.File, b, 0o600)
	}
	if err != nil {
		return fmt.Errorf("announced addresses: %w", err)
	}
	a.own = addrs
	return nil
}

// find returns the node's interface and the addresses it has; preferred are those
// of IPv6 that may be a sender's.
func (a *Announcer) find() (link netlink.Link, has, preferred map[netip.Addr]bool, err error) {
	addrs, err := nlretry.List(func() ([]netlink.Addr, error) { return a.h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, nil, nil, err
	}
	index := 0
	for _, k := range addrs {
		if ip, ok := netip.AddrFromSlice(k.IP); ok && ip.Unmap() == a.cfg.Node {
			index = k.LinkIndex
		}
	}
	if index == 0 {
		return nil, nil, nil, fmt.Errorf("no interface has the node's address %s", a.cfg.Node)
	}
	link, err = a.h.LinkByIndex(index)
	if err != nil {
		return nil, nil, nil, err
	}
	has, preferred = map[netip.Addr]bool{}, map[netip.Addr]bool{}
	for _, k := range addrs {
		if ip, ok := netip.AddrFromSlice(k.IP); ok && k.LinkIndex == index {
			ip = ip.Unmap()
			has[ip] = true
			preferred[ip] = ip.Is6() && k.Flags&unix.IFA_F_DEPRECATED == 0
		}
	}
	return link, has, preferred, nil
}

// Beside is an address of the other IP family on the interface that has the node's:
// one of a network rather than one that stands alone, and none that comes and goes or
// is announced here. Not valid: there is none.
func Beside(cfg Config) (netip.Addr, error) {
	a, err := Open(cfg)
	if err != nil {
		return netip.Addr{}, err
	}
	defer a.Close()
	link, _, _, err := a.find()
	if err != nil {
		return netip.Addr{}, err
	}
	family := netlink.FAMILY_V6
	if cfg.Node.Is6() {
		family = netlink.FAMILY_V4
	}
	addrs, err := nlretry.List(func() ([]netlink.Addr, error) { return a.h.AddrList(link, family) })
	if err != nil {
		return netip.Addr{}, err
	}
	var alone netip.Addr
	for _, k := range addrs {
		ip, ok := netip.AddrFromSlice(k.IP)
		ip = ip.Unmap()
		passing := k.Flags&(unix.IFA_F_DEPRECATED|unix.IFA_F_DADFAILED) != 0 || ip.Is6() && k.Flags&unix.IFA_F_TEMPORARY != 0
		if !ok || !ip.IsGlobalUnicast() || passing || slices.Contains(a.own, ip) {
			continue
		}
		if ones, bits := k.Mask.Size(); ones < bits {
			return ip, nil
		}
		if !alone.IsValid() {
			alone = ip
		}
	}
	return alone, nil
}

func single(addr netip.Addr) *netlink.Addr {
	n := &netlink.Addr{IPNet: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())}, Flags: unix.IFA_F_NODAD}
	if addr.Is6() {
		// Deprecated from the beginning: the kernel would prefer it as the sender's of
		// what the machine itself sends (RFC 6724), and it may move to another one.
		n.ValidLft, n.PreferedLft = forever, 0
	}
	return n
}

// forever is the lifetime of an address that has none (INFINITY_LIFE_TIME).
const forever = 1<<32 - 1

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
	f := append([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, mac...)
	f = append(f, 0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1)
	f = append(append(f, mac...), addr.AsSlice()...)
	f = append(f, 0, 0, 0, 0, 0, 0)
	return append(f, addr.AsSlice()...)
}

// advertisement is an unsolicited neighbour advertisement to all nodes
// (RFC 4861), with the override flag.
func advertisement(mac net.HardwareAddr, addr netip.Addr) []byte {
	all := netip.MustParseAddr("ff02::1")
	icmp := []byte{136, 0, 0, 0, 0x20, 0, 0, 0}
	icmp = append(icmp, addr.AsSlice()...)
	icmp = append(append(icmp, 2, 1), mac...)
	sum := uint32(0)
	add := func(b []byte) {
		for i := 0; i < len(b); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(b[i:]))
		}
	}
	add(addr.AsSlice())
	add(all.AsSlice())
	add([]byte{0, 0, 0, byte(len(icmp)), 0, 0, 0, unix.IPPROTO_ICMPV6})
	add(icmp)
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(icmp[2:], ^uint16(sum))
	f := append([]byte{0x33, 0x33, 0, 0, 0, 1}, mac...)
	f = append(f, 0x86, 0xdd, 0x60, 0, 0, 0, 0, byte(len(icmp)), unix.IPPROTO_ICMPV6, 255)
	f = append(append(f, addr.AsSlice()...), all.AsSlice()...)
	return append(f, icmp...)
}
