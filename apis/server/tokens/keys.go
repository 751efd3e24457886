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
	// retiredFor is how long a key verifies after another one signs: as long as
	// the longest token that pods get.
	retiredFor = extended
)

// StoredKey is a signing key as it is kept: shared by all servers, never
// changed once made.
type StoredKey struct {
	// Number orders the keys; the first is 1.
	Number  int
	Created time.Time
	Cause   Cause
	// Private is PKCS #8.
	Private []byte
}

// Cause is why a key was made.
type Cause struct {
	// Authority is the number of the state of the cluster's certificate authority
	// that the key follows; 0: none.
	Authority uint64
	// Alone: no older key verifies from now on.
	Alone bool
}

// ErrKeyExists is returned by Store.Create when another server was faster.
var ErrKeyExists = errors.New("a key of that number exists")

// Store keeps the keys. Its methods may block and are called concurrently.
type Store interface {
	List(ctx context.Context) ([]StoredKey, error)
	Create(ctx context.Context, key StoredKey) error
	// Delete removes a key; that it is gone already is no error.
	Delete(ctx context.Context, number int) error
}

// Key is a key that signs and verifies tokens.
type Key struct {
	ID      string
	Number  int
	Created time.Time
	cause   Cause
	private *ecdsa.PrivateKey
}

// Keys are the keys in the store. The newest that has been published long
// enough signs; older ones verify for a year after that, unless a newer one
// stands alone.
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
		if keys, err = k.create(ctx, 1, Cause{}); err != nil {
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

// valid are those that verify at that time: none that is older than one that
// stands alone, or that has not signed for retiredFor. keys are in the order of
// their numbers.
func valid(keys []Key, now time.Time) []Key {
	for i := len(keys) - 1; i > 0; i-- {
		if keys[i].cause.Alone || now.Sub(keys[i].Created) >= publishedFor+retiredFor {
			return keys[i:]
		}
	}
	return keys
}

// Follow makes a new key unless the newest one follows that state of the
// authority or a later one, and reports whether it did. The new key signs a minute
// later, or at once if it stands alone.
func (k *Keys) Follow(ctx context.Context, cause Cause) (made bool, err error) {
	keys, err := k.list(ctx, 0)
	if err != nil {
		return false, err
	}
	next := 1
	if len(keys) > 0 {
		newest := keys[len(keys)-1]
		if newest.cause.Authority >= cause.Authority {
			return false, nil
		}
		next = newest.Number + 1
	}
	if keys, err = k.create(ctx, next, cause); err != nil {
		return false, err
	}
	if newest := keys[len(keys)-1]; newest.cause.Authority < cause.Authority {
		return false, fmt.Errorf("signing key %d was made by another server meanwhile", newest.Number)
	}
	return true, nil
}

// Rotate makes a new key if the newest one is at least age old, and reports whether it
// did. The new key signs a minute later, and those before verify for another year. One
// that does not sign yet is new enough for any age, so it does no harm to ask twice.
func (k *Keys) Rotate(ctx context.Context, age time.Duration) (made bool, err error) {
	keys, err := k.list(ctx, 0)
	if err != nil {
		return false, err
	}
	next, cause := 1, Cause{}
	if len(keys) > 0 {
		newest, now := keys[len(keys)-1], k.now()
		if signer(keys, now).Number != newest.Number || now.Sub(newest.Created) < age {
			return false, nil
		}
		// It follows the authority as the one before it does.
		next, cause.Authority = newest.Number+1, newest.cause.Authority
	}
	keys, err = k.create(ctx, next, cause)
	return err == nil && keys[len(keys)-1].Number == next, err
}

// State is what of a key others may know.
type State struct {
	ID      string
	Created time.Time
	// Signs: new tokens are signed with it. From is since when, or from when on.
	Signs bool
	From  time.Time
	// Until is how long it verifies; zero: no newer key signs yet.
	Until time.Time
}

// States are the keys that verify, oldest first, as the store has them now.
func (k *Keys) States(ctx context.Context) ([]State, error) {
	keys, err := k.list(ctx, 0)
	if err != nil || len(keys) == 0 {
		return nil, err
	}
	signs := signer(keys, k.now())
	states := make([]State, len(keys))
	for i, key := range keys {
		states[i] = State{ID: key.ID, Created: key.Created, Signs: key.Number == signs.Number, From: key.Created.Add(publishedFor)}
		if key.Number == 1 || key.cause.Alone { // there was none before it
			states[i].From = key.Created
		}
		if i > 0 {
			states[i-1].Until = states[i].Created.Add(publishedFor + retiredFor)
		}
	}
	return states, nil
}

// Drop deletes the keys that verify no token any more, and returns how many.
func (k *Keys) Drop(ctx context.Context) (int, error) {
	stored, err := k.store.List(ctx)
	if err != nil {
		return 0, fmt.Errorf("read the signing keys: %w", err)
	}
	keys := make([]Key, 0, len(stored))
	for _, s := range stored {
		keys = append(keys, Key{Number: s.Number, Created: s.Created, cause: s.Cause})
	}
	slices.SortFunc(keys, byNumber)
	stale := keys[:len(keys)-len(valid(keys, k.now()))]
	for i, key := range stale {
		if err := k.store.Delete(ctx, key.Number); err != nil {
			return i, fmt.Errorf("delete signing key %d: %w", key.Number, err)
		}
	}
	return len(stale), nil
}

func byNumber(a, b Key) int { return a.Number - b.Number }

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
func (k *Keys) create(ctx context.Context, number int, cause Cause) ([]Key, error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a signing key: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return nil, fmt.Errorf("make a signing key: %w", err)
	}
	err = k.store.Create(ctx, StoredKey{Number: number, Created: k.now().UTC(), Cause: cause, Private: der})
	if err != nil && !errors.Is(err, ErrKeyExists) {
		return nil, fmt.Errorf("store a signing key: %w", err)
	}
	keys, err := k.list(ctx, 0)
	if err == nil && len(keys) == 0 {
		err = errors.New("the signing key that was stored is not there")
	}
	return keys, err
}

// list returns the keys that verify now, as the store had them at most age ago.
// If the store cannot be read, what was read before still counts.
func (k *Keys) list(ctx context.Context, age time.Duration) ([]Key, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := k.now()
	if age > 0 && len(k.keys) > 0 && now.Sub(k.readAt) < age {
		return valid(k.keys, now), nil
	}
	stored, err := k.store.List(ctx)
	if err != nil {
		if age > 0 && len(k.keys) > 0 {
			return valid(k.keys, now), nil
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
	slices.SortFunc(keys, byNumber)
	k.keys, k.readAt = keys, now
	return valid(keys, now), nil
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
	return Key{ID: base64.RawURLEncoding.EncodeToString(sum[:]), Number: s.Number, Created: s.Created, cause: s.Cause, private: private}, nil
}
