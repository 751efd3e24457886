// Package announce assigns addresses to this machine on its local network: it adds them
// to the interface of a given address, where the kernel answers ARP and neighbour
// solicitations, and announces them to all neighbours (gratuitous ARP, unsolicited
// neighbour advertisement), so that traffic of an address that moved here arrives at once.
// An address that is not set again expires after Config.Lifetime: a program that has
// ended leaves it to the machine that takes over.
package announce

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"math"
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

// Config of an Announcer; fields without a default are required.
type Config struct {
	// Node is an address of the interface on which addresses are announced.
	Node netip.Addr
	// File remembers which addresses are ours to take away, for the next process.
	File string
	// Lifetime is how long an address stays that is not set again, in whole seconds: at
	// least as long as a program is away that starts again, and not much longer than until
	// another machine takes over. Default 30 s.
	Lifetime time.Duration
	Logger   *slog.Logger // default slog.Default()
}

// Announcer works in the network namespace in which it was opened. Safe for
// concurrent use.
type Announcer struct {
	cfg Config
	h   *netlink.Handle
	fd  int // sends frames; it belongs to the namespace it was opened in

	mu   sync.Mutex
	own  []netip.Addr        // those of the file
	told map[netip.Addr]bool // those that this process has announced
	asks *questions          // Renew's

	watch watch // Answered's
}

// Open binds an Announcer to the calling thread's network namespace. It
// announces nothing yet.
func Open(cfg Config) (*Announcer, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Lifetime < time.Second {
		cfg.Lifetime = 30 * time.Second
	}
	a := &Announcer{cfg: cfg, fd: -1, told: map[netip.Addr]bool{}}
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
	for _, q := range []**questions{&a.asks, &a.watch.questions} {
		if *q, err = openQuestions(); err != nil {
			a.Close()
			return nil, err
		}
	}
	return a, nil
}

// Close gives the sockets back; the addresses stay.
func (a *Announcer) Close() {
	a.h.Close()
	_ = unix.Close(a.fd)
	a.asks.close()
	a.watch.questions.close()
}

// Renew has the addresses that are announced here stay, but for those that another
// machine answers for: it is for when it is not known whether they are this machine's
// still. One that stays by itself stays so. It takes answerTime where there are any.
func (a *Announcer) Renew() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.own) == 0 {
		return nil
	}
	link, has, err := a.find()
	if err != nil {
		return fmt.Errorf("announce: %w", err)
	}
	ours := slices.DeleteFunc(slices.Clone(a.own), func(addr netip.Addr) bool { return has[addr] == absent })
	var contested map[netip.Addr]bool
	own, err := a.macs(link)
	if err == nil {
		contested, err = a.ask(a.asks, link, own, ours, answerTime)
	}
	errs := []error{err}
	kept := slices.Clone(a.own)
	for _, addr := range ours {
		if !contested[addr] {
			if has[addr] == stays {
				continue
			}
			if err := a.h.AddrReplace(link, single(addr, a.cfg.Lifetime)); err != nil {
				errs = append(errs, fmt.Errorf("renew %s: %w", addr, err))
			}
			continue
		}
		if err := a.h.AddrDel(link, single(addr, a.cfg.Lifetime)); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			errs = append(errs, fmt.Errorf("remove %s: %w", addr, err))
			continue
		}
		kept = slices.DeleteFunc(kept, func(k netip.Addr) bool { return k == addr })
		a.cfg.Logger.Info("an address is no longer announced here: another machine answers for it", "address", addr.String())
	}
	if !slices.Equal(kept, a.own) {
		errs = append(errs, a.save(kept))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("announce: %w", err)
	}
	return nil
}

// Set makes exactly those addresses this machine's, for Config.Lifetime; it may be called
// again at any time. alone: no other machine can take them over, they stay until they are
// not wanted any more. One that cannot be set does not keep the others away.
func (a *Announcer) Set(want []netip.Addr, alone bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(want) == 0 && len(a.own) == 0 {
		return nil
	}
	link, has, err := a.find()
	if err != nil {
		return fmt.Errorf("announce: %w", err)
	}
	life := a.cfg.Lifetime
	if alone {
		life = forever
	}
	// On disk before in the kernel: what is there is ours to take away.
	var record []netip.Addr
	for _, addr := range want {
		if has[addr] == absent || slices.Contains(a.own, addr) {
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
		if has[addr] != absent {
			if err := a.h.AddrDel(link, single(addr, life)); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
				errs = append(errs, fmt.Errorf("remove %s: %w", addr, err))
				kept = append(kept, addr)
				continue
			}
			a.cfg.Logger.Info("an address is no longer announced here", "address", addr.String())
		}
	}
	for _, addr := range record {
		if err := a.h.AddrReplace(link, single(addr, life)); err != nil {
			errs = append(errs, fmt.Errorf("add %s: %w", addr, err))
			continue
		}
		if has[addr] == absent {
			a.cfg.Logger.Info("an address is announced here", "address", addr.String(), "interface", link.Attrs().Name)
		} else if a.told[addr] {
			continue
		}
		// One that a former process left may have been another machine's meanwhile.
		a.told[addr] = true
		a.tell(link, addr)
	}
	maps.DeleteFunc(a.told, func(addr netip.Addr, _ bool) bool { return !slices.Contains(kept, addr) })
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

// presence is whether an interface has an address.
type presence int

const (
	absent presence = iota
	passes          // it ends by itself
	stays
)

// find returns the node's interface and the addresses it has.
func (a *Announcer) find() (link netlink.Link, has map[netip.Addr]presence, err error) {
	addrs, err := nlretry.List(func() ([]netlink.Addr, error) { return a.h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, nil, err
	}
	index := 0
	for _, k := range addrs {
		if ip, ok := netip.AddrFromSlice(k.IP); ok && ip.Unmap() == a.cfg.Node {
			index = k.LinkIndex
		}
	}
	if index == 0 {
		return nil, nil, fmt.Errorf("no interface has the node's address %s", a.cfg.Node)
	}
	link, err = a.h.LinkByIndex(index)
	if err != nil {
		return nil, nil, err
	}
	has = map[netip.Addr]presence{}
	for _, k := range addrs {
		if ip, ok := netip.AddrFromSlice(k.IP); ok && k.LinkIndex == index {
			has[ip.Unmap()] = passes
			if k.Flags&unix.IFA_F_PERMANENT != 0 {
				has[ip.Unmap()] = stays
			}
		}
	}
	return link, has, nil
}

// Networks are those of the addresses of the interface that has the node's: neighbours
// ask there for addresses of these networks, and routers send them on by it.
func Networks(node netip.Addr) ([]netip.Prefix, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	a := &Announcer{cfg: Config{Node: node}, h: h}
	link, _, err := a.find()
	if err != nil {
		return nil, err
	}
	addrs, err := nlretry.List(func() ([]netlink.Addr, error) { return h.AddrList(link, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, err
	}
	var out []netip.Prefix
	for _, k := range addrs {
		ip, ok := netip.AddrFromSlice(k.IP)
		ones, bits := k.Mask.Size()
		if ip = ip.Unmap(); !ok || !ip.IsGlobalUnicast() || ones == bits {
			continue
		}
		if r := netip.PrefixFrom(ip, ones).Masked(); !slices.Contains(out, r) {
			out = append(out, r)
		}
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return out, nil
}

// forever is the lifetime of an address that stays.
const forever time.Duration = math.MaxUint32 * time.Second

// single is addr alone, for so long.
func single(addr netip.Addr, life time.Duration) *netlink.Addr {
	seconds := int(life / time.Second)
	n := &netlink.Addr{
		IPNet: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())}, Flags: unix.IFA_F_NODAD,
		ValidLft: seconds, PreferedLft: seconds,
	}
	if addr.Is6() {
		// Deprecated from the beginning: the kernel would prefer it as the sender's of
		// what the machine itself sends (RFC 6724), and it may move to another one.
		n.PreferedLft = 0
	}
	return n
}
