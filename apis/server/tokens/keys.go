// Package tokens issues, recognises and publishes the keys of service account
// tokens: JSON web tokens that name a service account and what they are bound
// to. Nothing of a token is stored; a token counts as long as its signature,
// its time, and all that it is bound to do.
package tokens

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Lifetimes of what is known about keys.
const (
	// publishedFor is how long a new key is published before it signs, so that
	// no verifier meets a token whose key it cannot know.
	publishedFor = time.Minute
	// freshFor is how long the list of keys is cached.
	freshFor = 20 * time.Second
	// askAgain bounds how often tokens of unknown keys cost a read.
	askAgain = time.Second
)

// StoredKey is a signing key as it is kept: shared by all servers, never
// changed once made.
type StoredKey struct {
	// Number orders the keys; the first is 1.
	Number  int
	Created time.Time
	// Private is PKCS #8.
	Private []byte
}

// ErrKeyExists is returned by Store.Create when another server was faster.
var ErrKeyExists = errors.New("a key of that number exists")

// Store keeps the keys. Its methods may block and are called concurrently.
type Store interface {
	List(ctx context.Context) ([]StoredKey, error)
	Create(ctx context.Context, key StoredKey) error
}

// Key is a key that signs and verifies tokens.
type Key struct {
	ID      string
	Number  int
	Created time.Time
	private *ecdsa.PrivateKey
}

// Keys are the keys in the store. The newest that has been published long
// enough signs; all of them verify.
type Keys struct {
	store Store
	now   func() time.Time

	mu     sync.Mutex // guards below, and is held while the store is read
	keys   []Key      // by number
	readAt time.Time
}

// NewKeys makes a ring of the keys in store. The first key is made when the
// first token is issued.
func NewKeys(store Store) *Keys { return &Keys{store: store, now: time.Now} }

// Signer is the key that signs now.
func (k *Keys) Signer(ctx context.Context) (Key, error) {
	keys, err := k.list(ctx, freshFor)
	if err != nil {
		return Key{}, err
	}
	if len(keys) == 0 {
		if keys, err = k.create(ctx, 1); err != nil {
			return Key{}, err
		}
	}
	return signer(keys, k.now()), nil
}

// signer: the newest that is old enough, or else the oldest.
func signer(keys []Key, now time.Time) Key {
	for _, key := range slices.Backward(keys) {
		if now.Sub(key.Created) >= publishedFor {
			return key
		}
	}
	return keys[0]
}

// Rotate makes a new key, which signs a minute from now. Older keys verify as
// before: the tokens they signed live on.
func (k *Keys) Rotate(ctx context.Context) (Key, error) {
	keys, err := k.list(ctx, 0)
	if err != nil {
		return Key{}, err
	}
	next := 1
	if len(keys) > 0 {
		next = keys[len(keys)-1].Number + 1
	}
	if keys, err = k.create(ctx, next); err != nil {
		return Key{}, err
	}
	return keys[len(keys)-1], nil
}

// Verifier is the key of that id.
func (k *Keys) Verifier(ctx context.Context, id string) (Key, bool, error) {
	for _, age := range []time.Duration{freshFor, askAgain} {
		keys, err := k.list(ctx, age)
		if err != nil {
			return Key{}, false, err
		}
		if i := slices.IndexFunc(keys, func(key Key) bool { return key.ID == id }); i >= 0 {
			return keys[i], true, nil
		}
	}
	return Key{}, false, nil
}

// All are the keys, oldest first.
func (k *Keys) All(ctx context.Context) ([]Key, error) { return k.list(ctx, freshFor) }

// create makes the key of that number, or takes the one that another server
// made.
func (k *Keys) create(ctx context.Context, number int) ([]Key, error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a signing key: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return nil, fmt.Errorf("make a signing key: %w", err)
	}
	err = k.store.Create(ctx, StoredKey{Number: number, Created: k.now().UTC(), Private: der})
	if err != nil && !errors.Is(err, ErrKeyExists) {
		return nil, fmt.Errorf("store a signing key: %w", err)
	}
	keys, err := k.list(ctx, 0)
	if err == nil && len(keys) == 0 {
		err = errors.New("the signing key that was stored is not there")
	}
	return keys, err
}

// list returns the keys as they were at most age ago. If the store cannot be
// read, what was read before still counts.
func (k *Keys) list(ctx context.Context, age time.Duration) ([]Key, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if age > 0 && len(k.keys) > 0 && k.now().Sub(k.readAt) < age {
		return k.keys, nil
	}
	stored, err := k.store.List(ctx)
	if err != nil {
		if age > 0 && len(k.keys) > 0 {
			return k.keys, nil
		}
		return nil, fmt.Errorf("read the signing keys: %w", err)
	}
	keys := make([]Key, 0, len(stored))
	for _, s := range stored {
		key, err := parse(s)
		if err != nil {
			return nil, fmt.Errorf("signing key %d: %w", s.Number, err)
		}
		keys = append(keys, key)
	}
	slices.SortFunc(keys, func(a, b Key) int { return a.Number - b.Number })
	k.keys, k.readAt = keys, k.now()
	return keys, nil
}

func parse(s StoredKey) (Key, error) {
	parsed, err := x509.ParsePKCS8PrivateKey(s.Private)
	if err != nil {
		return Key{}, err
	}
	private, ok := parsed.(*ecdsa.PrivateKey)
	if !ok {
		return Key{}, fmt.Errorf("is a %T, want an ECDSA key", parsed)
	}
	public, err := x509.MarshalPKIXPublicKey(&private.PublicKey)
	if err != nil {
		return Key{}, err
	}
	sum := sha256.Sum256(public)
	return Key{ID: base64.RawURLEncoding.EncodeToString(sum[:]), Number: s.Number, Created: s.Created, private: private}, nil
}
