package join

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// revokedPrefix + the name of a user or "serial:" and a number → Revocation.
const revokedPrefix = "/clusterd/revoked/"

// Revocation takes client certificates of people and programs away.
type Revocation struct {
	// User: all certificates of that name which were signed up to Revoked, by clocks
	// that differ by no more than clockSkew. Later ones are good, see SignAt.
	User string `json:"user,omitempty"`
	// Serial: the one with that number, in hexadecimal.
	Serial  string    `json:"serial,omitempty"`
	Revoked time.Time `json:"revoked"`
	// Ends is when the last such certificate has ended by itself.
	Ends time.Time `json:"ends"`
}

// serialForm is a serial number in hexadecimal, as openssl prints it, too.
var serialForm = regexp.MustCompile(`^[0-9A-Fa-f][0-9A-Fa-f:]{0,80}$`)

// maxUserName bounds what becomes a key of the store.
const maxUserName = 253

// Validate refuses what cannot be revoked; the error says what to do in its place.
func (r Revocation) Validate() error {
	switch {
	case (r.User == "") == (r.Serial == ""):
		return errors.New("give a user or a serial number, and not both")
	case r.Serial != "" && !serialForm.MatchString(r.Serial):
		return fmt.Errorf("serial %q: give it in hexadecimal, as `openssl x509 -noout -serial` prints it", r.Serial)
	case len(r.User) > maxUserName:
		return fmt.Errorf("user: the name has %d bytes, at most %d are possible", len(r.User), maxUserName)
	case strings.HasPrefix(r.User, pki.NodeUserPrefix):
		return fmt.Errorf("user %q: a node's key is taken away with `clusterctl members rm %s`", r.User, strings.TrimPrefix(r.User, pki.NodeUserPrefix))
	case strings.HasPrefix(r.User, "system:"):
		return fmt.Errorf("user %q: it has no certificate that could be revoked; service accounts' tokens go with the account, the pod or the Secret they are bound to", r.User)
	}
	return nil
}

func (r Revocation) key() string {
	if r.Serial != "" {
		return revokedPrefix + "serial:" + r.Serial
	}
	return revokedPrefix + "user:" + r.User
}

// Serial is how a certificate's number is written here.
func Serial(cert *x509.Certificate) string { return fmt.Sprintf("%x", cert.SerialNumber) }

// Takes reports whether the certificate is one of those.
func (r Revocation) Takes(cert *x509.Certificate) bool {
	if _, node := pki.NodeName(cert); node { // whose right is a record, see Removal
		return false
	}
	if r.Serial != "" {
		return Serial(cert) == r.Serial
	}
	return cert.Subject.CommonName == r.User && !pki.SignedAt(cert).After(r.until())
}

// clockSkew is how much the clock of the server that signs may be ahead of that of
// the one that revokes. It is less than a certificate of the shortest life is backdated.
const clockSkew = 30 * time.Second

// until is when the last certificate that is taken may seem to have been signed.
func (r Revocation) until() time.Time { return r.Revoked.Add(clockSkew) }

// SignAt is the time at which to sign a certificate of the user now, so that it does
// not count as one of those that this member knows to be revoked: a moment later
// than now, soon after a revocation.
func SignAt(ctx context.Context, s Store, user string, now time.Time) (time.Time, error) {
	key := Revocation{User: user}.key()
	kv, _, err := s.Get(ctx, key, raftstore.ReadOptions{Stale: true})
	if err != nil || kv == nil {
		return now, err
	}
	var r Revocation
	if err := json.Unmarshal(kv.Value, &r); err != nil {
		return now, fmt.Errorf("%s: %w", key, err)
	}
	if first := r.until().Add(2 * time.Second); now.Before(first) { // SignedAt may be a second early
		return first, nil
	}
	return now, nil
}

// revocationKept is how long a revocation is kept. The certificates end long before:
// but what the store keeps goes by its own time, which a leader whose clock is far
// ahead carries with it, and the certificates by the clocks of the servers.
const revocationKept = 20 * 365 * 24 * time.Hour

// Revoke records it. A user's certificates of until now are distinguished from later ones by
// when they were signed.
func Revoke(ctx context.Context, s Store, r Revocation, now time.Time) (Revocation, error) {
	r.Serial = strings.ToLower(strings.ReplaceAll(r.Serial, ":", ""))
	r.Serial = strings.TrimLeft(r.Serial, "0")
	r.Revoked, r.Ends = now.UTC().Truncate(time.Second), now.Add(pki.MaxClientLifetime).UTC()
	b, err := json.Marshal(r)
	if err != nil {
		return r, err
	}
	_, err = s.Txn(ctx, mvcc.Txn{Origin: origin, Ops: []mvcc.Op{{
		Type: mvcc.OpPut, Key: r.key(), Value: b, TTL: int64(revocationKept / time.Second),
	}}})
	if err != nil {
		return r, fmt.Errorf("record what is revoked: %w", err)
	}
	return r, nil
}

// Revocations lists them by key. A stale list needs no leader.
func Revocations(ctx context.Context, s Store, stale bool) ([]Revocation, error) {
	list, err := s.List(ctx, revokedPrefix, raftstore.ListOptions{ReadOptions: raftstore.ReadOptions{Stale: stale}})
	if err != nil {
		return nil, fmt.Errorf("list what is revoked: %w", err)
	}
	all := make([]Revocation, 0, len(list.KVs))
	for _, kv := range list.KVs {
		var r Revocation
		if err := json.Unmarshal(kv.Value, &r); err != nil {
			return nil, fmt.Errorf("%s: %w", kv.Key, err)
		}
		all = append(all, r)
	}
	return all, nil
}

// IsRevoked reports whether this member knows that a client certificate was taken
// away. It asks no other member and does not wait.
func IsRevoked(ctx context.Context, s Store, cert *x509.Certificate) (bool, error) {
	for _, key := range []string{
		Revocation{User: cert.Subject.CommonName}.key(),
		Revocation{Serial: Serial(cert)}.key(),
	} {
		kv, _, err := s.Get(ctx, key, raftstore.ReadOptions{Stale: true})
		if err != nil {
			return false, fmt.Errorf("look up whether a certificate was revoked: %w", err)
		}
		var r Revocation
		if kv == nil {
			continue
		}
		if err := json.Unmarshal(kv.Value, &r); err != nil {
			return false, fmt.Errorf("%s: %w", key, err)
		}
		if r.Takes(cert) {
			return true, nil
		}
	}
	return false, nil
}

// Taken reports whether one of them takes the certificate.
func Taken(all []Revocation, cert *x509.Certificate) bool {
	return slices.ContainsFunc(all, func(r Revocation) bool { return r.Takes(cert) })
}
