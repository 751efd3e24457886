package main

import (
	"cmp"
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/clusterd/clusterd/agent/host"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/netsetup/announce"
)

// An example of ranges of both families, for messages.
const (
	exampleClusterCIDRs = DefaultClusterCIDR + "," + DefaultClusterCIDR6
	exampleServiceCIDRs = DefaultServiceCIDR + "," + DefaultServiceCIDR6
)

// defaultRanges fills in the ranges that were left out: of the family of the other
// one, if that was given, else of the node's address.
func (c *Config) defaultRanges() {
	six := familyOf(c.addr().Addr()).six
	for _, given := range []string{c.ServiceCIDR, c.ClusterCIDR} {
		if r, err := join.ParseRanges(given); err == nil {
			six = r[0].Addr().Is6()
		}
	}
	pods, services := DefaultClusterCIDR, DefaultServiceCIDR
	if six {
		pods, services = DefaultClusterCIDR6, DefaultServiceCIDR6
	}
	if c.ClusterCIDR == "" {
		c.ClusterCIDR = pods
	}
	if c.ServiceCIDR == "" {
		c.ServiceCIDR = services
	}
}

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

// checkFirstFamily refuses to make a cluster of IPv4 ranges on nodes of IPv6 addresses:
// its pods would not reach the API. Existing clusters of this kind still start.
func (c *Config) checkFirstFamily() error {
	if c.firstFamilyFits() {
		return nil
	}
	return fmt.Errorf("--cluster-cidr %s, --service-cidr %s: the nodes' addresses are of IPv6, as --advertise %s is, and so must be the first range of both: leave the two flags out (%s and %s are taken then), or give an IPv4 address of this machine with --advertise",
		c.ClusterCIDR, c.ServiceCIDR, c.Advertise, DefaultClusterCIDR6, DefaultServiceCIDR6)
}

// checkRestoredFamily is checkFirstFamily for the ranges of a snapshot, which are fixed.
func (c *Config) checkRestoredFamily() error {
	if c.firstFamilyFits() {
		return c.checkFamily()
	}
	return fmt.Errorf("--advertise %s: the first range of pods of the cluster in the snapshot, %s, is of IPv4, and so must be the nodes' addresses: give an IPv4 address of this machine", c.Advertise, c.podRanges()[0])
}

// firstFamilyFits: not an address of IPv6 with a first range of IPv4.
func (c *Config) firstFamilyFits() bool {
	return !familyOf(c.addr().Addr()).six || c.podRanges()[0].Addr().Is6()
}

// podRanges are the pods' ranges, the cluster's own family first.
func (c *Config) podRanges() join.Ranges {
	return mustRanges(cmp.Or(c.ClusterCIDR, DefaultClusterCIDR))
}

// serviceRanges are the Services' ranges, in the same order.
func (c *Config) serviceRanges() join.Ranges {
	return mustRanges(cmp.Or(c.ServiceCIDR, DefaultServiceCIDR))
}

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
	other, err := announce.Beside(announce.Config{Node: out[0], File: nodedir.Dir(c.Data).Path("announced.json")})
	switch {
	case err != nil:
		log.Warn("no address of the second IP family was found: pods of other nodes are reached through the tunnel", "err", err)
	case other.IsValid():
		out = append(out, other)
	}
	return out
}
