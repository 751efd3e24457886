// Package antispoof drops frames from pod ports of a bridge whose source MAC or IP address
// (ARP and neighbour discovery included) is not the pod's. It takes plain values and
// matches ports by interface group, so that other bridges and ports of the machine are
// not affected.
package antispoof

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/nft"
)

// TableName of our table in the bridge family.
const TableName = "clusterd_ports"

// Port is what one port of a bridge may send.
type Port struct {
	// Interface is the port's name on the node, at most 15 bytes.
	Interface string
	// MAC is the address of its owner's interface, of Ethernet.
	MAC net.HardwareAddr
	// Addrs are its owner's IP addresses.
	Addrs []netip.Addr
}

func (p Port) check() error {
	if p.Interface == "" || len(p.Interface) >= unix.IFNAMSIZ {
		return fmt.Errorf("port %q: its name must have 1 to %d bytes", p.Interface, unix.IFNAMSIZ-1)
	}
	if len(p.MAC) != 6 {
		return fmt.Errorf("port %s: hardware address %q: must be of Ethernet", p.Interface, p.MAC)
	}
	for _, a := range p.Addrs {
		if !a.IsValid() || a.IsUnspecified() || a.Is4In6() {
			return fmt.Errorf("port %s: address %q: must be one of IPv4 or IPv6", p.Interface, a)
		}
	}
	return nil
}

// Config of a Guard.
type Config struct {
	Kernel nft.TableKernel // required
	// Groups are the interface groups that are judged: a frame that came in by a
	// port of one of them, and is not among what Ports allow, is dropped. Required.
	Groups []uint32
	Logger *slog.Logger // default slog.Default()
	// Repaired is called when another program's change of the table was undone; see
	// nft.KeeperConfig.
	Repaired func(table, what string)
}

// Guard keeps the kernel's table in step with ports. Safe for concurrent use.
type Guard struct {
	groups []uint32
	keeper *nft.Keeper

	mu    sync.Mutex // guards ports, and the order in which they reach the kernel
	ports map[string]Port
	begun bool // Set was called
}

// New returns a Guard; it changes nothing yet: rules of a former process stay in
// force until the first Set.
func New(cfg Config) *Guard {
	return &Guard{
		groups: cfg.Groups, ports: map[string]Port{},
		keeper: nft.NewKeeper(nft.KeeperConfig{Kernel: cfg.Kernel, Logger: cfg.Logger, Repaired: cfg.Repaired}),
	}
}

// Set makes the ports those given and no others.
func (g *Guard) Set(ports []Port) error {
	now := map[string]Port{}
	for _, p := range ports {
		if err := p.check(); err != nil {
			return err
		}
		now[p.Interface] = p
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.begun = true
	return g.change(now)
}

// Add allows a port, in the place of what there was of that name. It is in force
// on return.
func (g *Guard) Add(p Port) error {
	if err := p.check(); err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.begun {
		return fmt.Errorf("port %s: the ports that there are were not set yet", p.Interface)
	}
	now := maps.Clone(g.ports)
	now[p.Interface] = p
	return g.change(now)
}

// Remove allows the port nothing more; an unknown one is no error.
func (g *Guard) Remove(name string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, ok := g.ports[name]; !ok {
		return nil
	}
	now := maps.Clone(g.ports)
	delete(now, name)
	return g.change(now)
}

// change brings the kernel to the ports; the caller holds mu.
func (g *Guard) change(now map[string]Port) error {
	ports := make([]Port, 0, len(now))
	for _, name := range slices.Sorted(maps.Keys(now)) {
		ports = append(ports, now[name])
	}
	if err := g.keeper.Set(Compile(g.groups, ports)); err != nil {
		return fmt.Errorf("rules against forged addresses (the kernel needs nftables for bridges, CONFIG_NF_TABLES_BRIDGE): %w", err)
	}
	g.ports = now
	return nil
}

// Run puts right what others change, until ctx ends.
func (g *Guard) Run(ctx context.Context) { g.keeper.Run(ctx) }

// Check undoes the changes of other programs at once.
func (g *Guard) Check() error { return g.keeper.Check() }

// CleanUp removes the table.
func (g *Guard) CleanUp() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.begun, g.ports = false, map[string]Port{}
	return g.keeper.CleanUp(nft.Table{Name: TableName, Family: nft.Bridge})
}
