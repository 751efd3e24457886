package podnetwork

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/netsetup/lb"
	"github.com/clusterd/clusterd/netsetup/nft"
	"github.com/clusterd/clusterd/netsetup/sysctl"
)

// Ports of the node that lead to pods (hostPort). They are on disk, so that
// the rules of an agent's first moment hold those of the pods that it has not
// met again yet.

// hostPortsFile is below Config.Dir; see published.
const hostPortsFile = "hostports.json"

// published is the content of hostports.json.
type published struct {
	Version int                  `json:"version"` // 1
	Pods    map[string]podsPorts `json:"pods"`    // by UID
}

type podsPorts struct {
	Addr  netip.Addr          `json:"addr"`
	Other netip.Addr          `json:"other,omitzero"` // of the second family, if it has one
	Ports []podstate.HostPort `json:"ports"`
}

// loadPorts reads the file; none is no fault.
func loadPorts(dir string) (map[string]podsPorts, error) {
	b, err := os.ReadFile(filepath.Join(dir, hostPortsFile))
	if errors.Is(err, fs.ErrNotExist) {
		return map[string]podsPorts{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("host ports: %w", err)
	}
	var p published
	if err := json.Unmarshal(b, &p); err != nil {
		return nil, fmt.Errorf("host ports: %s: %w", hostPortsFile, err)
	}
	if p.Version != 1 {
		return nil, fmt.Errorf("host ports: %s has version %d, this program knows 1", hostPortsFile, p.Version)
	}
	if p.Pods == nil {
		p.Pods = map[string]podsPorts{}
	}
	return p.Pods, nil
}

// savePorts replaces the file. The caller holds portMu.
func (n *Network) savePorts() error {
	b, err := json.Marshal(published{Version: 1, Pods: n.ports})
	if err != nil {
		return fmt.Errorf("host ports: %w", err)
	}
	if err := durable.ReplaceFile(filepath.Join(n.cfg.Dir, hostPortsFile), b, 0o600); err != nil {
		return fmt.Errorf("host ports: %w", err)
	}
	return nil
}

// Publish makes ports of the node lead to the pod's addresses, each by its own
// family, until it is detached. It may be called again.
func (n *Network) Publish(_ context.Context, uid string, addrs []netip.Addr, ports []podstate.HostPort) error {
	n.portMu.Lock()
	defer n.portMu.Unlock()
	now := podsPorts{Ports: ports}
	for i, a := range addrs {
		switch i {
		case 0:
			now.Addr = a
		case 1:
			now.Other = a
		}
	}
	if have, ok := n.ports[uid]; ok && have.Addr == now.Addr && have.Other == now.Other && slices.Equal(have.Ports, ports) {
		return nil
	}
	all := maps.Clone(n.ports)
	all[uid] = now
	return n.setPorts(all, flowsOf(n.ports[uid], now))
}

// setPorts makes now what is published. On an error it is as before, so that the next
// try does it again. The caller holds portMu.
func (n *Network) setPorts(now map[string]podsPorts, misled []lb.Flow) error {
	before, flows := n.ports, len(n.misled)
	n.ports, n.misled = now, append(n.misled, misled...)
	if err := errors.Join(n.savePorts(), n.filterPorts()); err != nil {
		n.ports, n.misled = before, n.misled[:min(flows, len(n.misled))]
		return err
	}
	return nil
}

// unpublish takes back what was published of the pods that keep does not name.
func (n *Network) unpublish(keep func(uid string) bool) error {
	n.portMu.Lock()
	defer n.portMu.Unlock()
	left, misled := maps.Clone(n.ports), []lb.Flow(nil)
	maps.DeleteFunc(left, func(uid string, was podsPorts) bool {
		if keep(uid) {
			return false
		}
		misled = append(misled, flowsOf(was, podsPorts{})...)
		return true
	})
	if len(left) == len(n.ports) {
		return nil
	}
	return n.setPorts(left, misled)
}

// setRules gives the packet filter the rules of the nodes, and those of the
// published ports with them.
func (n *Network) setRules(r nft.Ruleset, own []netip.Prefix) error {
	n.portMu.Lock()
	defer n.portMu.Unlock()
	n.rules, n.own = r, own
	return n.filterPorts()
}

// filterPorts applies the rules. The caller holds portMu.
func (n *Network) filterPorts() error {
	if len(n.own) == 0 {
		return nil // before the node has a range, nothing is inside
	}
	r := withPorts(n.rules, nft.Inside{Ranges: n.own, Interface: n.cfg.Bridge}, n.ports)
	table, err := r.Table(nft.DefaultTable)
	if err == nil {
		err = n.filter.Set(table)
	}
	if err != nil {
		return fmt.Errorf("packet filter: %w", err)
	}
	if len(r.Publish) > 0 { // after the rule that keeps pods from using it
		if err := sysctl.Set(map[string]string{"net.ipv4.conf." + n.cfg.Bridge + ".route_localnet": "1"}); err != nil {
			return fmt.Errorf("kernel switches: %w", err)
		}
	}
	n.forgetMisled()
	return nil
}

// forgetMisled makes the kernel forget the flows that the rules in force would send
// elsewhere. What goes wrong is tried again with the next rules, a minute later at
// the latest. The caller holds portMu.
func (n *Network) forgetMisled() {
	if len(n.misled) == 0 {
		return
	}
	if _, err := n.flows.Delete(n.misled); err != nil {
		n.cfg.Logger.Warn("flows of datagrams to ports of the node still go where these led before, will retry", "err", err)
		return
	}
	n.misled = nil
}

// flowsOf are the tracked flows that are wrong once a pod's ports lead to now: those
// sent to the pod before, and those that came when nothing had the port. Flows
// of datagrams alone: they follow the rules again only when they pause, TCP ends by
// itself. Pure.
func flowsOf(was, now podsPorts) (out []lb.Flow) {
	each := func(p podsPorts, flow func(f lb.Frontend, pod netip.AddrPort)) {
		for _, port := range p.Ports {
			proto, ok := nft.ParseProtocol(port.Protocol)
			if !ok || port.Protocol == "tcp" {
				continue
			}
			for _, addr := range []netip.Addr{p.Addr, p.Other} {
				f := lb.Frontend{Addr: port.HostIP, Proto: proto, Port: port.HostPort}
				switch {
				case !addr.IsValid() || f.Addr.IsValid() && f.Addr.Is4() != addr.Is4():
					continue
				case f.Addr.IsValid():
				case addr.Is4():
					f.Addr = netip.IPv4Unspecified()
				default:
					f.Addr = netip.IPv6Unspecified()
				}
				flow(f, netip.AddrPortFrom(addr, port.Port))
			}
		}
	}
	each(was, func(f lb.Frontend, pod netip.AddrPort) { out = append(out, lb.Flow{Frontend: f, Endpoint: pod}) })
	each(now, func(f lb.Frontend, _ netip.AddrPort) { out = append(out, lb.Flow{Frontend: f}) })
	return out
}

// withPorts adds the published ports to the rules, those of one address
// before those of every address. Pure.
func withPorts(r nft.Ruleset, inside nft.Inside, pods map[string]podsPorts) nft.Ruleset {
	r.Inside = inside
	for _, uid := range slices.Sorted(maps.Keys(pods)) {
		p := pods[uid]
		for _, addr := range []netip.Addr{p.Addr, p.Other} {
			if !addr.IsValid() || !inside.Contains(addr) {
				continue // none, or of a range that the node no longer has
			}
			for _, port := range p.Ports {
				if port.HostIP.IsValid() && port.HostIP.Is4() != addr.Is4() {
					continue // the other address' port
				}
				r.Publish = append(r.Publish, nft.Publish{Protocol: port.Protocol, Addr: port.HostIP, Port: port.HostPort, To: netip.AddrPortFrom(addr, port.Port)})
			}
		}
	}
	slices.SortStableFunc(r.Publish, func(a, b nft.Publish) int {
		switch {
		case a.Addr.IsValid() == b.Addr.IsValid():
			return 0
		case a.Addr.IsValid():
			return -1
		}
		return 1
	})
	return r
}
