package join

import (
	"context"
	"crypto/x509"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/join/jointest"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

func TestRevoke(t *testing.T) {
	ca, err := pki.NewCA("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	now := time.Date(2026, 11, 24, 12, 0, 0, 700_000_000, time.UTC)
	person := func(name string, at time.Time, groups ...string) *x509.Certificate {
		cert, err := ca.IssueClient(key.Public(), name, groups, time.Hour, at)
		if err != nil {
			t.Fatal(err)
		}
		return cert
	}
	node, err := ca.IssueAgent(key.Public(), "a1", now.Add(-time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	s := jointest.New()
	one := person("ci", now.Add(-time.Hour))
	certs := map[string]struct {
		cert *x509.Certificate
		gone bool
	}{
		"long before":              {person("jane", now.Add(-time.Hour)), true},
		"an administrator before":  {person("jane", now.Add(-time.Minute), pki.AdminsGroup), true},
		"in the same second":       {person("jane", now.Add(-500*time.Millisecond)), true},
		"by a clock that is ahead": {person("jane", now.Add(clockSkew-time.Second)), true},
		"later":                    {person("jane", now.Add(clockSkew+2*time.Second)), false},
		"another user":             {person("jan", now.Add(-time.Hour)), false},
		"by its number":            {one, true},
		"another of that name":     {person("ci", now.Add(-time.Hour)), false},
		"a node":                   {node, false},
	}
	for name, c := range certs {
		if gone, err := IsRevoked(t.Context(), s, c.cert); gone || err != nil {
			t.Errorf("%s: revoked %t, %v before anything was", name, gone, err)
		}
	}
	for _, r := range []Revocation{{User: "jane"}, {Serial: "00:" + Serial(one)}, {User: "system:node:a1"}, {Serial: Serial(node)}} {
		if _, err := Revoke(t.Context(), s, r, now); err != nil {
			t.Fatal(err)
		}
	}
	all, err := Revocations(t.Context(), s, true)
	if err != nil || len(all) != 4 {
		t.Fatalf("%+v, %v", all, err)
	}
	for name, c := range certs {
		gone, err := IsRevoked(t.Context(), s, c.cert)
		if gone != c.gone || err != nil || Taken(all, c.cert) != c.gone {
			t.Errorf("%s: revoked %t, %v, want %t", name, gone, err, c.gone)
		}
	}
	// Revoked again, later ones go, too.
	if _, err := Revoke(t.Context(), s, Revocation{User: "jane"}, now.Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if gone, err := IsRevoked(t.Context(), s, certs["later"].cert); !gone || err != nil {
		t.Errorf("revoked a second time: %t, %v", gone, err)
	}
}

// TestRevokeEachLife: a certificate that was signed before its user was revoked is
// taken, however long it lives and whoever's clock it was signed by; one that is
// signed right after that is good, and valid at once.
func TestRevokeEachLife(t *testing.T) {
	now := time.Date(2026, 11, 24, 12, 0, 0, 0, time.UTC)
	ca, err := pki.NewCA("test", now.Add(-24*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	for _, life := range []time.Duration{10 * time.Minute, 30 * time.Minute, 49 * time.Minute, 50 * time.Minute, time.Hour, 24 * time.Hour, pki.AdminLifetime} {
		for _, part := range []time.Duration{0, 1, 499 * time.Millisecond, 999 * time.Millisecond} {
			at, s := now.Add(part), jointest.New()
			issue := func(signed time.Time) *x509.Certificate {
				t.Helper()
				cert, err := ca.IssueClient(key.Public(), "jane", nil, life, signed)
				if err != nil {
					t.Fatal(err)
				}
				if off := pki.SignedAt(cert).Sub(signed); off < -1500*time.Millisecond || off > 500*time.Millisecond {
					t.Errorf("life %s: SignedAt is %s off", life, off)
				}
				return cert
			}
			if free, err := SignAt(t.Context(), s, "jane", at); err != nil || !free.Equal(at) {
				t.Errorf("before anything is revoked: signed at %s, %v", free, err)
			}
			if _, err := Revoke(t.Context(), s, Revocation{User: "jane"}, at); err != nil {
				t.Fatal(err)
			}
			for _, ago := range []time.Duration{0, time.Second, 90 * time.Second, 4 * time.Minute, life / 2, -10 * time.Second, -clockSkew + time.Second} {
				if gone, err := IsRevoked(t.Context(), s, issue(at.Add(-ago))); !gone || err != nil {
					t.Errorf("life %s, signed %s before the revocation: revoked %t, %v", life, ago, gone, err)
				}
			}
			for _, later := range []time.Duration{0, time.Millisecond, time.Second, clockSkew, clockSkew + time.Second, time.Minute} {
				signing := at.Add(later)
				signed, err := SignAt(t.Context(), s, "jane", signing)
				if err != nil {
					t.Fatal(err)
				}
				cert := issue(signed)
				if gone, err := IsRevoked(t.Context(), s, cert); gone || err != nil || cert.NotBefore.After(signing) {
					t.Errorf("life %s, signed %s after the revocation: revoked %t, %v, valid from %s", life, later, gone, err, cert.NotBefore)
				}
				if other, err := SignAt(t.Context(), s, "june", signing); err != nil || !other.Equal(signing) {
					t.Errorf("of another user: %s, %v", other, err)
				}
			}
		}
	}
}

// keeping notes for how long what is written is kept.
type keeping struct {
	Store
	ttl int64
}

func (s *keeping) Txn(ctx context.Context, t mvcc.Txn) (mvcc.TxnResult, error) {
	s.ttl = t.Ops[0].TTL
	return s.Store.Txn(ctx, t)
}

// TestRevocationIsKept: store time that was carried ahead by years does not end a
// revocation before the certificate ends by the clocks of the servers.
func TestRevocationIsKept(t *testing.T) {
	s := &keeping{Store: jointest.New()}
	if _, err := Revoke(t.Context(), s, Revocation{User: "jane"}, time.Now()); err != nil {
		t.Fatal(err)
	}
	if ahead := 10 * 365 * 24 * time.Hour; time.Duration(s.ttl)*time.Second < ahead+pki.MaxClientLifetime {
		t.Errorf("it is kept for %d s: a clock that is ten years ahead ends it too early", s.ttl)
	}
}

// TestRevocationValidate: what cannot be revoked is refused with what to do in its place.
func TestRevocationValidate(t *testing.T) {
	for _, tc := range []struct {
		r    Revocation
		want string // "": it is good
	}{
		{Revocation{User: "alice"}, ""},
		{Revocation{Serial: "4F:a0"}, ""},
		{Revocation{}, "give a user or a serial number"},
		{Revocation{User: "alice", Serial: "4f"}, "not both"},
		{Revocation{Serial: "x1"}, "openssl x509"},
		{Revocation{User: strings.Repeat("a", 254)}, "at most 253"},
		{Revocation{User: "system:node:n1"}, "members rm n1"},
		{Revocation{User: "system:serviceaccount:a:b"}, "go with the account"},
	} {
		switch err := tc.r.Validate(); {
		case tc.want == "" && err != nil:
			t.Errorf("%+v: %v", tc.r, err)
		case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
			t.Errorf("%+v: %v, want %q", tc.r, err, tc.want)
		}
	}
}
