package transport

import (
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/pki"
)

// TestShown: while an authority is exchanged, clients of the API and joiners are
// shown the certificate that they can know, and nodes the node's.
func TestShown(t *testing.T) {
	old, next := newCA(t), newCA(t)
	server, _ := identity(t, next, "n1")
	elder, _ := identity(t, old, "n1")
	server.Shown = func(authority string) *tls.Certificate {
		if authority == next.ID() {
			return server.Certificate()
		}
		return elder.Certificate()
	}
	p := serve(t, server)
	for _, test := range []struct {
		name, serverName string
		protocols        []string
		want             *pki.CA
	}{
		{"the API", "", []string{"h2", "http/1.1"}, old},
		{"the API by name", "kubernetes", []string{"h2"}, old},
		{"a client without ALPN", "", nil, old},
		{"a joiner of an older release", "", []string{Join}, old},
		{"a joiner whose token pins the old one", AuthorityName(old.ID()), []string{Join}, old},
		{"a joiner whose token pins the new one", AuthorityName(next.ID()), []string{Join}, next},
		{"a joiner whose token pins another", AuthorityName("other"), []string{Join}, old},
		{"raft", AuthorityName(old.ID()), []string{Raft}, next},
		{"members' questions", "", []string{Member}, next},
	} {
		c, err := tls.Dial("tcp", p.Addr().String(), &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: test.protocols, ServerName: test.serverName, InsecureSkipVerify: true})
		if err != nil {
			t.Fatalf("%s: %v", test.name, err)
		}
		if leaf := c.ConnectionState().PeerCertificates[0]; !test.want.Signed(leaf) {
			t.Errorf("%s: it is shown a certificate of the other authority", test.name)
		}
		c.Close()
	}
}

// TestCutDistrusted: with its authority goes what was opened with its
// certificates, of any holder, but not what a member's key opened.
func TestCutDistrusted(t *testing.T) {
	old, next := newCA(t), newCA(t)
	trust := &pki.LiveTrust{}
	trust.Store(pki.NewTrust(1, next, old))
	server, serverID := identity(t, next, "n1")
	server.Roots = trust.Roots
	p := serve(t, server)

	open := func(ca *pki.CA, name, protocol string) (ours net.Conn, id string) {
		client, id := identity(t, ca, name)
		client.Roots = trust.Roots
		theirs, err := client.Dial(t.Context(), p.Addr(), serverID, protocol)
		if err != nil {
			t.Fatal(err)
		}
		if ours, err = p.Protocol(protocol).Accept(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { theirs.Close(); ours.Close() })
		return ours, id
	}
	person := func(ca *pki.CA) net.Conn {
		key, err := pki.NewKey()
		if err != nil {
			t.Fatal(err)
		}
		cert, err := ca.IssueClient(key.Public(), "jane", []string{pki.AdminsGroup}, time.Hour, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		c, err := tls.Dial("tcp", p.Addr().String(), &tls.Config{
			InsecureSkipVerify: true, NextProtos: []string{"h2"},
			Certificates: []tls.Certificate{{Certificate: [][]byte{cert.Raw}, PrivateKey: key}},
		})
		if err != nil {
			t.Fatal(err)
		}
		ours, err := p.HTTP().Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close(); ours.Close() })
		return ours
	}
	member, memberID := open(old, "n2", Raft)
	forged, _ := open(old, "n2", Node)
	renewed, _ := open(next, "n3", Raft)
	oldJane, newJane := person(old), person(next)
	silent, err := net.Dial("tcp", netip.AddrPort(p.Addr()).String()) // has not said a word
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()

	trust.Store(pki.NewTrust(2, next))
	p.CloseUntrusted(func(id string) bool { return id == memberID })
	for name, test := range map[string]struct {
		conn net.Conn
		open bool
	}{
		"a member's old connection":        {member, true},
		"a node's by a forged certificate": {forged, false},
		"a node's by the new authority":    {renewed, true},
		"a person's by the old authority":  {oldJane, false},
		"a person's by the new authority":  {newJane, true},
	} {
		wait := 30 * time.Second
		if test.open {
			wait = 50 * time.Millisecond
		}
		test.conn.SetReadDeadline(time.Now().Add(wait))
		_, err := test.conn.Read(make([]byte, 1))
		if open := errors.Is(err, os.ErrDeadlineExceeded); open != test.open {
			t.Errorf("%s: open %t (%v), want %t", name, open, err, test.open)
		}
	}
	// And no other comes.
	stranger, _ := identity(t, old, "n4")
	stranger.Roots = trust.Roots
	c, err := stranger.Dial(t.Context(), p.Addr(), serverID, Raft)
	if err == nil {
		c.SetReadDeadline(time.Now().Add(30 * time.Second))
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a node of the old authority is let in: %v", err)
		}
		c.Close()
	}
}

// TestSeparateAuthorities: whatever the key of the authority for one purpose signs, the port
// opens nothing to it that is for another.
func TestSeparateAuthorities(t *testing.T) {
	trust, err := pki.NewTrust(0, newCA(t)).Separate(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	server, serverID := identity(t, trust.Signer(), "n1")
	server.Roots = trust.Roots
	p := serve(t, server)
	for _, by := range pki.Purposes {
		ca := trust.For(by).Signer()
		key, err := pki.NewKey()
		if err != nil {
			t.Fatal(err)
		}
		cert, err := ca.IssueAgent(key.Public(), "a1", time.Now())
		if err != nil {
			t.Fatal(err)
		}
		pair := &tls.Certificate{Certificate: [][]byte{cert.Raw, ca.Cert.Raw}, PrivateKey: key, Leaf: cert}
		agent := Identity{Certificate: func() *tls.Certificate { return pair }, Roots: trust.Roots}
		forged, _ := identity(t, ca, "n2")
		forged.Roots = trust.Roots
		for _, test := range []struct {
			id       Identity
			protocol string
			open     bool
		}{
			{forged, Raft, by == pki.ForPeers},
			{forged, Gossip, by == pki.ForPeers},
			{forged, Node, by == pki.ForPeers},
			{forged, Member, by == pki.ForPeers},
			{agent, Member, by == pki.ForNodes},
			{agent, Tunnel, by == pki.ForNodes},
			{agent, Raft, false},
		} {
			c, err := test.id.Dial(t.Context(), p.Addr(), serverID, test.protocol)
			if err == nil {
				wait := 30 * time.Second
				if test.open {
					wait = 50 * time.Millisecond
				}
				c.SetReadDeadline(time.Now().Add(wait))
				_, err = c.Read(make([]byte, 1))
				c.Close()
			}
			if open := errors.Is(err, os.ErrDeadlineExceeded); open != test.open {
				t.Errorf("%s to %s by the authority for %s: open %t (%v)", test.protocol, test.id.Certificate().Leaf.Subject, by, open, err)
			}
		}
		// The other way round: who answers with it is no server to anybody.
		other := serve(t, forged)
		c, err := server.Dial(t.Context(), other.Addr(), "", Raft)
		if (err == nil) != (by == pki.ForPeers) {
			t.Errorf("a server by the authority for %s is dialled: %v", by, err)
		}
		if c != nil {
			c.Close()
		}
	}
}
