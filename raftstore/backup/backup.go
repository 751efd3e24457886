// Package backup is the file that `clusterctl snapshot` writes: a cluster's
// whole state and its authority, sealed. It reads and writes streams; it opens
// no store and no connection, so that a client can verify a file as well as a
// server.
package backup

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/wire"
)

// Version of the format. Files of a later one are refused. A file says 1 unless it
// has a part that older releases do not know.
const Version = 3

// Names in the archive, in their order.
const (
	manifestName = "manifest.json"
	caCertName   = "ca.crt"
	caKeyName    = "ca.key"
	ownName      = "authorities.json" // since version 3, and only if there are any
	sealKeysName = "seal.keys"        // since version 2, and only if there are any
	storeName    = "store.bin"
)

// maxSmall bounds all parts but the store.
const maxSmall = 16 << 20

// ErrDamaged is returned for a file that is not what was written: cut short,
// changed, or not a backup at all.
var ErrDamaged = errors.New("the snapshot is damaged")

// ErrVersion is returned for a file that a later release has written.
var ErrVersion = errors.New("the snapshot was written by a later release")

// Manifest says what a backup holds.
type Manifest struct {
	Version int       `json:"version"`
	Cluster string    `json:"cluster"`
	Node    string    `json:"node"`    // whose copy of the state it is
	Release string    `json:"release"` // of clusterd
	Taken   time.Time `json:"taken"`
	// Epoch is the number of the store's life that it was taken in.
	Epoch uint64 `json:"epoch"`
	// Digest is the keyspace's in a few numbers, its hash among them.
	Digest mvcc.Digest `json:"digest"`
	// Counts are the live keys by folder: the kinds of the API, and our own.
	Counts map[string]int64 `json:"counts"`
	// SHA256 of the parts, by their names, in hexadecimal.
	SHA256 map[string]string `json:"sha256"`
}

// Content is a backup that was read and found whole.
type Content struct {
	Manifest
	Secrets
	Store *mvcc.Keyspace
}

// Secrets are what the state is worth nothing without.
type Secrets struct {
	CACert, CAKey []byte // PEM
	// Own are authorities of purposes that have their own, by the purpose; empty: CACert is for
	// all of them.
	Own map[string]Authority
	// SealKeys is a list of the keys, beside the one that follows from CAKey, that
	// secrets in the state may be sealed with; empty: none.
	SealKeys []byte
}

// Authority is one of Secrets' own ones.
type Authority struct {
	Cert []byte `json:"cert"` // PEM
	Key  []byte `json:"key"`  // PEM
}

// sealPrefix is what a value begins with that kubestore.Seal has sealed; the id of its
// key and a colon follow.
const sealPrefix = "k8s:enc:clusterd:"

// AuthoritySeal is the id of the key that follows from the first authority's; later
// ones add a dash and a part of their own id.
const AuthoritySeal = "authority"

var derivedSeals = regexp.MustCompile(`^` + AuthoritySeal + `(-[a-z2-7]{12})?$`)

// DerivedSeal reports whether the id is of a key that follows from an authority's: a
// snapshot has always held what it needs.
func DerivedSeal(id string) bool { return derivedSeals.MatchString(id) }

// MissingSealKeys are the ids of keys that live values are sealed with and that the
// snapshot does not hold. Snapshots of releases before those that put administrators'
// own keys into them have some.
func (c *Content) MissingSealKeys() ([]string, error) {
	held := map[string]bool{}
	for line := range strings.Lines(string(c.SealKeys)) {
		if fields := strings.Fields(line); len(fields) > 0 {
			held[fields[0]] = true
		}
	}
	list, err := c.Store.List(mvcc.Range{})
	if err != nil {
		return nil, err
	}
	var missing []string
	for _, kv := range list.KVs {
		rest, sealed := bytes.CutPrefix(kv.Value, []byte(sealPrefix))
		id, _, ok := bytes.Cut(rest, []byte(":"))
		if !sealed || !ok || held[string(id)] || DerivedSeal(string(id)) {
			continue
		}
		held[string(id)] = true
		missing = append(missing, string(id))
	}
	slices.Sort(missing)
	return missing, nil
}

// Providers are what live values begin with that providers of an EncryptionConfiguration
// have sealed, such as "k8s:enc:kms:v2:NAME:": no snapshot holds their keys.
func (c *Content) Providers() ([]string, error) {
	list, err := c.Store.List(mvcc.Range{})
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, kv := range list.KVs {
		if !bytes.HasPrefix(kv.Value, []byte("k8s:enc:")) || bytes.HasPrefix(kv.Value, []byte(sealPrefix)) {
			continue
		}
		if parts := bytes.SplitAfterN(kv.Value, []byte(":"), 6); len(parts) == 6 {
			seen[string(bytes.Join(parts[:5], nil))] = true
		}
	}
	return slices.Sorted(maps.Keys(seen)), nil
}

// Write writes the archive of a snapshot. What depends on the parts is filled
// into the manifest here. The snapshot is gone through twice: its size and
// hash come first.
func Write(w io.Writer, m Manifest, secrets Secrets, snap *mvcc.Snapshot, counts map[string]int64) error {
	sum := sha256.New()
	size := counter{w: sum}
	if err := wire.WriteSnapshot(&size, snap); err != nil {
		return err
	}
	type smallPart struct {
		name    string
		content []byte
	}
	parts := []smallPart{{caCertName, secrets.CACert}, {caKeyName, secrets.CAKey}}
	m.Version, m.Digest, m.Counts = 1, snap.Header().Digest, counts
	if len(secrets.Own) > 0 {
		own, err := json.Marshal(secrets.Own)
		if err != nil {
			return err
		}
		m.Version = 3
		parts = append(parts, smallPart{ownName, own})
	}
	if len(secrets.SealKeys) > 0 {
		m.Version = max(m.Version, 2)
		parts = append(parts, smallPart{sealKeysName, secrets.SealKeys})
	}
	m.SHA256 = map[string]string{storeName: hex.EncodeToString(sum.Sum(nil))}
	for _, p := range parts {
		m.SHA256[p.name] = sumOf(p.content)
	}
	manifest, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	t := tar.NewWriter(w)
	part := func(name string, size int64) error {
		return t.WriteHeader(&tar.Header{Name: name, Mode: 0o600, Size: size, ModTime: m.Taken.Truncate(time.Second), Format: tar.FormatPAX})
	}
	for _, p := range append([]smallPart{{manifestName, manifest}}, parts...) {
		if err := part(p.name, int64(len(p.content))); err != nil {
			return err
		}
		if _, err := t.Write(p.content); err != nil {
			return err
		}
	}
	if err := part(storeName, size.n); err != nil {
		return err
	}
	if err := wire.WriteSnapshot(t, snap); err != nil {
		return err
	}
	return t.Close()
}

// Counts counts the live keys of a keyspace for a Manifest.
func Counts(k *mvcc.Keyspace) (map[string]int64, error) {
	list, err := k.List(mvcc.Range{})
	if err != nil {
		return nil, err
	}
	counts := map[string]int64{}
	for _, kv := range list.KVs {
		counts[folderOf(kv.Key)]++
	}
	return counts, nil
}

// folderOf is /a/b of /a/b/c/d, and one element more below /registry, where
// the API keeps its kinds by group.
func folderOf(key string) string {
	deep := 3
	if strings.HasPrefix(key, "/registry/") {
		deep = 4
	}
	parts := strings.SplitN(key, "/", deep+1)
	return strings.Join(parts[:min(deep, len(parts))], "/")
}

// begin reads an archive up to the state.
func begin(r io.Reader) (*Content, *tar.Reader, error) {
	c := &Content{}
	t := tar.NewReader(r)
	manifest, _, err := small(t, manifestName)
	if err != nil {
		return nil, nil, err
	}
	if err := json.Unmarshal(manifest, &c.Manifest); err != nil {
		return nil, nil, fmt.Errorf("%w: %s: %w", ErrDamaged, manifestName, err)
	}
	if c.Version > Version {
		return nil, nil, fmt.Errorf("%w: format %d, and %d is known here", ErrVersion, c.Version, Version)
	}
	if c.CACert, err = c.part(t, caCertName); err != nil {
		return nil, nil, err
	}
	if c.CAKey, err = c.part(t, caKeyName); err != nil {
		return nil, nil, err
	}
	if _, has := c.SHA256[ownName]; has && c.Version > 2 {
		own, err := c.part(t, ownName)
		if err != nil {
			return nil, nil, err
		}
		if err := json.Unmarshal(own, &c.Own); err != nil {
			return nil, nil, fmt.Errorf("%w: %s: %w", ErrDamaged, ownName, err)
		}
	}
	if _, has := c.SHA256[sealKeysName]; has && c.Version > 1 {
		if c.SealKeys, err = c.part(t, sealKeysName); err != nil {
			return nil, nil, err
		}
	}
	if err := next(t, storeName); err != nil {
		return nil, nil, err
	}
	return c, t, nil
}

// Read reads an archive to its end, rebuilds the keyspace and compares all of
// it with what the manifest says. What it returns is whole. It wants as much
// memory as a member of the cluster.
func Read(r io.Reader) (*Content, error) {
	c, t, err := begin(r)
	if err != nil {
		return nil, err
	}
	sum := sha256.New()
	if c.Store, err = wire.ReadSnapshot(io.TeeReader(t, sum)); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrDamaged, storeName, err)
	}
	if err := c.finish(t, sum); err != nil {
		return nil, err
	}
	// What follows the archive belongs to nothing, but a sealed file is whole
	// only when its end was read.
	if _, err := io.Copy(io.Discard, r); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return c, nil
}

// Check reads an archive to its end and compares the hash of each part with what the
// manifest says. It does not rebuild the state, as Read does, and wants little memory.
func Check(r io.Reader) (Manifest, error) {
	c, t, err := begin(r)
	if err != nil {
		return Manifest{}, err
	}
	if err := c.hashed(t, sha256.New()); err != nil {
		return Manifest{}, err
	}
	if _, err := io.Copy(io.Discard, r); err != nil {
		return Manifest{}, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return c.Manifest, nil
}

// hashed reads what is left of the state, and compares its hash; it is the archive's
// last part.
func (c *Content) hashed(t *tar.Reader, sum hash.Hash) error {
	if _, err := io.Copy(sum, t); err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != c.SHA256[storeName] {
		return fmt.Errorf("%w: %s has the hash %s, and %s was written", ErrDamaged, storeName, got, c.SHA256[storeName])
	}
	if _, err := t.Next(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: something follows %s (%v)", ErrDamaged, storeName, err)
	}
	return nil
}

func (c *Content) finish(t *tar.Reader, sum hash.Hash) error {
	if err := c.hashed(t, sum); err != nil {
		return err
	}
	if got := c.Store.Digest(); got != c.Digest {
		return fmt.Errorf("%w: the state is %+v, and %+v was written", ErrDamaged, got, c.Digest)
	}
	counts, err := Counts(c.Store)
	if err != nil {
		return err
	}
	for folder, n := range c.Counts {
		if counts[folder] != n {
			return fmt.Errorf("%w: %d keys in %s, and %d were written", ErrDamaged, counts[folder], folder, n)
		}
	}
	if len(counts) != len(c.Counts) {
		return fmt.Errorf("%w: it has %d folders, and %d were written", ErrDamaged, len(counts), len(c.Counts))
	}
	return nil
}

// part reads one of the small parts and compares its hash.
func (c *Content) part(t *tar.Reader, name string) ([]byte, error) {
	b, sum, err := small(t, name)
	if err == nil && sum != c.SHA256[name] {
		err = fmt.Errorf("%w: %s has the hash %s, and %s was written", ErrDamaged, name, sum, c.SHA256[name])
	}
	return b, err
}

func small(t *tar.Reader, name string) (content []byte, sum string, err error) {
	if err := next(t, name); err != nil {
		return nil, "", err
	}
	var b bytes.Buffer
	if n, err := io.Copy(&b, io.LimitReader(t, maxSmall)); err != nil || n == maxSmall {
		return nil, "", fmt.Errorf("%w: %s: %d bytes, %v", ErrDamaged, name, n, err)
	}
	return b.Bytes(), sumOf(b.Bytes()), nil
}

func next(t *tar.Reader, name string) error {
	h, err := t.Next()
	if err != nil {
		return fmt.Errorf("%w: %s is missing: %w", ErrDamaged, name, err)
	}
	if h.Name != name {
		return fmt.Errorf("%w: %q stands where %s should", ErrDamaged, h.Name, name)
	}
	return nil
}

func sumOf(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

// counter counts what is written through it.
type counter struct {
	w io.Writer
	n int64
}

func (c *counter) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.n += int64(n)
	return n, err
}
