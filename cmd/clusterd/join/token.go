package join

import (
	"context"
	"crypto/subtle"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"time"

	"github.com/clusterd/clusterd/cmd/clusterd/pki"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// TokenInfo is what the cluster knows of a join token; never its secret.
type TokenInfo struct {
	ID      string    `json:"id"`
	Created time.Time `json:"created"`
	Expires time.Time `json:"expires"`
}

type tokenRecord struct {
	TokenInfo
	Hash string `json:"hash"` // pki.HashSecret
}

// tokenKept is how much longer than its life a token's record is kept, so that
// a late joiner is told "expired" and not "unknown".
const tokenKept = 7 * 24 * time.Hour

// CreateToken makes and records a token that admits machines for ttl.
func CreateToken(ctx context.Context, s Store, ca *x509.Certificate, ttl time.Duration, now time.Time) (pki.Token, TokenInfo, error) {
	t := pki.NewToken(ca)
	info := TokenInfo{ID: t.ID, Created: now.UTC(), Expires: now.Add(ttl).UTC()}
	op := put(tokenPrefix+t.ID, tokenRecord{TokenInfo: info, Hash: pki.HashSecret(t.Secret)})
	op.TTL = int64((ttl + tokenKept) / time.Second)
	res, err := s.Txn(ctx, mvcc.Txn{Origin: origin, Compares: []mvcc.Compare{{Key: tokenPrefix + t.ID}}, Ops: []mvcc.Op{op}})
	if err != nil {
		return pki.Token{}, TokenInfo{}, fmt.Errorf("record the token: %w", err)
	}
	if !res.Succeeded {
		return pki.Token{}, TokenInfo{}, fmt.Errorf("record the token: the id %s is in use; try again", t.ID)
	}
	return t, info, nil
}

// Tokens lists the recorded tokens, expired ones too as long as they are kept.
func Tokens(ctx context.Context, s Store) ([]TokenInfo, error) {
	res, err := s.List(ctx, tokenPrefix, raftstore.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list tokens: %w", err)
	}
	infos := make([]TokenInfo, 0, len(res.KVs))
	for _, kv := range res.KVs {
		var r tokenRecord
		if err := json.Unmarshal(kv.Value, &r); err != nil {
			return nil, fmt.Errorf("token record %s: %w", idOf(kv.Key, tokenPrefix), err)
		}
		infos = append(infos, r.TokenInfo)
	}
	return infos, nil
}

// DeleteToken removes a token and reports whether there was one.
func DeleteToken(ctx context.Context, s Store, id string) (bool, error) {
	kv, _, err := s.Get(ctx, tokenPrefix+id, raftstore.ReadOptions{})
	if err != nil || kv == nil {
		return false, err
	}
	res, err := s.Txn(ctx, mvcc.Txn{
		Origin:   origin,
		Compares: []mvcc.Compare{{Key: kv.Key, ModRevision: kv.ModRevision}},
		Ops:      []mvcc.Op{{Type: mvcc.OpDelete, Key: kv.Key}},
	})
	return res.Succeeded, err
}

// checkToken returns nil when the secret belongs to a token that is still
// good, and a *Refusal that says what is wrong otherwise.
func checkToken(ctx context.Context, s Store, id, secret string, now time.Time) error {
	kv, _, err := s.Get(ctx, tokenPrefix+id, raftstore.ReadOptions{})
	if err != nil {
		return fmt.Errorf("look up the token: %w", err)
	}
	if kv == nil {
		return &Refusal{Code: CodeToken, Message: fmt.Sprintf("the cluster does not know the join token %s: it was removed, or expired long ago; make a new one with `clusterctl token create`", id)}
	}
	var r tokenRecord
	if err := json.Unmarshal(kv.Value, &r); err != nil {
		return fmt.Errorf("token record %s: %w", id, err)
	}
	if subtle.ConstantTimeCompare([]byte(r.Hash), []byte(pki.HashSecret(secret))) != 1 {
		return &Refusal{Code: CodeToken, Message: fmt.Sprintf("the secret of join token %s is wrong: copy the whole line that `clusterctl token create` printed", id)}
	}
	if now.After(r.Expires) {
		return &Refusal{Code: CodeToken, Message: fmt.Sprintf("the join token %s expired %s ago (at %s by the cluster's clock); make a new one with `clusterctl token create`",
			id, max(time.Second, now.Sub(r.Expires).Round(time.Second)), r.Expires.Format(time.RFC3339))}
	}
	return nil
}
