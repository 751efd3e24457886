package transport

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/clusterd/clusterd/leaktest"
	"github.com/clusterd/clusterd/member/pki"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func newCA(t testing.TB) *pki.CA {
	t.Helper()
	ca, err := pki.NewCA("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func identity(t testing.TB, ca *pki.CA, name string) (Identity, string) {
	t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	cert, err := ca.IssueServer(key.Public(), name, []netip.Addr{netip.MustParseAddr("127.0.0.1")}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	pair := &tls.Certificate{Certificate: [][]byte{cert.Raw, ca.Cert.Raw}, PrivateKey: key, Leaf: cert}
	return Identity{Certificate: func() *tls.Certificate { return pair }, Roots: ca.Roots}, pki.Fingerprint(key.Public())
}

func serve(t testing.TB, id Identity) *Port {
	t.Helper()
	return serveLogging(t, id, slog.DiscardHandler)
}

func serveLogging(t testing.TB, id Identity, log slog.Handler) *Port {
	t.Helper()
	p, err := Listen(netip.MustParseAddrPort("127.0.0.1:0"), id, slog.New(log))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return p
}

// warnings counts them.
type warnings struct{ n atomic.Int64 }

func (*warnings) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }
func (w *warnings) WithAttrs([]slog.Attr) slog.Handler         { return w }
func (w *warnings) WithGroup(string) slog.Handler              { return w }
func (w *warnings) Handle(context.Context, slog.Record) error {
	w.n.Add(1)
	return nil
}

// TestStrangersDoNotFillTheLog: connections without a certificate that ask for what
// is between nodes are a line each minute, however many they are.
func TestStrangersDoNotFillTheLog(t *testing.T) {
	ca := newCA(t)
	server, _ := identity(t, ca, "n1")
	var got warnings
	p := serveLogging(t, server, &got)
	for _, proto := range []string{Raft, Gossip} {
		for range 200 {
			c, err := tls.Dial("tcp", p.Addr().String(), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{proto}})
			if err != nil {
				t.Fatal(err)
			}
			c.SetDeadline(time.Now().Add(30 * time.Second))
			if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("a stranger was heard: %v", err)
			}
			c.Close()
		}
	}
	if n := got.n.Load(); n < 2 || n > 10 { // the interval may end once or twice on a busy machine
		t.Errorf("%d warnings of 400 connections", n)
	}
}

func TestProtocolsReachTheirListeners(t *testing.T) {
	ca := newCA(t)
	server, serverID := identity(t, ca, "n1")
	client, clientID := identity(t, ca, "n2")
	p := serve(t, server)
	for _, proto := range []string{Raft, Gossip, Node, Member, Join} {
		c, err := client.Dial(t.Context(), p.Addr(), serverID, proto)
		if err != nil {
			t.Fatalf("%s: %v", proto, err)
		}
		s, err := p.Protocol(proto).Accept()
		if err != nil {
			t.Fatal(err)
		}
		if id, name := PeerOf(s); id != clientID || name != "n2" {
			t.Errorf("%s: the peer is %s %s", proto, id, name)
		}
		if id, name := PeerOf(c); id != serverID || name != "n1" {
			t.Errorf("%s: the server is %s %s", proto, id, name)
		}
		c.Close()
		s.Close()
	}
}

// TestAnAgentsKey: an agent's certificate opens the door for members' questions
// and no other, and does not pass for a server's.
func TestAnAgentsKey(t *testing.T) {
	ca := newCA(t)
	server, serverID := identity(t, ca, "n1")
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	cert, err := ca.IssueAgent(key.Public(), "a1", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if len(cert.DNSNames)+len(cert.IPAddresses) != 0 {
		t.Errorf("an agent's certificate vouches for %v %v", cert.DNSNames, cert.IPAddresses)
	}
	pair := &tls.Certificate{Certificate: [][]byte{cert.Raw, ca.Cert.Raw}, PrivateKey: key, Leaf: cert}
	agent := Identity{Certificate: func() *tls.Certificate { return pair }, Roots: ca.Roots}
	p := serve(t, server)
	for _, proto := range []string{Raft, Gossip, Node} {
		c, err := agent.Dial(t.Context(), p.Addr(), serverID, proto)
		if err == nil {
			c.SetDeadline(time.Now().Add(30 * time.Second))
			_, err = c.Read(make([]byte, 1))
			c.Close()
		}
		if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s is open to an agent: %v", proto, err)
		}
	}
	c, err := agent.Dial(t.Context(), p.Addr(), serverID, Member)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()

	// The agent's own port: servers alone, for node calls alone.
	door, err := ListenNode(netip.MustParseAddrPort("127.0.0.1:0"), agent, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { door.Run(ctx); close(done) }()
	t.Cleanup(func() { cancel(); <-done })
	if c, err = server.Dial(t.Context(), door.Addr(), pki.Fingerprint(key.Public()), Node); err != nil {
		t.Fatal(err)
	}
	c.Close()
	for _, proto := range []string{Raft, Gossip, Member, Join} {
		if c, err := server.Dial(t.Context(), door.Addr(), "", proto); err == nil {
			c.Close()
			t.Errorf("an agent answers %s", proto)
		}
	}
	if c, err := agent.Dial(t.Context(), door.Addr(), "", Node); err == nil {
		c.SetDeadline(time.Now().Add(30 * time.Second))
		if _, err = c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("one agent's key opens another: %v", err)
		}
		c.Close()
	}
	if c, err := tls.Dial("tcp", door.Addr().String(), &tls.Config{InsecureSkipVerify: true}); err == nil {
		c.SetDeadline(time.Now().Add(30 * time.Second))
		if _, err = c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a connection without a protocol stays: %v", err)
		}
		c.Close()
	}
}

// TestWeakSuites: no suite without authenticated encryption is taken.
func TestWeakSuites(t *testing.T) {
	ca := newCA(t)
	server, _ := identity(t, ca, "n1")
	p := serve(t, server)
	if c, err := tls.Dial("tcp", p.Addr().String(), &tls.Config{RootCAs: ca.Pool(), MaxVersion: tls.VersionTLS12, CipherSuites: []uint16{tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA, tls.TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA, tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256}}); err == nil {
		c.Close()
		t.Error("a CBC suite was taken")
	}
	c, err := tls.Dial("tcp", p.Addr().String(), &tls.Config{RootCAs: ca.Pool(), MaxVersion: tls.VersionTLS12, NextProtos: []string{Raft}, InsecureSkipVerify: true})
	if err != nil {
		return
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("nodes speak TLS 1.2: %v", err)
	}
}

func TestHTTPOnTheSamePort(t *testing.T) {
	ca := newCA(t)
	id, _ := identity(t, ca, "n1")
	p := serve(t, id)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.Proto) })}
	done := make(chan struct{})
	go func() { srv.Serve(p.HTTP()); close(done) }()
	t.Cleanup(func() { srv.Close(); <-done })
	for want, protos := range map[string][]string{"HTTP/2.0": {"h2", "http/1.1"}, "HTTP/1.1": nil} {
		tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: ca.Pool(), NextProtos: protos}, ForceAttemptHTTP2: protos != nil}
		res, err := (&http.Client{Transport: tr}).Get("https://" + p.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(res.Body)
		res.Body.Close()
		tr.CloseIdleConnections()
		if string(b) != want {
			t.Errorf("spoke %s, want %s", b, want)
		}
	}
}

func TestHTTPOverAProtocol(t *testing.T) {
	ca := newCA(t)
	id, _ := identity(t, ca, "n1")
	p := serve(t, id)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "hello") })}
	done := make(chan struct{})
	go func() { srv.Serve(p.HTTPOver(Node)); close(done) }()
	t.Cleanup(func() { srv.Close(); <-done })
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return id.Dial(ctx, p.Addr(), "", Node)
	}}
	res, err := (&http.Client{Transport: tr}).Get("http://n1/")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if b, _ := io.ReadAll(res.Body); string(b) != "hello" {
		t.Errorf("got %q", b)
	}
}

// refused checks that a server drops the connection without handing it on.
func refused(t *testing.T, p *Port, c net.Conn, proto string) {
	t.Helper()
	defer c.Close()
	c.SetReadDeadline(time.Now().Add(30 * time.Second))
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Errorf("%s: data came over a connection that must be refused", proto)
	} else if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%s: the connection was kept open", proto)
	}
	select {
	case <-p.split[proto].conns:
		t.Errorf("%s: the connection was handed on", proto)
	default:
	}
}

func TestStrangersAreRefused(t *testing.T) {
	ca := newCA(t)
	server, serverID := identity(t, ca, "n1")
	var revoked string
	server.Revoked = func(id string) bool { return id == revoked }
	p := serve(t, server)

	stranger, _ := identity(t, newCA(t), "n2")
	if _, err := stranger.Dial(t.Context(), p.Addr(), "", Raft); err == nil {
		t.Error("a node of another cluster accepted our server")
	}
	stranger.Roots = ca.Roots // it may trust us; we do not trust it
	c, err := stranger.Dial(t.Context(), p.Addr(), serverID, Raft)
	if err != nil {
		t.Fatal(err)
	}
	refused(t, p, c, Raft)

	person, _ := identity(t, ca, "n3")
	key, _ := pki.NewKey()
	cert, err := ca.IssueClient(key.Public(), "admin", []string{pki.AdminsGroup}, time.Hour, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	person.Certificate = func() *tls.Certificate {
		return &tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key}
	}
	if c, err = person.Dial(t.Context(), p.Addr(), serverID, Node); err != nil {
		t.Fatal(err)
	}
	refused(t, p, c, Node)

	removed, removedID := identity(t, ca, "n4")
	revoked = removedID
	if c, err = removed.Dial(t.Context(), p.Addr(), serverID, Raft); err != nil {
		t.Fatal(err)
	}
	refused(t, p, c, Raft)
}

func TestDialChecksTheKey(t *testing.T) {
	ca := newCA(t)
	server, _ := identity(t, ca, "n1")
	client, clientID := identity(t, ca, "n2")
	p := serve(t, server)
	_, err := client.Dial(t.Context(), p.Addr(), clientID, Raft)
	if err == nil || !strings.Contains(err.Error(), "not "+clientID) {
		t.Errorf("dialled the wrong node: %v", err)
	}
	if _, err := client.Dial(t.Context(), p.Addr(), "", "nonsense/1"); err == nil {
		t.Error("an unknown protocol was accepted")
	}
}

func TestSilentPeerDoesNotBlockOthers(t *testing.T) {
	ca := newCA(t)
	server, serverID := identity(t, ca, "n1")
	client, _ := identity(t, ca, "n2")
	p := serve(t, server)
	silent, err := net.Dial("tcp", p.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	c, err := client.Dial(t.Context(), p.Addr(), serverID, Raft)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

func TestCutEndsWhatIsOpen(t *testing.T) {
	ca := newCA(t)
	server, serverID := identity(t, ca, "n1")
	p := serve(t, server)
	open := func(name string) (theirs, ours net.Conn, id string) {
		client, id := identity(t, ca, name)
		theirs, err := client.Dial(t.Context(), p.Addr(), serverID, Raft)
		if err != nil {
			t.Fatal(err)
		}
		if ours, err = p.Protocol(Raft).Accept(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { theirs.Close(); ours.Close() })
		return theirs, ours, id
	}
	cut, atCut, cutID := open("n2")
	kept, atKept, _ := open("n3")
	p.CloseConns(cutID)
	for _, c := range []net.Conn{cut, atCut} {
		c.SetReadDeadline(time.Now().Add(30 * time.Second))
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("the connection is open: %v", err)
		}
	}
	if _, err := kept.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := atKept.Read(make([]byte, 1)); err != nil {
		t.Errorf("another node's connection was cut: %v", err)
	}
	atKept.Close()
	atCut.Close()
	if n := len(p.live.conns); n != 0 {
		t.Errorf("%d closed connections are remembered", n)
	}
}
