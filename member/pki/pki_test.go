package pki

import (
	"crypto/x509"
	"errors"
	"math/big"
	"net/netip"
	"strings"
	"testing"
	"time"
)

var now = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

func newCA(t *testing.T) *CA {
	t.Helper()
	ca, err := NewCA("test", now)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func TestNodeCertificate(t *testing.T) {
	ca, other := newCA(t), newCA(t)
	key, _ := NewKey()
	cert, err := ca.IssueServer(key.Public(), "n1", []netip.Addr{netip.MustParseAddr("192.0.2.1")}, now)
	if err != nil {
		t.Fatal(err)
	}
	for _, use := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth} {
		p, err := VerifyPeer([]*x509.Certificate{cert}, ca.Roots, use, now)
		if err != nil {
			t.Fatal(err)
		}
		if p.Name != "n1" || p.ID != Fingerprint(key.Public()) {
			t.Fatalf("peer = %+v", p)
		}
	}
	if _, err := VerifyPeer([]*x509.Certificate{cert}, other.Roots, x509.ExtKeyUsageClientAuth, now); err == nil {
		t.Error("another cluster's certificate was accepted")
	}
	if _, err := VerifyPeer([]*x509.Certificate{cert}, ca.Roots, x509.ExtKeyUsageClientAuth, now.Add(ServerLifetime+time.Hour)); err == nil {
		t.Error("an expired certificate was accepted")
	}
	if _, err := VerifyPeer(nil, ca.Roots, x509.ExtKeyUsageClientAuth, now); err == nil {
		t.Error("no certificate was accepted")
	}
	if err := cert.VerifyHostname("192.0.2.1"); err != nil {
		t.Error(err)
	}
	if NeedsRenewal(cert, now.Add(ServerLifetime/2)) || !NeedsRenewal(cert, now.Add(ServerLifetime*3/4)) {
		t.Error("renewal is not at two thirds")
	}
	if !NeedsRenewal(cert, cert.NotBefore.Add(-time.Second)) {
		t.Error("one that a clock of the future signed is not renewed")
	}
	if LivesLonger(cert, ServerLifetime) || !LivesLonger(cert, ServerLifetime-time.Hour) {
		t.Error("it lives longer than it lives")
	}
}

// TestRenewalsAreSpread: of certificates that were signed at once, not many are
// renewed at once.
func TestRenewalsAreSpread(t *testing.T) {
	const all, steps = 1300, 13
	ca := newCA(t)
	cert, err := ca.IssueAgent(ca.key.Public(), "a1", now)
	if err != nil {
		t.Fatal(err)
	}
	life := cert.NotAfter.Sub(cert.NotBefore)
	due := func(share float64) int {
		n := 0
		for i := range all {
			one := *cert
			one.SerialNumber = new(big.Int).Add(serial(), big.NewInt(int64(i)))
			if NeedsRenewal(&one, cert.NotBefore.Add(time.Duration(share*float64(life)))) {
				n++
			}
		}
		return n
	}
	if early, late := due(0.599), due(0.732); early != 0 || late != all {
		t.Errorf("%d are due before 60 %%, %d of %d after 73 %%", early, late, all)
	}
	// Of 1300 drawn at random the deviation is 18 at most; 150 is eight of them.
	for step := 1; step < steps; step++ {
		share := 0.6 + 0.01*float64(step)
		want := float64(all) * float64(step) / steps
		if got := float64(due(share)); got < want-150 || got > want+150 {
			t.Errorf("%.0f of %d are due after %.0f %%, want about %.0f", got, all, share*100, want)
		}
	}
}

func TestAdminIsNoNode(t *testing.T) {
	ca := newCA(t)
	key, _ := NewKey()
	// A person who calls herself like a node is still not in the nodes' group.
	cert, err := ca.IssueClient(key.Public(), "system:node:n1", []string{AdminsGroup}, AdminLifetime, now)
	if err != nil {
		t.Fatal(err)
	}
	if name, ok := NodeName(cert); ok {
		t.Errorf("NodeName = %q", name)
	}
	if _, err := VerifyPeer([]*x509.Certificate{cert}, ca.Roots, x509.ExtKeyUsageServerAuth, now); err == nil {
		t.Error("a client certificate was accepted for a server")
	}
}

func TestCARoundTrip(t *testing.T) {
	ca := newCA(t)
	key, err := ca.EncodeCAKey()
	if err != nil {
		t.Fatal(err)
	}
	again, err := LoadCA(EncodeCert(ca.Cert), key)
	if err != nil {
		t.Fatal(err)
	}
	if !again.Cert.Equal(ca.Cert) {
		t.Error("the certificate changed")
	}
	if _, err := LoadCA(EncodeCert(newCA(t).Cert), key); err == nil {
		t.Error("a certificate and a key of two authorities were accepted together")
	}
}

func TestToken(t *testing.T) {
	ca := newCA(t)
	tok := NewToken(ca.Cert)
	text := tok.String()
	got, err := ParseToken(" " + text + "\n")
	if err != nil || got != tok {
		t.Fatalf("ParseToken = %+v, %v", got, err)
	}
	if !got.Pins(ca.Cert) || got.Pins(newCA(t).Cert) {
		t.Error("the token pins the wrong authority")
	}
	for i := range text { // every single altered letter is noticed
		for _, r := range "a7." {
			if rune(text[i]) == r {
				continue
			}
			bad := text[:i] + string(r) + text[i+1:]
			if _, err := ParseToken(bad); err == nil {
				t.Fatalf("altered at %d: %s was accepted", i, bad)
			}
		}
	}
	if _, err := ParseToken(text[:len(text)-3]); !errors.Is(err, ErrTokenAltered) {
		t.Errorf("cut token: %v", err)
	}
	if _, err := ParseToken("abcdef.0123456789abcdef"); !errors.Is(err, ErrTokenForm) {
		t.Errorf("foreign token: %v", err)
	}
}

func FuzzParseToken(f *testing.F) {
	f.Add("cd1.a.b.c.d")
	f.Add("")
	f.Add(strings.Repeat(".", 10))
	f.Fuzz(func(t *testing.T, s string) {
		if tok, err := ParseToken(s); err == nil {
			if again, err := ParseToken(tok.String()); err != nil || again != tok {
				t.Fatalf("%q does not come back: %+v, %v", s, again, err)
			}
		}
	})
}

// TestShortLives: certificates of nodes live as short as requested, are
// not born old, and are looked at often enough.
func TestShortLives(t *testing.T) {
	ca := newCA(t).Shorter(40 * time.Second)
	cert, err := ca.IssueServer(ca.key.Public(), "n1", nil, now)
	if err != nil {
		t.Fatal(err)
	}
	if life := cert.NotAfter.Sub(now); life > 40*time.Second || NeedsRenewal(cert, now.Add(20*time.Second)) || !NeedsRenewal(cert, now.Add(30*time.Second)) {
		t.Errorf("it lives %s", life)
	}
	if again := RenewalCheckInterval(cert); again > time.Second || again <= 0 {
		t.Errorf("looked at each %s", again)
	}
	person, err := ca.IssueClient(ca.key.Public(), "admin", nil, AdminLifetime, now)
	if err != nil || person.NotAfter.Sub(now) < AdminLifetime-time.Minute {
		t.Errorf("a person's lives %s, %v", person.NotAfter.Sub(now), err)
	}
	long, err := ca.Shorter(0).IssueServer(ca.key.Public(), "n1", nil, now)
	if err != nil || long.NotAfter.Sub(now) < ServerLifetime-time.Minute || RenewalCheckInterval(long) < 20*time.Minute {
		t.Errorf("without it: %s, %v", long.NotAfter.Sub(now), err)
	}
}

// TestServerDue: a server keeps the certificate of its CA that names what it is called by.
func TestServerDue(t *testing.T) {
	now := time.Now()
	ca, err := NewCA("test", now)
	if err != nil {
		t.Fatal(err)
	}
	other, err := NewCA("test", now)
	if err != nil {
		t.Fatal(err)
	}
	key, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	ips := []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	server, err := ca.IssueServer(key.Public(), "n1", ips, now, "api.example")
	if err != nil {
		t.Fatal(err)
	}
	agent, err := ca.IssueAgent(key.Public(), "n1", now)
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name  string
		ca    *CA
		cert  *x509.Certificate
		now   time.Time
		ips   []netip.Addr
		names []string
		want  bool
	}{
		{"as it is", ca, server, now, ips, []string{"api.example"}, false},
		{"it nears its end", ca, server, now.Add(ServerLifetime), ips, []string{"api.example"}, true},
		{"another address", ca, server, now, []netip.Addr{netip.MustParseAddr("192.0.2.2")}, []string{"api.example"}, true},
		{"a name that it has no more", ca, server, now, ips, nil, true},
		{"another CA signs", other, server, now, ips, []string{"api.example"}, true},
		{"it was an agent", ca, agent, now, ips, []string{"api.example"}, true},
	} {
		if got := tc.ca.ServerDue(tc.cert, tc.now, "n1", tc.ips, tc.names...); got != tc.want {
			t.Errorf("%s: %v, want %v", tc.name, got, tc.want)
		}
	}
}
