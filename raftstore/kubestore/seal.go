package kubestore

import (
	"context"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync/atomic"

	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/aes"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
)

// sealLength is the length of a SealKey's secret in bytes.
const sealLength = 32

// SealPrefix is what a value begins with that a Seal has sealed; the id of its key and a
// colon follow.
const SealPrefix = "k8s:enc:clusterd:"

// SealKey encrypts values at rest: AES-GCM with a key of its own for each
// value, derived from Secret.
type SealKey struct {
	// ID is written before each value, in clear.
	ID     string
	Secret []byte
}

// DeriveSealKey makes a key from a secret that all servers share anyway.
func DeriveSealKey(id string, master []byte) (SealKey, error) {
	secret, err := hkdf.Key(sha256.New, master, nil, "clusterd secrets at rest: "+id, sealLength)
	if err != nil {
		return SealKey{}, fmt.Errorf("derive the key %s for secrets at rest: %w", id, err)
	}
	return SealKey{ID: id, Secret: secret}, nil
}

var sealIDs = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?$`)

// ParseSealKeys reads a list of keys: a line holds an id and 32 bytes in
// base64; empty lines and those that begin with "#" are passed over.
func ParseSealKeys(list string) ([]SealKey, error) {
	var keys []SealKey
	for number, line := range strings.Split(list, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.Fields(line)
		if len(fields) != 2 || !sealIDs.MatchString(fields[0]) {
			return nil, fmt.Errorf("line %d: want an id of lower-case letters, digits and dashes, and a key in base64", number+1)
		}
		secret, err := base64.StdEncoding.DecodeString(fields[1])
		if err != nil || len(secret) != sealLength {
			return nil, fmt.Errorf("line %d: the key %s has to be %d bytes in base64", number+1, fields[0], sealLength)
		}
		keys = append(keys, SealKey{ID: fields[0], Secret: secret})
	}
	return keys, nil
}

// Seal is a value.Transformer that can change its keys while it is in use. The
// first key writes, all of them read; what is stored in clear or under another
// key than the first is read as stale, so that its next write seals it with the first.
type Seal struct {
	current atomic.Pointer[value.Transformer]
}

var _ value.Transformer = &Seal{}

// NewSeal makes a Seal of keys, of which there has to be one.
func NewSeal(keys []SealKey) (*Seal, error) {
	s := &Seal{}
	return s, s.Use(keys)
}

// Use changes the keys.
func (s *Seal) Use(keys []SealKey) error {
	if len(keys) == 0 {
		return errors.New("secrets at rest need a key")
	}
	var all []value.PrefixTransformer
	seen := map[string]bool{}
	for _, key := range keys {
		if seen[key.ID] {
			return fmt.Errorf("the key %s for secrets at rest is there twice", key.ID)
		}
		seen[key.ID] = true
		transformer, err := aes.NewHKDFExtendedNonceGCMTransformer(key.Secret)
		if err != nil {
			return fmt.Errorf("key %s for secrets at rest: %w", key.ID, err)
		}
		all = append(all, value.PrefixTransformer{Prefix: []byte(SealPrefix + key.ID + ":"), Transformer: transformer})
	}
	// What was stored before there was a seal.
	all = append(all, value.PrefixTransformer{Transformer: identity.NewEncryptCheckTransformer()})
	transformer := value.NewPrefixTransformers(errors.New("the value is sealed with a key that this server does not have"), all...)
	s.current.Store(&transformer)
	return nil
}

// TransformFromStorage implements value.Transformer.
func (s *Seal) TransformFromStorage(ctx context.Context, data []byte, dataCtx value.Context) ([]byte, bool, error) {
	return (*s.current.Load()).TransformFromStorage(ctx, data, dataCtx)
}

// TransformToStorage implements value.Transformer.
func (s *Seal) TransformToStorage(ctx context.Context, data []byte, dataCtx value.Context) ([]byte, error) {
	return (*s.current.Load()).TransformToStorage(ctx, data, dataCtx)
}
