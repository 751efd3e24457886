package transport

import (
	"net"
	"testing"
)

// TestStrangers: one source cannot have all the connections that strangers may have.
func TestStrangers(t *testing.T) {
	var s unauthenticatedConns
	at := func(ip string) net.Addr { return &net.TCPAddr{IP: net.ParseIP(ip), Port: 1} }
	var leave []func()
	for {
		l := s.enter(at("2001:db8::1"))
		if l == nil {
			break
		}
		leave = append(leave, l)
	}
	if len(leave) != maxUnauthenticatedOfOne || s.enter(at("2001:db8::2")) != nil {
		t.Errorf("one network has %d connections, or more", len(leave))
	}
	for _, other := range []string{"2001:db8:0:1::1", "192.0.2.1", "192.0.2.2"} {
		l := s.enter(at(other))
		if l == nil {
			t.Fatalf("%s is refused for another's sake", other)
		}
		leave = append(leave, l)
	}
	for i := range maxUnauthenticatedOfAll {
		if l := s.enter(&net.TCPAddr{IP: net.IPv4(10, 0, byte(i>>8), byte(i))}); l != nil {
			leave = append(leave, l)
		}
	}
	if len(leave) != maxUnauthenticatedOfAll {
		t.Errorf("%d connections of strangers in all", len(leave))
	}
	for _, l := range leave {
		l()
		l() // closed twice
	}
	if s.all != 0 || len(s.one) != 0 {
		t.Errorf("after all have gone %d are counted, of %d sources", s.all, len(s.one))
	}
}
