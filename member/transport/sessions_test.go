package transport

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/member/pki"
)

// reach dials, and reads the first byte that the port's user sends: with it comes the
// session. It reports whether the connection resumed one.
func reach(t testing.TB, p *Port, id Identity, want, protocol string) (resumed bool, err error) {
	t.Helper()
	c, err := id.Dial(t.Context(), p.Addr(), want, protocol)
	if err != nil {
		return false, err
	}
	defer c.Close()
	c.SetReadDeadline(time.Now().Add(60 * time.Second))
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal("neither taken nor refused")
		}
		return false, err
	}
	return c.(*tls.Conn).ConnectionState().DidResume, nil
}

// welcome sends a byte over each connection of a protocol.
func welcome(t testing.TB, p *Port, protocol string) {
	ln := p.Protocol(protocol)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			c.Write([]byte{1})
			c.Close()
		}
	}()
	t.Cleanup(func() { ln.Close(); <-done })
}

func TestResumed(t *testing.T) {
	ca := newCA(t)
	server, serverID := identity(t, ca, "n1")
	client, clientID := identity(t, ca, "n2")
	var removed atomic.Bool
	server.Revoked = func(id string) bool { return id == clientID && removed.Load() }
	p := serve(t, server)
	for _, protocol := range []string{Raft, Node, Member} {
		welcome(t, p, protocol)
	}
	client.Sessions = NewSessions()
	for i, protocol := range []string{Raft, Raft, Node, Member} {
		if resumed, err := reach(t, p, client, serverID, protocol); err != nil || resumed != (i > 0) {
			t.Errorf("connection %d: resumed %t, %v", i, resumed, err)
		}
	}
	if resumed, err := reach(t, p, client, "", Member); err != nil || resumed {
		t.Errorf("whoever is at the address: resumed %t, %v", resumed, err)
	}
	none := client
	none.Sessions = nil
	if resumed, err := reach(t, p, none, serverID, Raft); err != nil || resumed {
		t.Errorf("without sessions: resumed %t, %v", resumed, err)
	}

	// Another certificate of the same node takes a handshake of its own.
	renewed := client
	pair := *client.Certificate()
	renewed.Certificate = func() *tls.Certificate { return &pair }
	if resumed, err := reach(t, p, renewed, serverID, Raft); err != nil || resumed {
		t.Errorf("with another certificate: resumed %t, %v", resumed, err)
	}

	// A node that was removed is refused with its session, too.
	removed.Store(true)
	if _, err := reach(t, p, client, serverID, Raft); err == nil {
		t.Error("a node that was removed came in with its session")
	}
	removed.Store(false)
	// The port that it names another one's key of does not get the session.
	if _, err := reach(t, p, client, clientID, Raft); err == nil || !strings.Contains(err.Error(), "not "+clientID) {
		t.Errorf("another node than was wanted: %v", err)
	}
	// Nor does a node go on with a port whose key was removed.
	client.Revoked = func(id string) bool { return id == serverID }
	if _, err := reach(t, p, client, serverID, Raft); err == nil || !strings.Contains(err.Error(), "removed") {
		t.Errorf("a session with a node that was removed: %v", err)
	}
	client.Revoked = nil

	// An authority that is trusted no longer: neither side takes a session of it.
	other := newCA(t)
	old := client.Roots
	client.Roots = other.Roots
	if _, err := reach(t, p, client, serverID, Raft); err == nil {
		t.Error("a session goes on with a port of an authority that is not trusted")
	}
	client.Roots = old
	if _, err := reach(t, p, client, serverID, Raft); err != nil {
		t.Error(err)
	}
}

// TestDistrustedIsNotResumed: a port that trusts another authority now does not take
// the session of one who was trusted.
func TestDistrustedIsNotResumed(t *testing.T) {
	old, next := newCA(t), newCA(t)
	trust := &pki.LiveTrust{}
	trust.Store(pki.NewTrust(1, next, old))
	server, serverID := identity(t, next, "n1")
	server.Roots = trust.Roots
	client, _ := identity(t, old, "n2")
	client.Roots, client.Sessions = pki.NewTrust(1, next, old).Roots, NewSessions()
	p := serve(t, server)
	welcome(t, p, Raft)
	for i := range 2 {
		if resumed, err := reach(t, p, client, serverID, Raft); err != nil || resumed != (i > 0) {
			t.Fatalf("resumed %t, %v", resumed, err)
		}
	}
	trust.Store(pki.NewTrust(2, next))
	if _, err := reach(t, p, client, serverID, Raft); err == nil {
		t.Error("it came in with its session")
	}
}

// TestExpiredIsNotResumed: a certificate ends with its time, whatever session it has.
func TestExpiredIsNotResumed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := newCA(t).Shorter(time.Hour)
		server, serverID := identity(t, ca, "n1")
		client, _ := identity(t, ca, "n2")
		client.Sessions = NewSessions()
		config := (&Port{id: server, split: map[string]*queue{Raft: nil}}).serverConfig()
		// Both ends in one bubble, over a pipe.
		connect := func() (resumed bool, err error) {
			a, b := net.Pipe()
			ours, theirs := behind(a), behind(b)
			defer ours.Close()
			refused := make(chan error, 1)
			go func() {
				c := tls.Server(theirs, config)
				defer c.Close()
				if err := c.Handshake(); err != nil {
					refused <- err
					return
				}
				_, err := server.verify(c.ConnectionState().PeerCertificates, x509.ExtKeyUsageClientAuth, "", servers)
				if err == nil {
					_, err = c.Write([]byte{1})
				}
				refused <- err
			}()
			conf, _ := client.dialConfig("pipe", serverID, servers, Raft)
			c := tls.Client(ours, conf)
			if err := c.Handshake(); err != nil {
				ours.Close()
				return false, errors.Join(err, <-refused)
			}
			_, err = io.ReadFull(c, make([]byte, 1))
			if e := <-refused; e != nil {
				err = e
			}
			return c.ConnectionState().DidResume, err
		}
		for i := range 2 {
			if resumed, err := connect(); err != nil || resumed != (i > 0) {
				t.Fatalf("connection %d: resumed %t, %v", i, resumed, err)
			}
		}
		time.Sleep(24 * 400 * time.Hour)
		if _, err := connect(); err == nil {
			t.Error("a connection by certificates that have run out")
		}
	})
}

// behind is a pipe's end whose writer does not wait for the reader: ends of TLS may
// both write.
func behind(c net.Conn) net.Conn {
	b := &behindConn{Conn: c, queue: make(chan []byte, 100)}
	go func() {
		defer c.Close()
		for p := range b.queue {
			if _, err := c.Write(p); err != nil {
				return
			}
		}
	}()
	return b
}

type behindConn struct {
	net.Conn
	queue chan []byte
	once  sync.Once
}

func (b *behindConn) Write(p []byte) (int, error) {
	b.queue <- bytes.Clone(p)
	return len(p), nil
}

// SetWriteDeadline is what TLS ends with: what was written is to arrive.
func (b *behindConn) SetWriteDeadline(time.Time) error { return nil }

func (b *behindConn) Close() error {
	b.once.Do(func() { close(b.queue) })
	return nil
}

func TestSessionsAreBounded(t *testing.T) {
	s := NewSessions()
	leaf := &tls.Certificate{}
	ca := newCA(t)
	for i := range maxSessions + 100 {
		d := s.of(sessionKey{addr: netip.AddrPortFrom(netip.Addr{}, uint16(i)).String(), want: string(rune('a' + i%26)), ours: leaf})
		d.verified(ca.Cert)
		d.Put("", &tls.ClientSessionState{})
		if _, ok := d.Get(""); !ok {
			t.Fatalf("session %d is not there", i)
		}
	}
	if n := len(s.all); n > maxSessions {
		t.Errorf("%d sessions", n)
	}
}

// processor is what this process has used.
func processor(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// What a session saves of the processor, both ends together.
func BenchmarkHandshake(b *testing.B) {
	for name, sessions := range map[string]*Sessions{"full": nil, "resumed": NewSessions()} {
		b.Run(name, func(b *testing.B) {
			ca := newCA(b)
			server, serverID := identity(b, ca, "n1")
			client, _ := identity(b, ca, "n2")
			client.Sessions = sessions
			p := serve(b, server)
			welcome(b, p, Raft)
			began := processor(b)
			for b.Loop() {
				if _, err := reach(b, p, client, serverID, Raft); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(processor(b)-began)/float64(b.N), "cpu-ns/op")
		})
	}
}
