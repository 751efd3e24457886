package join

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Ranges are one range of addresses, or two of different IP families: the first is
// the cluster's own family. As text, in files and in answers too, they have a comma
// between.
type Ranges []netip.Prefix

// ParseRanges reads the text form.
func ParseRanges(text string) (Ranges, error) {
	var r Ranges
	for part := range strings.SplitSeq(text, ",") {
		p, err := netip.ParsePrefix(strings.TrimSpace(part))
		a := p.Addr()
		switch {
		case err != nil:
			return nil, fmt.Errorf("%q is no range", part)
		case p != p.Masked():
			return nil, fmt.Errorf("%s is no range: its first address is %s", p, p.Masked().Addr())
		case a.Is4In6() || a.IsMulticast() || a.IsLinkLocalUnicast() || a.IsLoopback():
			return nil, fmt.Errorf("%s: such addresses reach no other machine", p)
		case len(r) > 1:
			return nil, errors.New("there may be one range of each IP family")
		case len(r) == 1 && r[0].Addr().Is4() == a.Is4():
			return nil, fmt.Errorf("%s and %s are of one IP family: there may be one range of each", r[0], p)
		}
		r = append(r, p)
	}
	return r, nil
}

// String is the text form.
func (r Ranges) String() string {
	texts := make([]string, len(r))
	for i, p := range r {
		texts[i] = p.String()
	}
	return strings.Join(texts, ",")
}

// MarshalText writes the text form.
func (r Ranges) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText reads the text form.
func (r *Ranges) UnmarshalText(b []byte) (err error) {
	*r, err = ParseRanges(string(b))
	return err
}

// widens reports whether to is r with a second range.
func (r Ranges) widens(to Ranges) bool { return len(r) == 1 && len(to) == 2 && r[0] == to[0] }

// reached refuses a machine whose address is of an IP family that the cluster's first
// range is not of, unless there are servers with such addresses: nodes would not reach
// one another.
func (c Cluster) reached(addr netip.Addr, servers []ServerAddr) error {
	four := addr.Unmap().Is4()
	if len(c.ClusterCIDR) == 0 || c.ClusterCIDR[0].Addr().Is4() == four {
		return nil
	}
	if slices.ContainsFunc(servers, func(s ServerAddr) bool { return s.Addr.Addr().Unmap().Is4() == four }) {
		return nil
	}
	want := "IPv6"
	if !four {
		want = "IPv4"
	}
	return &Refusal{CodeRequest, fmt.Sprintf("the address %s: the nodes of this cluster have addresses of %s, as the first range of its pods, %s: give an %[2]s address of this machine with --advertise", addr, want, c.ClusterCIDR[0])}
}

// Widen adds to the cluster's settings the ranges of a second IP family that this
// node's configuration has and they lack, so that those who join receive them. Any
// other difference is an error: addresses were given out of the ranges.
func Widen(ctx context.Context, s Store, pods, services Ranges) error {
	c, revision, err := clusterNow(ctx, s)
	if err != nil {
		return err
	}
	changed := false
	for _, one := range []struct {
		name string
		has  *Ranges
		want Ranges
	}{{"pods", &c.ClusterCIDR, pods}, {"Services", &c.ServiceCIDR, services}} {
		switch {
		case slices.Equal(*one.has, one.want):
		case one.has.widens(one.want):
			*one.has, changed = one.want, true
		default:
			return fmt.Errorf("the configuration of this node has the ranges %s for %s, the cluster has %s: only a second range, of the other IP family, may be added behind the one there is", one.want, one.name, one.has)
		}
	}
	if !changed {
		return nil
	}
	if err := putCluster(ctx, s, c, revision); err != nil {
		return fmt.Errorf("add ranges to the cluster's settings: %w", err)
	}
	return nil
}
