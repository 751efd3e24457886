// Package wireguard encrypts what goes from one node to another: the keys, and
// the peers of an interface of WireGuard as one value. The interface itself, its
// addresses and its routes are made by package overlay.
package wireguard

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// Overhead is what WireGuard adds to a packet at most: a header of IPv6, of UDP
// and its own, and a tag.
const Overhead = 40 + 8 + 16 + 16

// Peer is another node.
type Peer struct {
	Key      Key
	Endpoint netip.AddrPort
	// Allowed are the ranges whose packets are sent to it, and taken from it.
	Allowed []netip.Prefix
}

// State is what an interface is to be.
type State struct {
	Private Key
	// Hold leaves the interface the private key that it has, if it has one: the
	// others do not know the new one yet.
	Hold  bool
	Port  int
	Peers []Peer
}

// check refuses what the kernel would take for something else.
func (s State) check() error {
	if s.Private == (Key{}) {
		return errors.New("WireGuard: there is no private key")
	}
	keys, ranges := map[Key]bool{s.Private.PublicKey(): true}, map[netip.Prefix]bool{}
	for _, p := range s.Peers {
		if p.Key == (Key{}) || keys[p.Key] {
			return fmt.Errorf("WireGuard: peer at %s: its key %s is none, this node's or another peer's", p.Endpoint, p.Key)
		}
		if !p.Endpoint.IsValid() || p.Endpoint.Port() == 0 || len(p.Allowed) == 0 {
			return fmt.Errorf("WireGuard: peer %s: address %s and ranges %v are required", p.Key, p.Endpoint, p.Allowed)
		}
		keys[p.Key] = true
		for _, r := range p.Allowed {
			if !r.IsValid() || ranges[r.Masked()] {
				return fmt.Errorf("WireGuard: peer %s: the range %s is invalid or another peer's", p.Key, r)
			}
			ranges[r.Masked()] = true
		}
	}
	return nil
}

// Changes are what has to be set in the kernel for an interface to become what is
// wanted; false: nothing. A peer of which nothing changes is not touched: its
// session goes on. Pure.
func Changes(have wgtypes.Device, want State) (wgtypes.Config, bool) {
	var c wgtypes.Config
	differs := false
	if have.PrivateKey != want.Private && (have.PrivateKey == (Key{}) || !want.Hold) {
		c.PrivateKey, differs = &want.Private, true
	}
	if have.ListenPort != want.Port {
		c.ListenPort, differs = &want.Port, true
	}
	wanted := map[Key]bool{}
	for _, p := range want.Peers {
		wanted[p.Key] = true
	}
	there := map[Key]wgtypes.Peer{}
	for _, p := range have.Peers {
		there[p.PublicKey] = p
		if !wanted[p.PublicKey] {
			c.Peers = append(c.Peers, wgtypes.PeerConfig{PublicKey: p.PublicKey, Remove: true})
		}
	}
	for _, p := range want.Peers {
		now, known := there[p.Key]
		change := wgtypes.PeerConfig{PublicKey: p.Key, UpdateOnly: known}
		touched := !known
		if !known || endpointOf(now) != p.Endpoint {
			change.Endpoint, touched = net.UDPAddrFromAddrPort(p.Endpoint), true
		}
		if allowed := sorted(p.Allowed); !known || !slices.Equal(allowedOf(now), allowed) {
			change.ReplaceAllowedIPs, touched = true, true
			for _, r := range allowed {
				change.AllowedIPs = append(change.AllowedIPs, net.IPNet{IP: r.Addr().AsSlice(), Mask: net.CIDRMask(r.Bits(), r.Addr().BitLen())})
			}
		}
		if known && now.PersistentKeepaliveInterval != 0 {
			change.PersistentKeepaliveInterval, touched = new(time.Duration), true
		}
		if known && now.PresharedKey != (Key{}) {
			change.PresharedKey, touched = &Key{}, true
		}
		if touched {
			c.Peers = append(c.Peers, change)
		}
	}
	return c, differs || len(c.Peers) > 0
}

func endpointOf(p wgtypes.Peer) netip.AddrPort {
	if p.Endpoint == nil {
		return netip.AddrPort{}
	}
	a := p.Endpoint.AddrPort()
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

func allowedOf(p wgtypes.Peer) []netip.Prefix {
	var out []netip.Prefix
	for _, n := range p.AllowedIPs {
		a, ok := netip.AddrFromSlice(n.IP)
		bits, _ := n.Mask.Size()
		if ok {
			out = append(out, netip.PrefixFrom(a.Unmap(), bits))
		}
	}
	return sorted(out)
}

func sorted(ranges []netip.Prefix) []netip.Prefix {
	out := make([]netip.Prefix, len(ranges))
	for i, r := range ranges {
		out[i] = r.Masked()
	}
	slices.SortFunc(out, func(a, b netip.Prefix) int { return strings.Compare(a.String(), b.String()) })
	return out
}

// Control is the kernel's door to interfaces of WireGuard: *wgctrl.Client, or
// Fake in tests.
type Control interface {
	// Device says what an interface is; an error that is os.ErrNotExist: there is
	// none.
	Device(name string) (*wgtypes.Device, error)
	ConfigureDevice(name string, cfg wgtypes.Config) error
	Close() error
}

// OpenControl binds a Control to the calling thread's network namespace. The
// kernel has to have the module by then: an interface of it was made.
func OpenControl() (Control, error) {
	c, err := wgctrl.New()
	if err != nil {
		return nil, fmt.Errorf("open WireGuard: %w", err)
	}
	return c, nil
}

// Set brings the interface to the state.
func Set(c Control, name string, want State) error {
	if err := want.check(); err != nil {
		return err
	}
	have, err := c.Device(name)
	if err != nil {
		return fmt.Errorf("WireGuard interface %s: %w", name, err)
	}
	change, differs := Changes(*have, want)
	if !differs {
		return nil
	}
	if err := c.ConfigureDevice(name, change); err != nil {
		return fmt.Errorf("WireGuard interface %s: %w", name, err)
	}
	return nil
}

// Link is what an interface tells of a peer.
type Link struct {
	Key       Key
	Endpoint  netip.AddrPort // where its last packet came from
	Handshake time.Time      // the last one; zero: there was none
	Received  int64          // bytes
	Sent      int64
}

// Links are the interface's peers by their keys' order; none where there is no
// such interface.
func Links(c Control, name string) ([]Link, error) {
	d, err := c.Device(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("WireGuard interface %s: %w", name, err)
	}
	var out []Link
	for _, p := range d.Peers {
		out = append(out, Link{Key: p.PublicKey, Endpoint: endpointOf(p), Handshake: p.LastHandshakeTime, Received: p.ReceiveBytes, Sent: p.TransmitBytes})
	}
	slices.SortFunc(out, func(a, b Link) int { return bytes.Compare(a.Key[:], b.Key[:]) })
	return out, nil
}
