package transport

import (
	"net"
	"net/netip"
	"sync"
)

// Bounds of connections whose other end has proved nothing: those whose handshake
// has not ended, and those that join. A client that meets one tries again.
const (
	maxUnauthenticatedOfOne = 512
	maxUnauthenticatedOfAll = 4096
	// sourceBits is how much of an IPv6 address counts: an owner of one has the
	// rest of its network.
	sourceBits = 64
)

// unauthenticatedConns counts such connections. Its zero value is ready.
type unauthenticatedConns struct {
	mu  sync.Mutex
	all int
	one map[netip.Prefix]int
}

// enter counts a connection, and returns nil if there are too many of its source or
// in all. leave, which may be called more than once, gives it back.
func (s *unauthenticatedConns) enter(from net.Addr) (leave func()) {
	source := sourceOf(from)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all >= maxUnauthenticatedOfAll || s.one[source] >= maxUnauthenticatedOfOne {
		return nil
	}
	if s.one == nil {
		s.one = map[netip.Prefix]int{}
	}
	s.all++
	s.one[source]++
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.all--
		if s.one[source]--; s.one[source] == 0 {
			delete(s.one, source)
		}
	})
}

// sourceOf is the address, or the network of an IPv6 one; the zero value for all that
// are neither.
func sourceOf(from net.Addr) netip.Prefix {
	tcp, ok := from.(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	addr := tcp.AddrPort().Addr().Unmap().WithZone("")
	bits := addr.BitLen()
	if addr.Is6() {
		bits = sourceBits
	}
	source, err := addr.Prefix(bits)
	if err != nil {
		return netip.Prefix{}
	}
	return source
}
