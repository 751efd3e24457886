package pki

import (
	"bytes"
	"crypto/x509"
	"strings"
	"testing"
	"time"
)

// TestTrust: two authorities go to disk and come back in their order, with their
// keys and without.
func TestTrust(t *testing.T) {
	old := newCA(t)
	next, err := old.NewSuccessor(now)
	if err != nil {
		t.Fatal(err)
	}
	third, err := next.NewSuccessor(now)
	if err != nil {
		t.Fatal(err)
	}
	if !old.First() || next.First() || !old.Precedes(next) || !next.Precedes(third) || third.Precedes(old) {
		t.Error("the authorities are not in their order")
	}
	if bytes.Equal(next.Cert.RawSubject, third.Cert.RawSubject) || bytes.Equal(old.Cert.RawSubject, next.Cert.RawSubject) {
		t.Error("two authorities have the same name")
	}
	if NewTrust(1, old).Elder() != old || NewTrust(2, old, next).Elder() != old || NewTrust(3, next, old).Elder() != old || NewTrust(4, next).Elder() != next {
		t.Error("the elder is another")
	}
	trust := NewTrust(7, next, old)
	keys, err := trust.Keys()
	if err != nil {
		t.Fatal(err)
	}
	for _, keys := range [][]byte{keys, nil} {
		got, err := ParseTrust(7, trust.Bundle(), keys)
		if err != nil {
			t.Fatal(err)
		}
		if got.Number != 7 || len(got.All()) != 2 || got.Signer().ID() != next.ID() || got.Find(old.ID()) == nil || got.Find(third.ID()) != nil {
			t.Errorf("trust = %+v", got)
		}
		if got.Signer().HasKey() != (keys != nil) {
			t.Error("with keys or without?")
		}
	}
	key, _ := NewKey()
	for ca, want := range map[*CA]bool{old: true, next: true, third: false} {
		cert, err := ca.IssueAgent(key.Public(), "a1", now)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := VerifyPeer([]*x509.Certificate{cert, ca.Cert}, trust.Roots, x509.ExtKeyUsageClientAuth, now); (err == nil) != want {
			t.Errorf("an agent of authority %s: %v", ca.ID(), err)
		}
	}
	// What one release before this wrote is read, and what this writes is read there:
	// the first of each file is the one that signs.
	if ca, err := LoadCA(trust.Bundle(), keys); err != nil || ca.ID() != next.ID() {
		t.Errorf("LoadCA of a bundle = %v, %v", ca, err)
	}
}

func TestTrustRefused(t *testing.T) {
	a, b := newCA(t), newCA(t)
	keyOf := func(ca *CA) []byte {
		key, err := ca.EncodeCAKey()
		if err != nil {
			t.Fatal(err)
		}
		return key
	}
	leafKey, _ := NewKey()
	leaf, err := a.IssueAgent(leafKey.Public(), "a1", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	both := append(EncodeCert(a.Cert), EncodeCert(b.Cert)...)
	for name, test := range map[string]struct {
		bundle, keys []byte
		err          string
	}{
		"nothing":                 {nil, nil, "not a PEM certificate"},
		"a word":                  {[]byte("cert"), nil, "is none"},
		"something behind":        {append(EncodeCert(a.Cert), "more"...), nil, "is none"},
		"too many":                {bytes.Repeat(EncodeCert(a.Cert), 5), nil, "is none"},
		"a node's":                {EncodeCert(leaf), nil, "not an authority's"},
		"one key of two":          {both, keyOf(a), "not a PEM private key"},
		"keys in the wrong order": {both, append(keyOf(b), keyOf(a)...), "do not belong together"},
	} {
		if _, err := ParseTrust(0, test.bundle, test.keys); err == nil || !strings.Contains(err.Error(), test.err) {
			t.Errorf("%s: %v, want %q", name, err, test.err)
		}
	}
}
