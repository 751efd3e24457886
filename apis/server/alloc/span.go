package alloc

import (
	"iter"
	"math/rand/v2"
	"net/netip"
)

// span is a range of addresses, without those that are never given out: the
// first, and of IPv4 the last.
type span struct {
	cidr        netip.Prefix
	first, size uint64 // of the addresses that may be given out, from the range's base
	static      uint64 // how many of them, at the low end, are given out last
}

// newSpan is false for a range that is too small.
func newSpan(cidr netip.Prefix) (span, bool) {
	bits := cidr.Addr().BitLen() - cidr.Bits()
	if bits < 3 {
		return span{}, false
	}
	total := uint64(1) << min(bits, 32)
	s := span{cidr: cidr.Masked(), first: 1, size: total - 1}
	if cidr.Addr().Is4() {
		s.size-- // broadcast
	}
	// The low end is where people put addresses they choose themselves.
	s.static = min(max(16, s.size/16), 256)
	if s.static >= s.size {
		s.static = 0
	}
	return s, true
}

// any is a random address above the static end.
func (s span) any() netip.Addr { return s.at(s.static + rand.Uint64N(s.size-s.static)) }

// all yields each address once, from a random one above the static end and
// around.
func (s span) all() iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		start := s.static + rand.Uint64N(s.size-s.static)
		for i := range s.size {
			if !yield(s.at((start + i) % s.size)) {
				return
			}
		}
	}
}

// at is the n-th address that may be given out.
func (s span) at(n uint64) netip.Addr {
	bytes := s.cidr.Addr().AsSlice()
	n += s.first
	for i := len(bytes) - 1; i >= 0 && n > 0; i-- {
		n += uint64(bytes[i])
		bytes[i] = byte(n)
		n >>= 8
	}
	address, _ := netip.AddrFromSlice(bytes)
	return address
}

func (s span) contains(address netip.Addr) bool {
	if !s.cidr.Contains(address) || address == s.cidr.Addr() {
		return false
	}
	return !address.Is4() || address.Next().IsValid() && s.cidr.Contains(address.Next())
}
