package join

import (
	"context"
	"crypto/subtle"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// TokenInfo describes a join token; it never has its secret.
type TokenInfo struct {
	ID string `json:"id"`
	// Role is what machines become by it; empty in old records: servers.
	Role pki.Role `json:"role"`
	// Uses is how many machines it admits, 0: any number; Used how many it has.
	Uses    int       `json:"uses"`
	Used    int       `json:"used"`
	Created time.Time `json:"created"`
	Expires time.Time `json:"expires"`
	// Authority is the id of the one that the token pins; empty in old records.
	Authority string `json:"authority,omitempty"`
	// For is the name of the machine that the token is for, and no other; else empty.
	For string `json:"for,omitempty"`
	// From are the addresses that a machine may join from by the token; none: any.
	From []netip.Prefix `json:"from,omitempty"`
}

type tokenRecord struct {
	TokenInfo
	Hash string `json:"hash"` // pki.HashSecret
	// Key is the id of the one key that may join by an approved token; else empty.
	Key string `json:"key,omitempty"`
}

// TokenOptions are the properties of a new token.
type TokenOptions struct {
	Role pki.Role
	Uses int // 0: any number
	TTL  time.Duration
	// Name and From, where given, bind the token to a machine's name and to addresses
	// that it joins from.
	Name string
	From []netip.Prefix
}

// Validate rejects names that no machine can have, and a name with more uses than one.
func (w TokenOptions) Validate() error {
	if w.Name == "" {
		return nil
	}
	if errs := validation.IsDNS1123Subdomain(w.Name); len(errs) > 0 {
		return fmt.Errorf("name %q: no machine can have it: %s", w.Name, errs[0])
	}
	if w.Uses != 1 {
		return fmt.Errorf("name %q: one machine has it, and uses is %d: leave one of them out", w.Name, w.Uses)
	}
	return nil
}

// tokenKept is how much longer than its life a token's record is kept, so that
// a late joiner gets "expired" and not "unknown".
const tokenKept = 7 * 24 * time.Hour

// CreateToken makes and records a token.
func CreateToken(ctx context.Context, s Store, ca *x509.Certificate, wish TokenOptions, now time.Time) (pki.Token, TokenInfo, error) {
	t := pki.NewToken(ca)
	info := TokenInfo{ID: t.ID, Role: wish.Role, Uses: wish.Uses, Created: now.UTC(), Expires: now.Add(wish.TTL).UTC(), Authority: t.Authority, For: wish.Name, From: wish.From}
	op := tokenRecord{TokenInfo: info, Hash: pki.HashSecret(t.Secret)}.put(now)
	res, err := s.Txn(ctx, mvcc.Txn{Origin: origin, Compares: []mvcc.Compare{{Key: op.Key}}, Ops: []mvcc.Op{op}})
	if err != nil {
		return pki.Token{}, TokenInfo{}, fmt.Errorf("record the token: %w", err)
	}
	if !res.Succeeded {
		return pki.Token{}, TokenInfo{}, fmt.Errorf("record the token: the id %s is in use; try again", t.ID)
	}
	return t, info, nil
}

func (r tokenRecord) put(now time.Time) mvcc.Op {
	op := put(tokenPrefix+r.ID, r)
	op.TTL = max(1, int64((r.Expires.Sub(now)+tokenKept)/time.Second))
	return op
}

// Tokens lists the recorded tokens, expired and used ones too as long as they
// are kept.
func Tokens(ctx context.Context, s Store) ([]TokenInfo, error) {
	res, err := s.List(ctx, tokenPrefix, raftstore.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list tokens: %w", err)
	}
	infos := make([]TokenInfo, 0, len(res.KVs))
	for _, kv := range res.KVs {
		r, err := decodeToken(kv)
		if err != nil {
			return nil, err
		}
		infos = append(infos, r.TokenInfo)
	}
	return infos, nil
}

func decodeToken(kv mvcc.KeyValue) (tokenRecord, error) {
	var r tokenRecord
	if err := json.Unmarshal(kv.Value, &r); err != nil {
		return r, fmt.Errorf("token record %s: %w", idOf(kv.Key, tokenPrefix), err)
	}
	if r.Role == "" {
		r.Role = pki.Server
	}
	return r, nil
}

// DeleteToken removes a token and reports whether there was one.
func DeleteToken(ctx context.Context, s Store, id string) (bool, error) {
	for {
		kv, _, err := s.Get(ctx, tokenPrefix+id, raftstore.ReadOptions{})
		if err != nil || kv == nil {
			return false, err
		}
		res, err := s.Txn(ctx, mvcc.Txn{
			Origin:   origin,
			Compares: []mvcc.Compare{{Key: kv.Key, ModRevision: kv.ModRevision}},
			Ops:      []mvcc.Op{{Type: mvcc.OpDelete, Key: kv.Key}},
		})
		if err != nil || res.Succeeded {
			return res.Succeeded, err
		}
	}
}

// DropTokens is the change that removes the tokens which pin another authority
// than the one with that id: no machine can join by them any more.
func DropTokens(ctx context.Context, s Store, authority string) ([]mvcc.Op, error) {
	tokens, err := Tokens(ctx, s)
	if err != nil {
		return nil, err
	}
	var ops []mvcc.Op
	for _, t := range tokens {
		if t.Authority != authority {
			ops = append(ops, mvcc.Op{Type: mvcc.OpDelete, Key: tokenPrefix + t.ID})
		}
	}
	return ops, nil
}

// storedToken is a token's record as it was read.
type storedToken struct {
	tokenRecord
	key      string
	revision int64
	now      time.Time
}

// checkToken returns the record of the token when the secret belongs to it and
// it is still good, and a *Refusal that says what is wrong otherwise. Whether
// it was used up shows only when it is known by whom: see use.
func checkToken(ctx context.Context, s Store, id, secret string, now time.Time) (storedToken, error) {
	no := func(format string, args ...any) (storedToken, error) {
		return storedToken{}, &Refusal{Code: CodeToken, Message: fmt.Sprintf(format, args...)}
	}
	kv, _, err := s.Get(ctx, tokenPrefix+id, raftstore.ReadOptions{})
	if err != nil {
		return storedToken{}, fmt.Errorf("look up the token: %w", err)
	}
	if kv == nil {
		return no("the cluster does not know the join token %s: it was removed, or expired long ago; make a new one with `clusterctl token create`", id)
	}
	r, err := decodeToken(*kv)
	if err != nil {
		return storedToken{}, err
	}
	if subtle.ConstantTimeCompare([]byte(r.Hash), []byte(pki.HashSecret(secret))) != 1 {
		return no("the secret of join token %s is wrong: copy the whole line that `clusterctl token create` printed", id)
	}
	if now.After(r.Expires) {
		return no("the join token %s expired %s ago (at %s by the cluster's clock); make a new one with `clusterctl token create`",
			id, max(time.Second, now.Sub(r.Expires).Round(time.Second)), r.Expires.Format(time.RFC3339))
	}
	return storedToken{tokenRecord: r, key: kv.Key, revision: kv.ModRevision, now: now}, nil
}

// fits says whether a machine with that key and name may use the token from peer,
// the address that its connection comes from.
func (t storedToken) fits(key, name, peer string) error {
	no := func(format string, args ...any) error {
		return &Refusal{CodeToken, fmt.Sprintf("the join token %s ", t.ID) + fmt.Sprintf(format, args...)}
	}
	if t.Key != "" && (t.Key != key || t.For != name) {
		return no("was approved for another machine, %s", t.For)
	}
	if t.For != "" && t.For != name {
		return no("is for the machine %s, and this one is %s: give --name %s, or make a token for %s with `clusterctl token create`", t.For, name, t.For, name)
	}
	if len(t.From) == 0 {
		return nil
	}
	at, err := netip.ParseAddrPort(peer)
	if err != nil || !slices.ContainsFunc(t.From, func(p netip.Prefix) bool { return p.Contains(at.Addr().Unmap()) }) {
		return no("is good from %s, and this machine asks from %s: make another with `clusterctl token create --from`", prefixes(t.From), peer)
	}
	return nil
}

func prefixes(list []netip.Prefix) string {
	var out []string
	for _, p := range list {
		out = append(out, p.String())
	}
	return strings.Join(out, ", ")
}

// use is the change that notes that a machine was admitted. again: it takes the
// place of one that was counted and never arrived.
func (t storedToken) use(again bool) (mvcc.Op, error) {
	r := t.tokenRecord
	if !again {
		if r.Uses > 0 && r.Used >= r.Uses {
			times := "once"
			if r.Used > 1 {
				times = fmt.Sprintf("%d times", r.Used)
			}
			return mvcc.Op{}, &Refusal{Code: CodeToken, Message: fmt.Sprintf("the join token %s was used %s, as often as it may be; make another with `clusterctl token create --role %s`", r.ID, times, r.Role)}
		}
		r.Used++
	}
	return r.put(t.now), nil
}
