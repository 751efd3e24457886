package dns

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// TestFigures measures, with `make bench-net`: a line of JSON each. Answers over
// UDP on the loopback to 4 clients that each have 16 questions under way, then to one
// that has one; they take from the same processors.
func TestFigures(t *testing.T) {
	if os.Getenv("CLUSTERD_BENCH") == "" {
		t.Skip("a benchmark: make bench-net")
	}
	const services = 10_000
	up := newOutside(t, say("www.example.com. 3600 IN A 192.0.2.8"))
	s := newTestServer(t, up.addr)
	var objs []any
	for i := range services {
		objs = append(objs, service("prod", fmt.Sprintf("svc-%d", i), netip.AddrFrom4([4]byte{10, 97, byte(i >> 8), byte(i)}).String()))
	}
	s.zone.catalog = newTestCatalog(true, objs...)
	s.ask(t, "www.example.com.", dns.TypeA) // remembered from here on
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.servePackets(ctx, conn) }()
	const cached, cluster = "www.example.com.", "svc-7777.prod.svc.cluster.local."
	for _, tt := range []struct {
		name, question  string
		clients, window int
	}{
		{"cached name", cached, 4, 16}, {"cluster name", cluster, 4, 16},
		{"cached name, one question at a time", cached, 1, 1}, {"cluster name, one question at a time", cluster, 1, 1},
	} {
		before := processorTime(t)
		rate, took := load(t, conn.LocalAddr().String(), tt.question, tt.clients, tt.window)
		spent := (processorTime(t) - before) / time.Duration(len(took))
		slices.Sort(took)
		// Of a machine with other work the processor time tells what it would be without:
		// 2 processors give 2 000 000 / processor_us answers a second.
		fmt.Printf(`{"bench":"dns","what":%q,"services":%d,"answers_per_second":%.0f,"p50_us":%d,"p99_us":%d,"processor_us":%.1f}`+"\n",
			tt.name, services, rate, took[len(took)/2].Microseconds(), took[len(took)*99/100].Microseconds(), float64(spent.Nanoseconds())/1000)
	}
	cancel()
	_ = conn.Close()
	<-ended
}

// processorTime is what this process has used.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// load asks one question for 2 s, each client with window of them under way, and gives
// the answers a second and how long each took.
func load(t *testing.T, addr, name string, clients, window int) (rate float64, took []time.Duration) {
	var wg sync.WaitGroup
	var mu sync.Mutex // guards took
	began := time.Now()
	for range clients {
		wg.Go(func() {
			c, err := net.Dial("udp4", addr)
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			sent := make([]time.Time, window)
			var mine []time.Duration
			req := new(dns.Msg).SetQuestion(name, dns.TypeA)
			ask := func(i int) {
				req.Id = uint16(i)
				b, _ := req.Pack()
				sent[i] = time.Now()
				_, _ = c.Write(b)
			}
			for i := range window {
				ask(i)
			}
			buf := make([]byte, 1500)
			for time.Since(began) < 2*time.Second {
				_ = c.SetReadDeadline(time.Now().Add(time.Second))
				n, err := c.Read(buf)
				if err != nil || n < 12 || buf[3]&0xf != dns.RcodeSuccess {
					t.Errorf("%s: %v, answer % x", name, err, buf[:min(n, 12)])
					return
				}
				i := int(buf[0])<<8 | int(buf[1])
				mine = append(mine, time.Since(sent[i]))
				ask(i)
			}
			mu.Lock()
			defer mu.Unlock()
			took = append(took, mine...)
		})
	}
	wg.Wait()
	if len(took) == 0 {
		t.Fatal("no answers")
	}
	return float64(len(took)) / time.Since(began).Seconds(), took
}
