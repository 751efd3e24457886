package main

import (
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/clusterd/clusterd/agent/host"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/netsetup/announce"
)

// An example of ranges of both families, for messages.
const (
	exampleClusterCIDRs = DefaultClusterCIDR + ",fd00:10:244::/48"
	exampleServiceCIDRs = DefaultServiceCIDR + ",fd00:10:96::/112"
)

// nodeBits6 is the length of the IPv6 range of a node's pods.
const nodeBits6 = 64

// checkRanges refuses ranges of pods and Services that no cluster can have.
func (c *Config) checkRanges() error {
	var both [2]join.Ranges
	for i, f := range []struct{ flag, text, example string }{
		{"--cluster-cidr", c.ClusterCIDR, exampleClusterCIDRs}, {"--service-cidr", c.ServiceCIDR, exampleServiceCIDRs},
	} {
		r, err := join.ParseRanges(f.text)
		if err != nil {
			return fmt.Errorf("%s %q: %w: a range is required, or one of each IP family, such as %s", f.flag, f.text, err, f.example)
		}
		both[i] = r
	}
	pods, services := both[0], both[1]
	for _, a := range pods {
		for _, b := range services {
			if a.Overlaps(b) {
				return fmt.Errorf("--cluster-cidr %s and --service-cidr %s overlap: choose ranges apart", a, b)
			}
		}
		if a.Addr().Is6() && a.Bits() > nodeBits6 {
			return fmt.Errorf("--cluster-cidr %s: each node gets a /%d of it: give a range at least as large, such as fd00:10:244::/48", a, nodeBits6)
		}
	}
	for i, a := range pods {
		if len(pods) != len(services) || a.Addr().Is4() != services[i].Addr().Is4() {
			return fmt.Errorf("--cluster-cidr %s and --service-cidr %s: both need ranges of the same IP families in the same order, such as %s and %s", pods, services, exampleClusterCIDRs, exampleServiceCIDRs)
		}
	}
	return c.checkFamily()
}

// checkFamily: the API is reached at the nodes' addresses from behind a Service of
// the first family.
func (c *Config) checkFamily() error {
	pods := c.podRanges()
	first := pods[0].Addr()
	if len(pods) == 1 && first.Is4() {
		return nil
	}
	if own := c.addr().Addr(); own.Is4() != first.Is4() {
		return fmt.Errorf("--advertise %s: the nodes' addresses and the first range of --cluster-cidr, %s, must be of one IP family: give another address of this machine, or the ranges in the other order", own, pods[0])
	}
	ips, err := host.NodeIPs(c.NodeIP)
	if err == nil && len(ips) > 0 && ips[0].Is4() != first.Is4() {
		err = fmt.Errorf("--node-ip %q: the first address and the first range of --cluster-cidr, %s, must be of one IP family: give the node's address of that family first", c.NodeIP, pods[0])
	}
	return err
}

// podRanges are the pods' ranges, the cluster's own family first.
func (c *Config) podRanges() join.Ranges { return mustRanges(c.ClusterCIDR) }

// serviceRanges are the Services' ranges, in the same order.
func (c *Config) serviceRanges() join.Ranges { return mustRanges(c.ServiceCIDR) }

// mustRanges parses what complete has checked.
func mustRanges(text string) join.Ranges {
	r, err := join.ParseRanges(text)
	if err != nil {
		panic(fmt.Sprintf("ranges %q: %v", text, err))
	}
	return r
}

// nodeIPs are the node's InternalIPs, the primary first: what --node-ip says, else
// the advertised address, and in a cluster of two families the other family's of
// the same interface, if it has one. That one is looked for once: pods reach the
// node by the tunnel without it.
func (c *Config) nodeIPs(log *slog.Logger) []netip.Addr {
	if ips, err := host.NodeIPs(c.NodeIP); err == nil && len(ips) > 0 {
		return ips
	}
	out := []netip.Addr{c.addr().Addr()}
	if len(c.podRanges()) < 2 {
		return out
	}
	other, err := announce.Beside(announce.Config{Node: out[0], File: dataDir(c.Data).path("announced.json")})
	switch {
	case err != nil:
		log.Warn("no address of the second IP family was found: pods of other nodes are reached through the tunnel", "err", err)
	case other.IsValid():
		out = append(out, other)
	}
	return out
}
