package pki

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"strings"
	"testing"
	"time"
)

func separated(t *testing.T) *Trust {
	t.Helper()
	trust, err := NewTrust(3, newCA(t)).Separate(now)
	if err != nil {
		t.Fatal(err)
	}
	return trust
}

// subject is a name in a certificate, and what it is for; "": for nothing.
type subject struct {
	name   string
	groups []string
	of     Purpose
}

var subjects = []subject{
	{"system:node:n1", []string{NodesGroup, ServersGroup}, ForPeers},
	{"system:node:n1", []string{ServersGroup, NodesGroup}, ForPeers},
	{"system:node:a1", []string{NodesGroup}, ForNodes},
	{"admin", []string{AdminsGroup}, ForClients},
	{"jane", nil, ForClients},
	{"system:apiserver", nil, ForClients},
	// Whatever claims to be a node must be one in all.
	{"system:node:a1", []string{NodesGroup, AdminsGroup}, ""},
	{"system:node:n1", []string{NodesGroup, ServersGroup, AdminsGroup}, ""},
	{"system:node:a1", []string{NodesGroup, NodesGroup}, ""},
	{"system:node:a1", []string{ServersGroup}, ""},
	{"system:node:a1", []string{AdminsGroup}, ""},
	{"system:node:a1", nil, ""},
	{"system:node:", []string{NodesGroup}, ""},
	{"jane", []string{NodesGroup}, ""},
	{"admin", []string{AdminsGroup, ServersGroup}, ""},
	{"", []string{NodesGroup}, ""},
}

func (s subject) signedBy(t *testing.T, ca *CA) *x509.Certificate {
	t.Helper()
	key, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	cert, err := ca.sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: s.name, Organization: s.groups}, NotAfter: now.Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, key.Public(), now)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// TestRoots: an authority makes what it is for and nothing else, whatever its key signs.
func TestRoots(t *testing.T) {
	trust := separated(t)
	for _, by := range Purposes {
		for _, s := range subjects {
			cert := s.signedBy(t, trust.For(by).Signer())
			_, err := VerifyPeer([]*x509.Certificate{cert, trust.For(by).Signer().Cert}, trust.Roots, x509.ExtKeyUsageClientAuth, now)
			if (err == nil) != (s.of == by) {
				t.Errorf("%q %q by the authority for %s: %v", s.name, s.groups, by, err)
			}
		}
	}
	// With one authority for all it is as it was before there were others.
	one := NewTrust(0, newCA(t))
	for _, s := range subjects {
		if _, err := VerifyPeer([]*x509.Certificate{s.signedBy(t, one.Signer())}, one.Roots, x509.ExtKeyUsageClientAuth, now); err != nil {
			t.Errorf("%q %q by the only authority: %v", s.name, s.groups, err)
		}
	}
}

// TestSeparateTrust goes to disk and comes back, with keys and without.
func TestSeparateTrust(t *testing.T) {
	trust := separated(t)
	next, err := trust.For(ForClients).Signer().NewSuccessor(now)
	if err != nil {
		t.Fatal(err)
	}
	if trust.Changing() {
		t.Error("it is changing")
	}
	before := trust
	trust = trust.With(ForClients, next, trust.For(ForClients).Signer())
	if !trust.Changing() || !before.For(ForClients).Signer().Precedes(next) || len(trust.Whole()) != 6 {
		t.Errorf("%+v", trust)
	}
	keys, err := trust.Keys()
	if err != nil {
		t.Fatal(err)
	}
	own, err := trust.OwnKeys()
	if err != nil {
		t.Fatal(err)
	}
	for _, keys := range [][]byte{keys, nil} {
		got, err := ParseTrust(3, trust.Bundle(), keys)
		if err == nil {
			got, err = got.WithOwn(trust.OwnBundles(), own)
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range Purposes {
			for i, ca := range got.For(p).All() {
				if ca.ID() != trust.For(p).All()[i].ID() || ca.HasKey() != (keys != nil) || !got.Owns(p) {
					t.Errorf("for %s: %+v", p, ca)
				}
			}
		}
	}
	if public := trust.Public(); public.Signer().HasKey() || public.For(ForClients).Signer().HasKey() || public.For(ForClients).Signer().ID() != next.ID() {
		t.Errorf("without keys: %+v", public)
	}
	if shorter := trust.Shorter(time.Minute); shorter.For(ForNodes).Signer().life(time.Hour) != time.Minute || shorter.Signer().life(time.Hour) != time.Minute {
		t.Error("an authority's certificates live longer")
	}

	whole, _ := ParseTrust(3, trust.Bundle(), keys)
	delete(own, ForNodes)
	if _, err := whole.WithOwn(trust.OwnBundles(), own); err == nil || !strings.Contains(err.Error(), `the key of the one for "node" is missing`) {
		t.Errorf("a key is missing: %v", err)
	}
	own[ForNodes] = own[ForFront]
	if _, err := whole.WithOwn(trust.OwnBundles(), own); err == nil || !strings.Contains(err.Error(), "do not belong together") {
		t.Errorf("a key is another's: %v", err)
	}
	if _, err := whole.WithOwn(map[Purpose][]byte{ForPeers: trust.Bundle()}, nil); err == nil {
		t.Error("the servers' authority was replaced by another")
	}
}

// TestDropped: that an authority stays for one purpose does not keep it for another.
func TestDropped(t *testing.T) {
	ca := newCA(t)
	one := NewTrust(0, ca)
	split, err := one.Separate(now)
	if err != nil {
		t.Fatal(err)
	}
	both := split.With(ForClients, split.For(ForClients).Signer(), ca)
	for _, test := range []struct {
		name      string
		had, next *Trust
		p         Purpose
		want      int
		any       bool
	}{
		{"split, for clients", one, split, ForClients, 1, true},
		{"split, for servers", one, split, ForPeers, 0, true},
		{"both are trusted", one, both, ForClients, 0, true}, // the others have only their own
		{"the end", both, split, ForClients, 1, true},
		{"the end, for nodes", both, split, ForNodes, 0, true},
		{"nothing", both, both, ForClients, 0, false},
		{"another one beside it", split, both, ForClients, 0, false},
	} {
		if got := len(test.had.Dropped(test.next, test.p)); got != test.want || test.had.DropsAny(test.next) != test.any {
			t.Errorf("%s: %d, %t", test.name, got, test.had.DropsAny(test.next))
		}
	}
}
