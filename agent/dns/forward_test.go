package dns

import (
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// The bug: a question for an outside name that came while the server ended had neither an
// answer nor an error, which ended the whole process by a panic.
func TestAskedAtTheEnd(t *testing.T) {
	o := newOutside(t, say("www.example.com. 60 IN A 192.0.2.1"))
	s := newTestServer(t, o.addr)
	s.forward.close()
	if m := s.ask(t, "www.example.com.", dns.TypeA); m.Rcode != dns.RcodeServerFailure {
		t.Error(m)
	}
	if n := o.asked.Load(); n != 0 {
		t.Errorf("asked %d times after the end", n)
	}
}

// The bug: a panic over an answer from outside came in a goroutine in which nothing
// recovered from it, and ended the process.
func TestPanicOverAnAnswer(t *testing.T) {
	o := newOutside(t, say("www.example.com. 60 IN A 192.0.2.1"))
	s := newTestServer(t, o.addr)
	s.forward.cache.now = func() time.Time { panic("a fault of this program") }
	if m := s.ask(t, "www.example.com.", dns.TypeA); m.Rcode != dns.RcodeServerFailure {
		t.Error(m)
	}
	if n := testutil.ToFloat64(s.metrics.panics); n != 1 {
		t.Errorf("%v panics are counted", n)
	}
	s.forward.cache.now = time.Now
	if m := s.ask(t, "www.example.com.", dns.TypeA); data(m) != "192.0.2.1" {
		t.Error(m)
	}
}
