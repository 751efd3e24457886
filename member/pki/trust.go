package pki

import (
	"bytes"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// Trust is the authorities that a node trusts: the one that signs, and, while
// the cluster changes its authority, the one before or after it; and the same for each
// purpose that has authorities of its own (see For). It is immutable.
type Trust struct {
	// Number says which state of the rotation it follows; a higher one is newer.
	Number uint64
	cas    []*CA // the first signs
	pool   *x509.CertPool
	own    map[Purpose]*Trust
}

// NewTrust makes a Trust of which the first authority signs.
func NewTrust(number uint64, signer *CA, others ...*CA) *Trust {
	return newTrust(number, append([]*CA{signer}, others...), nil)
}

func newTrust(number uint64, cas []*CA, own map[Purpose]*Trust) *Trust {
	t := &Trust{Number: number, cas: cas, pool: x509.NewCertPool(), own: own}
	for _, ca := range t.cas {
		t.pool.AddCert(ca.Cert)
	}
	return t
}

// Signer signs what is issued now.
func (t *Trust) Signer() *CA { return t.cas[0] }

// Shorter is the same trust, whose nodes' certificates live no longer than that,
// see CA.Shorter.
func (t *Trust) Shorter(life time.Duration) *Trust {
	return t.each(func(ca *CA, signs bool) *CA {
		if signs {
			return ca.Shorter(life)
		}
		return ca
	})
}

// Elder is the oldest of them: the one that every member knows that knows any.
func (t *Trust) Elder() *CA {
	elder := t.cas[0]
	for _, ca := range t.cas[1:] {
		if ca.Precedes(elder) {
			elder = ca
		}
	}
	return elder
}

// All are the authorities that are trusted, the signer first; not those of purposes with
// authorities of their own.
func (t *Trust) All() []*CA { return t.cas }

// Pool is what to verify with.
func (t *Trust) Pool() *x509.CertPool { return t.pool }

// Find returns the authority with that id, or nil.
func (t *Trust) Find(id string) *CA {
	for _, ca := range t.cas {
		if ca.ID() == id {
			return ca
		}
	}
	return nil
}

// Bundle is the certificates of all in PEM, the signer's first.
func (t *Trust) Bundle() []byte {
	var b bytes.Buffer
	for _, ca := range t.cas {
		b.Write(EncodeCert(ca.Cert))
	}
	return b.Bytes()
}

// Keys is the keys of all in PEM, in Bundle's order.
func (t *Trust) Keys() ([]byte, error) {
	var b bytes.Buffer
	for _, ca := range t.cas {
		key, err := ca.EncodeCAKey()
		if err != nil {
			return nil, err
		}
		b.Write(key)
	}
	return b.Bytes(), nil
}

// maxAuthorities bounds a bundle: there are never more than two.
const maxAuthorities = 4

// ParseTrust reads a Bundle, and the Keys that belong to it; nil: an agent's.
func ParseTrust(number uint64, bundle, keys []byte) (*Trust, error) {
	var cas []*CA
	for len(bytes.TrimSpace(bundle)) > 0 {
		var certPEM, keyPEM []byte
		if certPEM, bundle = CutPEM(bundle); certPEM == nil || len(cas) == maxAuthorities {
			return nil, errors.New("authorities: the text after some certificates is none")
		}
		var ca *CA
		var err error
		if keys == nil {
			ca, err = KnowCA(certPEM)
		} else {
			keyPEM, keys = CutPEM(keys)
			ca, err = LoadCA(certPEM, keyPEM)
			if keys == nil {
				keys = []byte{}
			}
		}
		if err != nil {
			return nil, err
		}
		cas = append(cas, ca)
	}
	if len(cas) == 0 {
		return nil, errors.New("authorities: not a PEM certificate")
	}
	return NewTrust(number, cas[0], cas[1:]...), nil
}

// CutPEM cuts the first block off a PEM text; nil: there is none.
func CutPEM(text []byte) (first, rest []byte) {
	block, rest := pem.Decode(text)
	if block == nil {
		return nil, nil
	}
	return pem.EncodeToMemory(block), rest
}

// LiveTrust is the Trust of the moment. It may be used concurrently.
type LiveTrust struct{ now atomic.Pointer[Trust] }

// Load returns it; Store replaces it.
func (l *LiveTrust) Load() *Trust { return l.now.Load() }

// Store replaces it.
func (l *LiveTrust) Store(t *Trust) { l.now.Store(t) }

// Pool is the Trust's of the moment.
func (l *LiveTrust) Pool() *x509.CertPool { return l.Load().Pool() }

// ID is the fingerprint of the authority's key.
func (ca *CA) ID() string { return Fingerprint(ca.Cert.PublicKey) }

// HasKey reports whether this authority can sign.
func (ca *CA) HasKey() bool { return ca.key != nil }

// Public is the authority without its key.
func (ca *CA) Public() *CA { return &CA{Cert: ca.Cert} }

// Signed reports whether the certificate is this authority's.
func (ca *CA) Signed(cert *x509.Certificate) bool { return cert.CheckSignatureFrom(ca.Cert) == nil }

// NewSuccessor makes the authority that is to follow this one. Nothing connects
// the two: one that was stolen must not vouch for its successor.
func (ca *CA) NewSuccessor(now time.Time) (*CA, error) {
	name, generation := ca.generation()
	return newAuthority(name, generation+1, now)
}

func newAuthority(name string, generation int, now time.Time) (*CA, error) {
	subject := pkix.Name{CommonName: name}
	if generation > 1 {
		subject.SerialNumber = strconv.Itoa(generation)
	}
	key, err := NewKey()
	if err != nil {
		return nil, err
	}
	template := authorityTemplate(subject, now)
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("sign the authority's certificate: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &CA{Cert: cert, key: key}, nil
}

// First reports whether the cluster began with this authority.
func (ca *CA) First() bool {
	_, generation := ca.generation()
	return generation == 1
}

// Precedes reports whether this authority is an older one than next.
func (ca *CA) Precedes(next *CA) bool {
	_, own := ca.generation()
	_, other := next.generation()
	return own < other
}

// generation is how many authorities the cluster has had with this one, and what
// they are all called.
func (ca *CA) generation() (name string, n int) {
	n, err := strconv.Atoi(strings.TrimSpace(ca.Cert.Subject.SerialNumber))
	if err != nil || n < 1 {
		n = 1
	}
	return ca.Cert.Subject.CommonName, n
}
