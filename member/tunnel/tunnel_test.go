package tunnel

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/clusterd/clusterd/leaktest"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

var quiet = slog.New(slog.DiscardHandler)

// member is a node's identity.
type member struct {
	transport.Identity
	id string
}

func newMember(t *testing.T, ca *pki.CA, name string, role pki.Role) member {
	t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	var cert *x509.Certificate
	if role == pki.Server {
		cert, err = ca.IssueServer(key.Public(), name, []netip.Addr{netip.MustParseAddr("127.0.0.1")}, time.Now())
	} else {
		cert, err = ca.IssueAgent(key.Public(), name, time.Now())
	}
	if err != nil {
		t.Fatal(err)
	}
	pair := &tls.Certificate{Certificate: [][]byte{cert.Raw, ca.Cert.Raw}, PrivateKey: key, Leaf: cert}
	return member{transport.Identity{Certificate: func() *tls.Certificate { return pair }, Roots: ca.Roots}, pki.Fingerprint(key.Public())}
}

// server is a port whose tunnels a Hub takes.
func server(t *testing.T, id member, addr string) (*transport.Port, *Hub, func()) {
	t.Helper()
	p, err := transport.Listen(netip.MustParseAddrPort(addr), id.Identity, quiet)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	hub := NewHub(quiet)
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := p.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	wg.Go(func() {
		if err := hub.Run(ctx, p.Protocol(transport.Tunnel)); err != nil {
			t.Error(err)
		}
	})
	end := sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(end)
	return p, hub, end
}

// agent keeps connections to the servers, and answers with its name and who asks.
func agent(t *testing.T, id member, name string, servers func() []join.ServerAddr) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		_ = Keep(ctx, Config{
			Servers: servers, Logger: quiet,
			Dial: func(ctx context.Context, s join.ServerAddr) (net.Conn, error) {
				return id.Dial(ctx, s.Addr, s.ID, transport.Tunnel)
			},
			Serve: func(ctx context.Context, ln net.Listener) error {
				srv := &http.Server{ConnContext: transport.WithPeer, ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					_, who := transport.PeerFrom(r.Context())
					_, _ = io.WriteString(w, name+" answers "+who)
				})}
				stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
				defer stop()
				return srv.Serve(ln)
			},
		})
	}()
}

// ask calls an agent until it answers.
func ask(t *testing.T, hub *Hub, id string) string {
	t.Helper()
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return hub.Dial(ctx, id) }}
	var last error
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		resp, err := (&http.Client{Transport: tr}).Get("http://agent/")
		if err != nil {
			last = err
			continue
		}
		b, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	t.Fatalf("the agent does not answer: %v", last)
	return ""
}

// TestServersCallAgents: every server reaches the agents that dialled it, each
// knows the other by its key, and a server that comes back is found again.
func TestServersCallAgents(t *testing.T) {
	ca, err := pki.NewCA("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	n1, n2 := newMember(t, ca, "n1", pki.Server), newMember(t, ca, "n2", pki.Server)
	a1, a2 := newMember(t, ca, "a1", pki.Agent), newMember(t, ca, "a2", pki.Agent)
	p1, hub1, end1 := server(t, n1, "127.0.0.1:0")
	p2, hub2, _ := server(t, n2, "127.0.0.1:0")
	servers := func() []join.ServerAddr {
		return []join.ServerAddr{{ID: n1.id, Name: "n1", Addr: p1.Addr()}, {ID: n2.id, Name: "n2", Addr: p2.Addr()}}
	}
	agent(t, a1, "a1", servers)
	agent(t, a2, "a2", servers)
	for _, tt := range []struct {
		hub      *Hub
		id, want string
	}{
		{hub1, a1.id, "a1 answers n1"}, {hub1, a2.id, "a2 answers n1"},
		{hub2, a1.id, "a1 answers n2"}, {hub2, a2.id, "a2 answers n2"},
	} {
		if got := ask(t, tt.hub, tt.id); got != tt.want {
			t.Errorf("got %q, want %q", got, tt.want)
		}
	}
	c, err := hub1.Dial(t.Context(), a1.id)
	if err != nil {
		t.Fatal(err)
	}
	if id, name := transport.PeerOf(c); id != a1.id || name != "a1" {
		t.Errorf("the peer is %s %s", id, name)
	}
	c.Close()
	if _, err := hub1.Dial(t.Context(), n2.id); !errors.Is(err, ErrNone) {
		t.Errorf("who has no connection: %v", err)
	}
	// The port cuts what a removed node has open, its tunnel, too.
	p2.CloseConns(a2.id)
	if got := ask(t, hub2, a2.id); got != "a2 answers n2" {
		t.Errorf("after it connected again: %q", got)
	}
	end1()
	if _, err := hub1.Dial(t.Context(), a1.id); err == nil {
		t.Error("a server that ended calls an agent")
	}
	_, again, _ := server(t, n1, p1.Addr().String())
	if got := ask(t, again, a1.id); got != "a1 answers n1" {
		t.Errorf("after its server came back: %q", got)
	}
}

// TestOnlyAgentsTunnel: servers and strangers may not offer one.
func TestOnlyAgentsTunnel(t *testing.T) {
	ca, err := pki.NewCA("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	other, err := pki.NewCA("other", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	n1 := newMember(t, ca, "n1", pki.Server)
	p, hub, _ := server(t, n1, "127.0.0.1:0")
	stranger := newMember(t, other, "a1", pki.Agent)
	stranger.Roots = ca.Roots // it trusts the server
	for name, who := range map[string]member{"a server": newMember(t, ca, "n2", pki.Server), "another cluster's agent": stranger} {
		c, err := who.Dial(t.Context(), p.Addr(), n1.id, transport.Tunnel)
		if err == nil {
			// TLS 1.3 lets the client finish first: the refusal comes with a read.
			_ = c.SetReadDeadline(time.Now().Add(time.Minute))
			if _, err = c.Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s was let in (%v)", name, err)
			}
			c.Close()
		}
		if _, err := hub.Dial(t.Context(), who.id); !errors.Is(err, ErrNone) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
