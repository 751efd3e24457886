package dns

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
)

var seed = flag.Uint64("seed", 1, "what is random is drawn from it")

// TestUpstreamsInDisorder: servers outside die, are slow, lie and refuse, one after the
// other and together, in an order drawn from the seed. The cluster's own names and what
// is remembered are answered all the time, no answer is ever another than the name's,
// and whoever asks has an answer, be it a failure, before a resolver gives up.
func TestUpstreamsInDisorder(t *testing.T) {
	rnd := rand.New(rand.NewPCG(*seed, 0))
	t.Logf("seed %d", *seed)
	addr := func(name string) string { // of n-17.example. it is 192.0.2.17
		n := 0
		_, _ = fmt.Sscanf(strings.ToLower(name), "n-%d.", &n)
		return fmt.Sprintf("192.0.%d.%d", n/250, n%250)
	}
	honest := func(w dns.ResponseWriter, r *dns.Msg) {
		say(fmt.Sprintf("%s 60 IN A %s", r.Question[0].Name, addr(r.Question[0].Name)))(w, r)
	}
	// What a server may do instead. None of it is an answer.
	troubles := map[string]func(dns.ResponseWriter, *dns.Msg){
		"dead":    func(dns.ResponseWriter, *dns.Msg) {},
		"refuses": func(w dns.ResponseWriter, r *dns.Msg) { _ = w.WriteMsg(new(dns.Msg).SetRcode(r, dns.RcodeRefused)) },
		"fails": func(w dns.ResponseWriter, r *dns.Msg) {
			_ = w.WriteMsg(new(dns.Msg).SetRcode(r, dns.RcodeServerFailure))
		},
		"rubbish": func(w dns.ResponseWriter, r *dns.Msg) {
			_, _ = w.Write([]byte{byte(r.Id >> 8), byte(r.Id), 0x80, 0, 0, 1, 0, 9, 0, 0, 0, 0, 0xc0})
		},
		"another name": func(w dns.ResponseWriter, r *dns.Msg) {
			m := new(dns.Msg).SetReply(r)
			m.Question[0].Name = "bank.example."
			rr, _ := dns.NewRR("bank.example. 60 IN A 203.0.113.1")
			m.Answer = []dns.RR{rr}
			_ = w.WriteMsg(m)
		},
		"forged number": func(w dns.ResponseWriter, r *dns.Msg) {
			m := new(dns.Msg).SetReply(r)
			m.Id++
			rr, _ := dns.NewRR(r.Question[0].Name + " 60 IN A 203.0.113.2")
			m.Answer = []dns.RR{rr}
			_ = w.WriteMsg(m)
		},
		"endless truncation": func(w dns.ResponseWriter, r *dns.Msg) {
			m := new(dns.Msg).SetReply(r)
			m.Truncated = true
			_ = w.WriteMsg(m)
		},
		"slow": func(w dns.ResponseWriter, r *dns.Msg) {
			time.Sleep(2 * attemptTimeout)
			honest(w, r)
		},
	}
	kinds := []string{"dead", "refuses", "fails", "rubbish", "another name", "forged number", "endless truncation", "slow", "well"}
	var does [3]atomic.Pointer[string]
	var addrs []string
	for i := range does {
		well := "well"
		does[i].Store(&well)
		addrs = append(addrs, newOutside(t, func(w dns.ResponseWriter, r *dns.Msg) {
			if do := troubles[*does[i].Load()]; do != nil {
				do(w, r)
				return
			}
			honest(w, r)
		}).addr)
	}
	s := newTestServer(t, addrs...)
	defer s.forward.close()
	kept := "n-999.example."
	if m := s.ask(t, kept, dns.TypeA); data(m) != addr(kept) {
		t.Fatal(m)
	}
	s.forward.times = usual
	var slowest time.Duration
	next := 0
	for round := range 12 {
		var what []string
		for i := range does {
			kind := kinds[rnd.IntN(len(kinds))]
			does[i].Store(&kind)
			what = append(what, kind)
		}
		say := func(format string, args ...any) {
			t.Helper()
			t.Errorf("seed %d, round %d, servers are %q: "+format, append([]any{*seed, round, what}, args...)...)
		}
		var wg sync.WaitGroup
		var mu sync.Mutex // guards slowest
		for range 8 {
			name := fmt.Sprintf("n-%d.example.", next)
			next++
			wg.Go(func() {
				began := time.Now()
				m := s.ask(t, name, dns.TypeA)
				took := time.Since(began)
				mu.Lock()
				slowest = max(slowest, took)
				mu.Unlock()
				switch got := data(m); {
				case got == addr(name):
				case got != "":
					say("%s is %s", name, got)
				case m.Rcode == dns.RcodeSuccess || m.Rcode == dns.RcodeNameError:
					say("%s is said not to be: %s", name, dns.RcodeToString[m.Rcode])
				}
				// It is askTimeout at most; a machine with other work adds to it.
				if took > askTimeout+30*time.Second {
					say("%s took %s", name, took)
				}
			})
		}
		for range 20 {
			if m := s.ask(t, kept, dns.TypeA); data(m) != addr(kept) {
				say("a remembered name: %v", m)
			}
			if m := s.ask(t, "web.prod.svc.cluster.local.", dns.TypeA); data(m) != "10.96.0.5" {
				say("a name of the cluster: %v", m)
			}
		}
		wg.Wait()
	}
	t.Logf("the slowest of %d answers took %s, the bound is %s", next, slowest, askTimeout)
	// All are well again: so is each name.
	for i := range does {
		well := "well"
		does[i].Store(&well)
	}
	for end := time.Now().Add(time.Minute); ; {
		name := fmt.Sprintf("n-%d.example.", next)
		if next++; data(s.ask(t, name, dns.TypeA)) == addr(name) {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("seed %d: servers that are well again are not heard", *seed)
		}
	}
}
