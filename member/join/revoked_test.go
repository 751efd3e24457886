package join

import (
	"crypto/x509"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/join/jointest"
	"github.com/clusterd/clusterd/member/pki"
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
		"long before":             {person("jane", now.Add(-time.Hour)), true},
		"an administrator before": {person("jane", now.Add(-time.Minute), pki.AdminsGroup), true},
		"in the same second":      {person("jane", now.Add(-500*time.Millisecond)), true},
		"a second later":          {person("jane", now.Add(time.Second)), false},
		"another user":            {person("jan", now.Add(-time.Hour)), false},
		"by its number":           {one, true},
		"another of that name":    {person("ci", now.Add(-time.Hour)), false},
		"a node":                  {node, false},
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
	if gone, err := IsRevoked(t.Context(), s, certs["a second later"].cert); !gone || err != nil {
		t.Errorf("revoked a second time: %t, %v", gone, err)
	}
}
