package nodeipam

import (
	"math/big"
	"net/netip"
	"slices"
)

// lacks are the indexes of the ranges that a node with those networks is still to
// get one of. A node gets what stands behind the networks it has: the first of them
// never changes. Pure.
func lacks(have []string, ranges []Range) (missing []int) {
	for i, r := range ranges {
		has := slices.ContainsFunc(have, func(text string) bool {
			p, err := netip.ParsePrefix(text)
			return err == nil && p.Addr().Is4() == r.Cluster.Addr().Is4()
		})
		if !has && i >= len(have) {
			missing = append(missing, i)
		}
	}
	return missing
}

// next returns the first network of the given size behind last, wrapping
// around at the end of cluster, that overlaps none of used. An invalid last
// means: from the beginning.
func next(cluster netip.Prefix, bits int, last netip.Prefix, used []netip.Prefix) (netip.Prefix, bool) {
	first := netip.PrefixFrom(cluster.Masked().Addr(), bits)
	begin := first
	if last.IsValid() && cluster.Contains(last.Addr()) && last.Bits() == bits {
		begin = step(cluster, last, first)
	}
	for p := begin; ; {
		hit, blocked := overlap(p, used)
		if !blocked {
			return p, true
		}
		// Jump over the whole of what is in the way, which may be larger.
		end := p
		if hit.Bits() < bits {
			end = netip.PrefixFrom(lastAddr(hit), bits).Masked()
		}
		following := step(cluster, end, first)
		if wrapped(p, following, begin) {
			return netip.Prefix{}, false
		}
		p = following
	}
}

// step returns the network behind p, or first at the end of cluster.
func step(cluster, p, first netip.Prefix) netip.Prefix {
	addr := lastAddr(p).Next()
	if !addr.IsValid() || !cluster.Contains(addr) {
		return first
	}
	return netip.PrefixFrom(addr, p.Bits())
}

// wrapped reports whether the search that goes from p to following has come
// round to (or jumped over) begin.
func wrapped(p, following, begin netip.Prefix) bool {
	before, after := p.Addr().Less(begin.Addr()), following.Addr().Less(begin.Addr())
	if following.Addr().Compare(p.Addr()) <= 0 { // around the end
		return before || !after
	}
	return before && !after
}

func overlap(p netip.Prefix, used []netip.Prefix) (netip.Prefix, bool) {
	for _, u := range used {
		if p.Overlaps(u) {
			return u, true
		}
	}
	return netip.Prefix{}, false
}

// lastAddr is the highest address in p.
func lastAddr(p netip.Prefix) netip.Addr {
	raw := p.Masked().Addr().AsSlice()
	n := new(big.Int).SetBytes(raw)
	size := new(big.Int).Lsh(big.NewInt(1), uint(p.Addr().BitLen()-p.Bits()))
	n.Add(n, size).Sub(n, big.NewInt(1))
	addr, _ := netip.AddrFromSlice(n.FillBytes(make([]byte, len(raw))))
	return addr
}
