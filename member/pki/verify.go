package pki

import (
	"crypto/x509"
	"errors"
	"fmt"
	"time"
)

// Peer is who is at the other end of a verified connection.
type Peer struct {
	ID   string // fingerprint of its key
	Name string // node name; empty: not a node
	Role Role   // of a node
	Cert *x509.Certificate
}

// VerifyPeer checks a presented chain for one use against the roots of who its
// certificate says it is, and says who that is. Names and addresses in the certificate do not matter: identity
// is the key.
func VerifyPeer(chain []*x509.Certificate, roots func(*x509.Certificate) *x509.CertPool, use x509.ExtKeyUsage, now time.Time) (Peer, error) {
	if len(chain) == 0 {
		return Peer{}, errors.New("the peer showed no certificate")
	}
	leaf := chain[0]
	if _, err := leaf.Verify(x509.VerifyOptions{
		Roots:       roots(leaf),
		CurrentTime: now,
		KeyUsages:   []x509.ExtKeyUsage{use},
	}); err != nil {
		return Peer{}, fmt.Errorf("the peer's certificate (%s): %w", leaf.Subject.CommonName, err)
	}
	name, _ := NodeName(leaf)
	return Peer{ID: Fingerprint(leaf.PublicKey), Name: name, Role: NodeRole(leaf), Cert: leaf}, nil
}
