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
)

// TestFigures measures, with `make bench-net`: a line of JSON each. Answers over
// UDP on the loopback to 4 clients that each have 16 questions under way; they
// take from the same processors.
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
	for _, tt := range []struct{ name, question string }{{"cached name", "www.example.com."}, {"cluster name", "svc-7777.prod.svc.cluster.local."}} {
		rate, took := load(t, conn.LocalAddr().String(), tt.question)
		slices.Sort(took)
		fmt.Printf(`{"bench":"dns","what":%q,"services":%d,"answers_per_second":%.0f,"p50_us":%d,"p99_us":%d}`+"\n",
			tt.name, services, rate, took[len(took)/2].Microseconds(), took[len(took)*99/100].Microseconds())
	}
	cancel()
	_ = conn.Close()
	<-ended
}

// load asks one question for 2 s and gives the answers a second and how long each
// took with 16 before it.
func load(t *testing.T, addr, name string) (rate float64, took []time.Duration) {
	const clients, window = 4, 16
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
			var sent [window]time.Time
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
