package dns

import (
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// The bug: one name whose own servers are dead made the server that was asked for
// it one that does not answer, and every other name that was not remembered had
// half a second, and no TCP, for the next ten.
func TestOneDeadNameCostsNoOther(t *testing.T) {
	o := newOutside(t, func(w dns.ResponseWriter, r *dns.Msg) {
		if strings.HasSuffix(r.Question[0].Name, ".dead.example.") {
			return
		}
		time.Sleep(downTimeout + 50*time.Millisecond) // a name that takes its time
		say("www.example.com. 60 IN A 192.0.2.1")(w, r)
	})
	s := newTestServer(t)
	s.forward.times = times{4 * time.Second, time.Minute, time.Minute, downTimeout}
	u := s.forward.set(map[string][]string{".": {o.addr}})[0]
	var wg sync.WaitGroup
	defer wg.Wait()
	defer s.forward.close()
	dead := []string{"a.dead.example.", "b.dead.example.", "c.dead.example.", "d.dead.example."}
	for _, name := range dead {
		wg.Go(func() { s.ask(t, name, dns.TypeA) })
	}
	noted := func() int {
		u.mu.Lock()
		defer u.mu.Unlock()
		return len(u.silent)
	}
	for end := time.Now().Add(time.Minute); noted() < len(dead); <-time.After(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d of %d questions without an answer were noted", noted(), len(dead))
		}
	}
	if m := s.ask(t, "www.example.com.", dns.TypeA); data(m) != "192.0.2.1" {
		t.Errorf("another name: %v", m)
	}
	if !u.down(key{name: dead[0], kind: dns.TypeA}, time.Now()) {
		t.Error("the dead name is waited for again")
	}
}

// TestServerThatIsOutdone: what another server answers at once was not the name's
// fault.
func TestServerThatIsOutdone(t *testing.T) {
	first := newOutside(t, say())
	first.quiet.Store(true)
	second := newOutside(t, say("www.example.com. 60 IN A 192.0.2.1"))
	s := newTestServer(t, first.addr, second.addr)
	s.forward.times.attempt = 3 * time.Second
	if m := s.ask(t, "www.example.com.", dns.TypeA); data(m) != "192.0.2.1" {
		t.Fatal(m)
	}
	if servers := s.forward.serversFor(key{name: "other.example.", kind: dns.TypeA}); servers[0].addr != second.addr {
		t.Error("the silent server is asked first for other names")
	}
}

func TestDown(t *testing.T) {
	start := time.Now()
	at := func(d time.Duration) time.Time { return start.Add(d) }
	k := func(name string) key { return key{name: name, kind: dns.TypeA} }
	zones := []string{"a.one.example.", "two.example.", "x.y.three.test."}
	for name, tt := range map[string]struct {
		do   func(u *upstream)
		want bool
	}{
		"nothing is known": {func(*upstream) {}, false},
		"one name":         {func(u *upstream) { u.ignores(k(zones[0]), at(0), at(time.Second), false) }, false},
		"it refuses":       {func(u *upstream) { u.ignores(k(zones[0]), at(0), at(time.Second), true) }, true},
		"names of one zone": {func(u *upstream) {
			for _, n := range []string{"a.dead.test.", "b.dead.test.", "c.dead.test.", "d.c.dead.test."} {
				u.ignores(k(n), at(0), at(time.Second), false)
			}
		}, false},
		"names of three": {func(u *upstream) {
			for _, n := range zones {
				u.ignores(k(n), at(0), at(time.Second), false)
			}
		}, true},
		"of three, and it answered a moment before": {func(u *upstream) {
			u.answers(k("www.test."), at(-time.Second))
			for _, n := range zones {
				u.ignores(k(n), at(0), at(time.Second), false)
			}
		}, false},
		"of three, and it answered long before": {func(u *upstream) {
			u.answers(k("www.test."), at(-answersFor))
			for _, n := range zones {
				u.ignores(k(n), at(0), at(time.Second), false)
			}
		}, true},
		"an answer in between": {func(u *upstream) {
			u.ignores(k(zones[0]), at(-time.Hour), at(-time.Hour), false)
			u.ignores(k(zones[1]), at(-time.Hour), at(-time.Hour), false)
			u.answers(k("www.test."), at(-time.Minute))
			u.ignores(k(zones[2]), at(0), at(time.Second), false)
		}, false},
		"an answer while they were waited for": {func(u *upstream) {
			u.answers(k("www.test."), at(time.Millisecond))
			for _, n := range zones {
				u.ignores(k(n), at(0), at(time.Hour), false)
			}
		}, false},
		"it answers again": {func(u *upstream) {
			u.ignores(k(zones[0]), at(0), at(time.Second), true)
			u.answers(k("www.test."), at(2*time.Second))
		}, false},
		"another server answers":                       {func(u *upstream) { u.outdone(at(0), at(time.Second)) }, true},
		"another one does, but it answers other names": {func(u *upstream) { u.answers(k("www.test."), at(1)); u.outdone(at(0), at(time.Second)) }, false},
	} {
		u := &upstream{}
		tt.do(u)
		now := at(2 * time.Second)
		if !u.answered.IsZero() && u.answered.After(now) {
			now = u.answered
		}
		if name == "an answer while they were waited for" {
			now = at(time.Hour)
		}
		if got := u.down(k("other.example."), now); got != tt.want {
			t.Errorf("%s: down: %v, want %v", name, got, tt.want)
		}
		if u.down(k("other.example."), now.Add(downFor)) {
			t.Errorf("%s: down for ever", name)
		}
	}
	refused := &net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNREFUSED)}
	if timeout := (&net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}); !isRefusal(refused) || isRefusal(timeout) {
		t.Error("what is a refusal?")
	}
	u := &upstream{}
	for i := range uint16(2 * silentMemory) {
		u.ignores(key{name: "a.test.", kind: i}, at(0), at(0), false)
	}
	if len(u.silent) > silentMemory {
		t.Errorf("%d questions are remembered", len(u.silent))
	}
}

// The bug: an answer too long for UDP was a failure where the server cannot be asked by
// TCP, though what fits was there. An empty one is a failure still: it says nothing.
func TestCutOffAnswer(t *testing.T) {
	for name, tt := range map[string]struct {
		records []string
		rcode   int
	}{
		"some":  {[]string{"www.example.com. 60 IN A 192.0.2.1"}, dns.RcodeSuccess},
		"empty": {nil, dns.RcodeServerFailure},
	} {
		o := newOutside(t, func(w dns.ResponseWriter, r *dns.Msg) {
			if w.RemoteAddr().Network() == "tcp" {
				_ = w.Close()
				return
			}
			m := new(dns.Msg).SetReply(r)
			m.Truncated = true
			for _, text := range tt.records {
				rr, err := dns.NewRR(text)
				if err != nil {
					panic(err)
				}
				m.Answer = append(m.Answer, rr)
			}
			_ = w.WriteMsg(m)
		})
		s := newTestServer(t, o.addr)
		for round := range 2 {
			m := s.ask(t, "www.example.com.", dns.TypeA)
			if m.Rcode != tt.rcode || len(m.Answer) != len(tt.records) || m.Truncated != (len(tt.records) > 0) {
				t.Errorf("%s, round %d: %v", name, round, m)
			}
		}
		if n := s.forward.cache.found.Len() + s.forward.cache.denied.Len(); n != 0 {
			t.Errorf("%s: %d answers are remembered", name, n)
		}
	}
}
