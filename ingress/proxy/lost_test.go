package proxy

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/clusterd/clusterd/ingress/route"
)

// swallower passes connections on to an address until on is set: then
// it takes what clients send, and says nothing, as a machine does that is gone.
type swallower struct {
	addr netip.AddrPort
	on   atomic.Bool
}

func newSwallower(t *testing.T, to string) *swallower {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &swallower{addr: netip.MustParseAddrPort(l.Addr().String())}
	var wg sync.WaitGroup
	var mu sync.Mutex // guards open
	var open []net.Conn
	pass := func(to io.Writer, from io.Reader) {
		b := make([]byte, 4096)
		for {
			n, err := from.Read(b)
			if err != nil {
				return
			}
			if !s.on.Load() {
				_, _ = to.Write(b[:n])
			}
		}
	}
	wg.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", to)
			if err != nil {
				_ = client.Close()
				continue
			}
			mu.Lock()
			open = append(open, client, server)
			mu.Unlock()
			wg.Go(func() { pass(server, client); _ = server.Close() })
			wg.Go(func() { pass(client, server); _ = client.Close() })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		mu.Lock()
		for _, c := range open {
			_ = c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return s
}

func bad(k *kit, endpoint netip.AddrPort) bool {
	k.balance.mu.Lock()
	defer k.balance.mu.Unlock()
	_, is := k.balance.bad[endpoint]
	return is
}

// The bug: a connection of HTTP/2 whose other end was gone without a word took
// every request to its endpoint until the kernel gave it up.
func TestLostConnectionIsNoticed(t *testing.T) {
	for _, protocol := range []route.Protocol{route.H2C, route.HTTPS} {
		t.Run(string(protocol), func(t *testing.T) {
			var gone, stands *swallower
			for _, b := range []**swallower{&gone, &stands} {
				s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					_, _ = io.WriteString(w, r.Proto)
				}))
				if protocol == route.HTTPS {
					s.EnableHTTP2 = true
					s.StartTLS()
				} else {
					s.Config.Protocols = new(http.Protocols)
					s.Config.Protocols.SetUnencryptedHTTP2(true)
					s.Start()
				}
				t.Cleanup(s.Close)
				*b = newSwallower(t, s.Listener.Addr().String())
			}
			k := newKit(t, Config{pingAfter: 100 * time.Millisecond, pingFor: 5 * time.Second, ResponseTimeout: time.Hour})
			backends := func(endpoints ...netip.AddrPort) {
				k.rules(route.Rule{Host: "a.example", Backend: &route.Backend{Name: "b", Protocol: protocol, Endpoints: endpoints}})
			}
			backends(gone.addr)
			if code, body, _ := k.ask("GET", "http://a.example/", ""); code != 200 || body != "HTTP/2.0" {
				t.Fatal(code, body)
			}
			if bad(k, gone.addr) {
				t.Fatal("the endpoint is bad from the beginning")
			}
			gone.on.Store(true)
			// With a body that was read it is not sent a second time.
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			req, err := http.NewRequestWithContext(ctx, "POST", "http://a.example/", strings.NewReader("x"))
			if err != nil {
				t.Fatal(err)
			}
			resp, err := k.client.Do(req)
			if err != nil {
				t.Fatalf("a request on a connection that is lost: %v", err)
			}
			_ = resp.Body.Close()
			if resp.StatusCode != http.StatusBadGateway {
				t.Errorf("a request on a connection that is lost was answered with %d", resp.StatusCode)
			}
			if !bad(k, gone.addr) {
				t.Error("the endpoint is asked as any other")
			}
			backends(gone.addr, stands.addr)
			if code, body, _ := k.ask("GET", "http://a.example/", ""); code != 200 || body != "HTTP/2.0" {
				t.Errorf("while another endpoint stands: %d %s", code, body)
			}
		})
	}
}
