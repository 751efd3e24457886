package pki

import (
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Purpose is what an authority is for. A cluster has one authority for its servers,
// ForPeers, and may have one of its own for each other purpose; without one the
// servers' is for that, too.
type Purpose string

const (
	// ForPeers: servers' certificates, with which they dial each other and serve the API.
	// Join tokens and kubeconfigs pin it.
	ForPeers Purpose = "peer"
	// ForNodes: agents' certificates.
	ForNodes Purpose = "node"
	// ForClients: certificates of people and programs, administrators among them.
	ForClients Purpose = "client"
	// ForFront: what servers show to aggregated APIs.
	ForFront Purpose = "front"
	// ForSecrets: its key signs nothing. What seals secrets at rest follows from it.
	ForSecrets Purpose = "secrets"
)

// OwnPurposes are those that may have authorities of their own.
var OwnPurposes = []Purpose{ForClients, ForFront, ForNodes, ForSecrets}

// Purposes are all of them.
var Purposes = append([]Purpose{ForPeers}, OwnPurposes...)

// NewFor makes the authority for one purpose, beside or after this one, which must be
// the servers'.
func (ca *CA) NewFor(p Purpose, now time.Time) (*CA, error) {
	name, generation := ca.generation()
	return newAuthority(name+" "+string(p), generation+1, now)
}

// Separate makes a trust of which each purpose has an authority of its own. The
// signer's is the servers'.
func (t *Trust) Separate(now time.Time) (*Trust, error) {
	for _, p := range OwnPurposes {
		if t.Owns(p) {
			continue
		}
		ca, err := t.Signer().NewFor(p, now)
		if err != nil {
			return nil, err
		}
		t = t.With(p, ca)
	}
	return t, nil
}

// With is the same trust with these authorities for a purpose, of which the first signs.
func (t *Trust) With(p Purpose, cas ...*CA) *Trust {
	next := *t
	if p == ForPeers {
		return newTrust(t.Number, cas, t.own)
	}
	next.own = maps.Clone(t.own)
	if next.own == nil {
		next.own = map[Purpose]*Trust{}
	}
	next.own[p] = NewTrust(t.Number, cas[0], cas[1:]...)
	return &next
}

// For is the trust in what is signed for a purpose: t itself, unless that has
// authorities of its own.
func (t *Trust) For(p Purpose) *Trust {
	if own, has := t.own[p]; has {
		return own
	}
	return t
}

// Owns reports whether a purpose has authorities of its own. The servers' has.
func (t *Trust) Owns(p Purpose) bool {
	_, has := t.own[p]
	return has || p == ForPeers
}

// Separated reports whether any other purpose than the servers' has.
func (t *Trust) Separated() bool { return len(t.own) > 0 }

// Changing reports whether a purpose has more than one authority.
func (t *Trust) Changing() bool {
	return len(t.Whole()) > len(t.own)+1
}

// Whole are the authorities of all purposes.
func (t *Trust) Whole() []*CA {
	all := slices.Clone(t.cas)
	for _, p := range slices.Sorted(maps.Keys(t.own)) {
		all = append(all, t.own[p].cas...)
	}
	return all
}

// Dropped are the authorities for a purpose that the next trust does not have for it.
func (t *Trust) Dropped(next *Trust, p Purpose) []*CA {
	return slices.DeleteFunc(slices.Clone(t.For(p).cas), func(ca *CA) bool { return next.For(p).Find(ca.ID()) != nil })
}

// DropsAny reports whether the next trust ceases to trust an authority for any purpose.
func (t *Trust) DropsAny(next *Trust) bool {
	return slices.ContainsFunc(Purposes, func(p Purpose) bool { return len(t.Dropped(next, p)) > 0 })
}

// FindAny returns the authority with that id, whatever it is for, or nil.
func (t *Trust) FindAny(id string) *CA {
	for _, ca := range t.Whole() {
		if ca.ID() == id {
			return ca
		}
	}
	return nil
}

// Public is the same trust without keys.
func (t *Trust) Public() *Trust {
	return t.each(func(ca *CA, _ bool) *CA { return ca.Public() })
}

// each is the trust in what f makes of each authority.
func (t *Trust) each(f func(ca *CA, signs bool) *CA) *Trust {
	change := func(cas []*CA) []*CA {
		out := make([]*CA, len(cas))
		for i, ca := range cas {
			out[i] = f(ca, i == 0)
		}
		return out
	}
	own := map[Purpose]*Trust{}
	for p, one := range t.own {
		own[p] = newTrust(t.Number, change(one.cas), nil)
	}
	return newTrust(t.Number, change(t.cas), own)
}

// OwnBundles are the Bundles of the purposes with authorities of their own.
func (t *Trust) OwnBundles() map[Purpose][]byte {
	bundles := map[Purpose][]byte{}
	for p, own := range t.own {
		bundles[p] = own.Bundle()
	}
	return bundles
}

// OwnKeys are the Keys that belong to OwnBundles.
func (t *Trust) OwnKeys() (map[Purpose][]byte, error) {
	keys := map[Purpose][]byte{}
	for p, own := range t.own {
		var err error
		if keys[p], err = own.Keys(); err != nil {
			return nil, err
		}
	}
	return keys, nil
}

// WithOwn reads OwnBundles, and the OwnKeys that belong to them if t has keys.
func (t *Trust) WithOwn(bundles, keys map[Purpose][]byte) (*Trust, error) {
	for _, p := range slices.Sorted(maps.Keys(bundles)) {
		if p == ForPeers {
			return nil, fmt.Errorf("authorities: %q has none of its own", p)
		}
		var key []byte
		if t.Signer().HasKey() {
			if key = keys[p]; key == nil {
				return nil, fmt.Errorf("authorities: the key of the one for %q is missing", p)
			}
		}
		own, err := ParseTrust(t.Number, bundles[p], key)
		if err != nil {
			return nil, fmt.Errorf("authority for %q: %w", p, err)
		}
		t = t.With(p, own.cas...)
	}
	return t, nil
}

// errNoPurpose is returned for a certificate that no authority may sign.
var errNoPurpose = errors.New("a certificate that names a node has the name " + NodeUserPrefix + "NAME and the groups of nodes, and no others")

// PurposeOf is which authority may sign a certificate, by what it says of itself. Whatever
// claims to be a node in any way must be one in all.
func PurposeOf(cert *x509.Certificate) (Purpose, error) {
	name, groups := cert.Subject.CommonName, slices.Sorted(slices.Values(cert.Subject.Organization))
	if !strings.HasPrefix(name, NodeUserPrefix) && !slices.Contains(groups, NodesGroup) && !slices.Contains(groups, ServersGroup) {
		return ForClients, nil
	}
	if len(name) == len(NodeUserPrefix) || !strings.HasPrefix(name, NodeUserPrefix) {
		return "", errNoPurpose
	}
	switch {
	case slices.Equal(groups, []string{NodesGroup}):
		return ForNodes, nil
	case slices.Equal(groups, []string{ServersGroup, NodesGroup}): // sorted
		return ForPeers, nil
	}
	return "", errNoPurpose
}

// nothing is the pool that verifies no certificate.
var nothing = x509.NewCertPool()

// Roots is what to verify a certificate with: the authorities for what it says that it is. So one
// that is stolen makes nothing but what it is for. Before any purpose has an authority of its own
// there is nothing to choose between.
func (t *Trust) Roots(cert *x509.Certificate) *x509.CertPool {
	if !t.Separated() {
		return t.pool
	}
	p, err := PurposeOf(cert)
	if err != nil {
		return nothing
	}
	return t.For(p).pool
}

// Roots is the Trust's of the moment.
func (l *LiveTrust) Roots(cert *x509.Certificate) *x509.CertPool { return l.Load().Roots(cert) }

// Roots is what to verify any certificate with, of a cluster with this authority alone.
func (ca *CA) Roots(*x509.Certificate) *x509.CertPool { return ca.Pool() }
