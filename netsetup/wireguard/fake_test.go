package wireguard

import (
	"fmt"
	"net"
	"os"
	"slices"
	"sync"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// Fake is a Control in memory that does what the kernel does: a range has one peer,
// the last that it was given to. Its interfaces are those of Devices.
type Fake struct {
	mu      sync.Mutex
	Devices map[string]*wgtypes.Device
	Calls   int // of ConfigureDevice
}

// Device implements Control.
func (f *Fake) Device(name string) (*wgtypes.Device, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	d := f.Devices[name]
	if d == nil {
		return nil, os.ErrNotExist
	}
	out := *d
	out.Peers = slices.Clone(d.Peers)
	return &out, nil
}

// ConfigureDevice implements Control.
func (f *Fake) ConfigureDevice(name string, cfg wgtypes.Config) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	d := f.Devices[name]
	if d == nil {
		return os.ErrNotExist
	}
	f.Calls++
	if cfg.PrivateKey != nil {
		d.PrivateKey, d.PublicKey = *cfg.PrivateKey, cfg.PrivateKey.PublicKey()
		d.Peers = slices.DeleteFunc(d.Peers, func(p wgtypes.Peer) bool { return p.PublicKey == d.PublicKey })
	}
	if cfg.ListenPort != nil {
		d.ListenPort = *cfg.ListenPort
	}
	if cfg.ReplacePeers {
		d.Peers = nil
	}
	for _, c := range cfg.Peers {
		if err := configurePeer(d, c); err != nil {
			return err
		}
	}
	return nil
}

func configurePeer(d *wgtypes.Device, c wgtypes.PeerConfig) error {
	at := slices.IndexFunc(d.Peers, func(p wgtypes.Peer) bool { return p.PublicKey == c.PublicKey })
	switch {
	case c.Remove:
		if at >= 0 {
			d.Peers = slices.Delete(d.Peers, at, at+1)
		}
		return nil
	case c.PublicKey == d.PublicKey:
		return nil // the kernel passes over itself
	case at < 0 && c.UpdateOnly:
		return fmt.Errorf("peer %s: %w", c.PublicKey, os.ErrNotExist)
	case at < 0:
		d.Peers, at = append(d.Peers, wgtypes.Peer{PublicKey: c.PublicKey}), len(d.Peers)
	}
	p := &d.Peers[at]
	if c.Endpoint != nil {
		p.Endpoint = c.Endpoint
	}
	if c.PresharedKey != nil {
		p.PresharedKey = *c.PresharedKey
	}
	if c.PersistentKeepaliveInterval != nil {
		p.PersistentKeepaliveInterval = *c.PersistentKeepaliveInterval
	}
	if c.ReplaceAllowedIPs {
		p.AllowedIPs = nil
	}
	for _, r := range c.AllowedIPs {
		for i := range d.Peers {
			d.Peers[i].AllowedIPs = slices.DeleteFunc(slices.Clone(d.Peers[i].AllowedIPs), func(o net.IPNet) bool { return o.String() == r.String() })
		}
		p.AllowedIPs = append(p.AllowedIPs, r)
	}
	return nil
}

// Close implements Control.
func (f *Fake) Close() error { return nil }
