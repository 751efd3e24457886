package checkpoint

import (
	"bytes"
	"compress/gzip"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/durable"
)

// KeySize is that of the key that encrypts records.
const KeySize = 32

// version is that of the files.
const version = 1

// maxRecord bounds the record of one pod, and that of the cluster.
const maxRecord = 32 << 20

// file is a record on disk: AES-256-GCM over its JSON, compressed by gzip. The file's name is part of
// what is authenticated, so that no record passes for another.
type file struct {
	Version int    `json:"version"`
	Nonce   []byte `json:"nonce"`
	Sealed  []byte `json:"sealed"`
}

// Store is the directory with the records. Its methods may be called concurrently.
type Store struct {
	dir  string
	aead cipher.AEAD

	mu     sync.Mutex // guards hashes, and the files
	hashes map[string][sha256.Size]byte
}

// Open makes the directory. key has KeySize bytes.
func Open(dir string, key []byte) (*Store, error) {
	if len(key) != KeySize {
		return nil, fmt.Errorf("checkpoint: a key of %d bytes, not %d", len(key), KeySize)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: %w", err)
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: %w", err)
	}
	if err := os.MkdirAll(filepath.Join(dir, podsDir), 0o700); err != nil {
		return nil, fmt.Errorf("checkpoint: %w", err)
	}
	return &Store{dir: dir, aead: aead, hashes: map[string][sha256.Size]byte{}}, nil
}

// Names in the directory.
const (
	podsDir         = "pods"
	clusterFile     = "cluster"
	unconfirmedFile = "unconfirmed.json"
	contactFile     = "contact"
)

func podFile(uid types.UID) string { return filepath.Join(podsDir, string(uid)) }

// PutPod writes the record of a pod unless it is on disk as it is.
func (s *Store) PutPod(p *Pod) error { return s.put(podFile(p.Pod.UID), p) }

// PutCluster writes the record of the cluster unless it is on disk as it is.
func (s *Store) PutCluster(c *Cluster) error { return s.put(clusterFile, c) }

func (s *Store) put(name string, record any) error {
	b, err := json.Marshal(record)
	if err != nil {
		return fmt.Errorf("checkpoint %s: %w", name, err)
	}
	if len(b) > maxRecord {
		return errors.Join(fmt.Errorf("checkpoint %s: %d bytes, more than the %d that are kept", name, len(b), maxRecord), s.remove(name))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	hash := sha256.Sum256(b)
	if s.hashes[name] == hash {
		return nil
	}
	f := file{Version: version, Nonce: make([]byte, s.aead.NonceSize())}
	rand.Read(f.Nonce)
	var small bytes.Buffer
	pack := gzip.NewWriter(&small)
	_, err = pack.Write(b)
	if err = errors.Join(err, pack.Close()); err != nil {
		return fmt.Errorf("checkpoint %s: %w", name, err)
	}
	f.Sealed = s.aead.Seal(nil, f.Nonce, small.Bytes(), []byte(name))
	if b, err = json.Marshal(f); err != nil {
		return fmt.Errorf("checkpoint %s: %w", name, err)
	}
	if err := durable.ReplaceFile(filepath.Join(s.dir, name), b, 0o600); err != nil {
		return fmt.Errorf("checkpoint %s: %w", name, err)
	}
	s.hashes[name] = hash
	return nil
}

// RemovePods removes the records of pods, if there are any.
func (s *Store) RemovePods(uids ...types.UID) error {
	names := make([]string, 0, len(uids))
	for _, uid := range uids {
		names = append(names, podFile(uid))
	}
	return s.remove(names...)
}

// remove removes files of one directory.
func (s *Store) remove(names ...string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	sync := ""
	for _, name := range names {
		delete(s.hashes, name)
		path := filepath.Join(s.dir, name)
		if err := os.Remove(path); err == nil {
			sync = filepath.Dir(path)
		} else if !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("checkpoint: %w", err))
		}
	}
	if sync != "" {
		errs = append(errs, durable.SyncDir(sync))
	}
	return errors.Join(errs...)
}

// UIDs are the pods that have a record.
func (s *Store) UIDs() ([]types.UID, error) {
	files, err := os.ReadDir(filepath.Join(s.dir, podsDir))
	if err != nil {
		return nil, fmt.Errorf("checkpoint: %w", err)
	}
	var out []types.UID
	for _, f := range files {
		out = append(out, types.UID(f.Name()))
	}
	return out, nil
}

// Load reads all records. One that is damaged, or that this version cannot read, is
// left out and reported; cluster is nil if it is that one, or there is none.
func (s *Store) Load() (pods []*Pod, cluster *Cluster, faults []error) {
	uids, err := s.UIDs()
	if err != nil {
		faults = append(faults, err)
	}
	for _, uid := range uids {
		p := &Pod{}
		err := s.load(podFile(uid), p)
		if err == nil {
			err = p.check(string(uid))
		}
		if err != nil {
			faults = append(faults, fmt.Errorf("checkpoint %s: %w", podFile(uid), err))
			continue
		}
		pods = append(pods, p)
	}
	c := &Cluster{}
	err = s.load(clusterFile, c)
	if err == nil && c.Node == nil {
		err = errors.New("it has no node")
	}
	if err == nil {
		return pods, c, faults
	}
	if !errors.Is(err, fs.ErrNotExist) {
		faults = append(faults, fmt.Errorf("checkpoint %s: %w", clusterFile, err))
	}
	return pods, nil, faults
}

func (s *Store) load(name string, record any) error {
	b, err := os.ReadFile(filepath.Join(s.dir, name))
	if err != nil {
		return err
	}
	var f file
	if err := json.Unmarshal(b, &f); err != nil {
		return fmt.Errorf("it is damaged: %w", err)
	}
	if f.Version != version {
		return fmt.Errorf("version %d is not known here", f.Version)
	}
	if len(f.Nonce) != s.aead.NonceSize() {
		return errors.New("it is damaged: a nonce of the wrong length")
	}
	if b, err = s.aead.Open(nil, f.Nonce, f.Sealed, []byte(name)); err != nil {
		return fmt.Errorf("it is damaged, or of another node key: %w", err)
	}
	pack, err := gzip.NewReader(bytes.NewReader(b))
	if err == nil {
		b, err = io.ReadAll(io.LimitReader(pack, maxRecord+1))
	}
	if err == nil && len(b) > maxRecord {
		err = fmt.Errorf("more than %d bytes", maxRecord)
	}
	if err != nil {
		return fmt.Errorf("it is damaged: %w", err)
	}
	s.mu.Lock()
	s.hashes[name] = sha256.Sum256(b)
	s.mu.Unlock()
	return json.NewDecoder(bytes.NewReader(b)).Decode(record)
}

// contact is when the node last had an API.
type contact struct {
	At time.Time `json:"at"`
}

// PutContact notes that the node had an API at a time.
func (s *Store) PutContact(at time.Time) error { return s.put(contactFile, contact{at.UTC()}) }

// Contact is when the node last had an API, as noted. It is an error if that is not known.
func (s *Store) Contact() (time.Time, error) {
	var c contact
	if err := s.load(contactFile, &c); err != nil {
		return time.Time{}, fmt.Errorf("checkpoint %s: %w", contactFile, err)
	}
	return c.At, nil
}

// Unconfirmed are pods that were started without the API, which has not been asked
// about them since.
type Unconfirmed struct {
	Version int         `json:"version"`
	Since   time.Time   `json:"since"`
	Pods    []types.UID `json:"pods"`
}

// MarkUnconfirmed notes the pods for who looks at the node itself; none: no more.
func (s *Store) MarkUnconfirmed(since time.Time, pods []types.UID) error {
	if len(pods) == 0 {
		return s.remove(unconfirmedFile)
	}
	b, err := json.Marshal(Unconfirmed{version, since.UTC(), pods})
	if err != nil {
		return err
	}
	if err := durable.ReplaceFile(filepath.Join(s.dir, unconfirmedFile), b, 0o600); err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	return nil
}

// ReadUnconfirmed reads what MarkUnconfirmed noted in the directory dir. It needs no
// key.
func ReadUnconfirmed(dir string) (u Unconfirmed, err error) {
	b, err := os.ReadFile(filepath.Join(dir, unconfirmedFile))
	if errors.Is(err, fs.ErrNotExist) {
		return u, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &u)
	}
	if err == nil && u.Version != version {
		err = fmt.Errorf("version %d is not known here", u.Version)
	}
	if err != nil {
		return Unconfirmed{}, fmt.Errorf("%s: %w", filepath.Join(dir, unconfirmedFile), err)
	}
	return u, nil
}
