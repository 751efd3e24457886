package datadir

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/raftstore/wire"
)

// Names in the data directory. The directory and the files below it are named by
// raft's FileSnapshotStore; metaSum is ours.
const (
	// SnapshotsDir is the directory of snapshots.
	SnapshotsDir = "snapshots"
	snapMeta     = "meta.json"
	snapState    = "state.bin"
	snapMetaSum  = "meta.crc32c" // raft has a checksum of state.bin, and none of meta.json
)

// Snapshots is raft's store of snapshot files, with a checksum of the part
// that raft has none for.
type Snapshots struct {
	*raft.FileSnapshotStore
	dir string
	// Checked is true while CheckSnapshots has just read them: they are not
	// read a second time.
	Checked atomic.Bool
	// Corrupt is called for one that has become damaged since then; may be nil.
	// It is set before the first Open.
	Corrupt func(error)
	// Pack says whether a snapshot that is begun now is compressed; nil: none is.
	// Versions before packing cannot read those that are. It is set before the
	// first Create.
	Pack func() bool
	// Allow is asked before a snapshot is begun, and at each MiB of it: an error ends
	// it. nil: all are allowed. It is set before the first Create.
	Allow func() error

	mu      sync.Mutex
	writing map[string]bool // ids of those that are being written
}

// KeptSnapshots is how many snapshots are kept: the newest one and, should it
// turn out damaged, the one before it.
const KeptSnapshots = 2

// OpenSnapshots opens the snapshots of a data directory, made if need be.
func OpenSnapshots(dir string, logger hclog.Logger) (*Snapshots, error) {
	s, err := raft.NewFileSnapshotStoreWithLogger(dir, KeptSnapshots, logger)
	if err != nil {
		return nil, err
	}
	return &Snapshots{FileSnapshotStore: s, dir: filepath.Join(dir, SnapshotsDir), writing: make(map[string]bool)}, nil
}

// RemoveUnfinished removes what a crash, or an attempt to create one, has left of
// snapshots that never were whole: each may take as much room as a whole one.
func (s *Snapshots) RemoveUnfinished() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.removeUnfinished()
}

// removeUnfinished is called with mu held.
func (s *Snapshots) removeUnfinished() error {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if id, ok := strings.CutSuffix(e.Name(), unfinished); ok && !s.writing[id] {
			err = errors.Join(err, os.RemoveAll(filepath.Join(s.dir, e.Name())))
		}
	}
	return err
}

// Open implements raft.SnapshotStore. One that has become damaged since the
// store was opened stops the store: the next start repairs it.
func (s *Snapshots) Open(id string) (*raft.SnapshotMeta, io.ReadCloser, error) {
	open := s.FileSnapshotStore.Open // with raft's checksum
	if s.Checked.Load() {
		open = s.openChecked
	}
	meta, r, err := open(id)
	if err == nil {
		if r, meta.Size, err = s.unpack(id, r); err == nil {
			return meta, r, nil
		}
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) && s.Corrupt != nil {
		err = &DamageError{filepath.Join(s.dir, id), -1, err}
		s.Corrupt(err)
	}
	return nil, nil, err
}

// unpack returns what a snapshot's file holds, and how much that is: what is
// sent to other members is not packed, whatever their version.
func (s *Snapshots) unpack(id string, r io.ReadCloser) (io.ReadCloser, int64, error) {
	f, err := os.Open(filepath.Join(s.dir, id, snapState))
	if err != nil {
		return nil, 0, errors.Join(err, r.Close())
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return nil, 0, errors.Join(err, r.Close())
	}
	packed, holds, err := isPacked(f, info.Size())
	if err != nil {
		return nil, 0, errors.Join(err, r.Close())
	}
	if !packed {
		return r, holds, nil
	}
	u, err := newUnpacker(r)
	if err != nil {
		return nil, 0, errors.Join(err, r.Close())
	}
	return u, holds, nil
}

// openChecked spares a second reading of all of it.
func (s *Snapshots) openChecked(id string) (*raft.SnapshotMeta, io.ReadCloser, error) {
	b, err := os.ReadFile(filepath.Join(s.dir, id, snapMeta))
	if err != nil {
		return nil, nil, err
	}
	meta := &raft.SnapshotMeta{}
	if err := json.Unmarshal(b, meta); err != nil {
		return nil, nil, err
	}
	f, err := os.Open(filepath.Join(s.dir, id, snapState))
	return meta, f, err
}

// Create implements raft.SnapshotStore.
func (s *Snapshots) Create(version raft.SnapshotVersion, index, term uint64, c raft.Configuration, cIndex uint64, t raft.Transport) (raft.SnapshotSink, error) {
	if err := s.allow(); err != nil {
		return nil, err
	}
	paced, err := s.begin(func() (raft.SnapshotSink, error) {
		return s.FileSnapshotStore.Create(version, index, term, c, cIndex, t)
	})
	if err != nil {
		return nil, err
	}
	sink := &snapshotSink{paced: paced, all: s}
	if s.Pack == nil || !s.Pack() {
		return sink, nil
	}
	if sink.pack, err = newPacker(paced); err != nil {
		return nil, errors.Join(err, sink.Cancel())
	}
	return sink, nil
}

func (s *Snapshots) begin(create func() (raft.SnapshotSink, error)) (*paced, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	inner, err := create()
	if err != nil { // raft leaves what it has made of it so far
		return nil, errors.Join(err, s.removeUnfinished())
	}
	p, err := newPaced(inner, s.dir, s.allow)
	if err == nil {
		s.writing[inner.ID()] = true
	}
	return p, err
}

func (s *Snapshots) allow() error {
	if s.Allow == nil {
		return nil
	}
	return s.Allow()
}

func (s *Snapshots) ended(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.writing, id)
}

type snapshotSink struct {
	*paced
	all    *Snapshots
	pack   *packer // nil: it is written as it comes
	closed bool    // or cancelled
}

// Write implements io.Writer.
func (s *snapshotSink) Write(b []byte) (int, error) {
	if s.pack == nil {
		return s.paced.Write(b)
	}
	return s.pack.Write(b)
}

// Close finishes the snapshot. It stands from then on; a crash before the
// checksum is written leaves one whose meta.json is accepted.
func (s *snapshotSink) Close() error {
	if s.closed {
		return nil
	}
	if s.pack != nil {
		if err := s.pack.finish(); err != nil {
			return errors.Join(err, s.Cancel())
		}
	}
	s.closed = true
	defer s.all.ended(s.ID())
	if err := s.paced.Close(); err != nil {
		return err
	}
	b, err := os.ReadFile(filepath.Join(s.folder, snapMeta))
	if err != nil {
		return err
	}
	return durable.ReplaceFile(filepath.Join(s.folder, snapMetaSum), fmt.Appendf(nil, "%08x\n", Checksum(b)), 0o600)
}

// Cancel implements raft.SnapshotSink.
func (s *snapshotSink) Cancel() error {
	if s.closed {
		return nil
	}
	s.closed = true
	defer s.all.ended(s.ID())
	return s.paced.Cancel()
}

// Latest returns the indexes of the newest snapshot and of the one before it; 0
// where there is none.
func (s *Snapshots) Latest() (newest, older uint64, err error) {
	list, err := s.List()
	if len(list) > 0 {
		newest = list[0].Index
	}
	if len(list) > 1 {
		older = list[1].Index
	}
	return newest, older, err
}

// Newest is the snapshot of the highest entry by the names of their directories, whether
// it can be read or not: List leaves out those whose metadata cannot. Its ID is
// empty if there is none.
func (s *Snapshots) Newest() (raft.SnapshotMeta, error) {
	var newest raft.SnapshotMeta
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return newest, err
	}
	for _, e := range entries {
		var term, index, msec uint64
		if n, err := fmt.Sscanf(e.Name(), "%d-%d-%d", &term, &index, &msec); n != 3 || err != nil || strings.HasSuffix(e.Name(), unfinished) {
			continue
		}
		if newest.ID == "" || index > newest.Index {
			newest = raft.SnapshotMeta{ID: e.Name(), Index: index, Term: term}
		}
	}
	return newest, nil
}

// Check is what CheckSnapshots has found.
type Check struct {
	Whole   uint64         // index of the newest snapshot that is whole; 0: there is none
	Damaged []*DamageError // what is wrong with those that are newer, the newest first
	Reached uint64         // the highest index of these; 0: there are none

	folders []string
}

// MoveAside moves the damaged ones of a data directory into DamagedDir.
func (c *Check) MoveAside(data string) error {
	for _, name := range c.folders {
		if err := MoveAside(data, filepath.Join(SnapshotsDir, name)); err != nil {
			return err
		}
	}
	return nil
}

// CheckSnapshots looks at the snapshots from the newest on until one is whole. It
// changes nothing.
func CheckSnapshots(data string) (*Check, error) {
	found := &Check{}
	dir := filepath.Join(data, SnapshotsDir)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return found, nil
	}
	if err != nil {
		return nil, err
	}
	type named struct {
		name        string
		term, index uint64
	}
	var list []named
	for _, e := range entries {
		n := named{name: e.Name()}
		var millis int64
		if !e.IsDir() || strings.HasSuffix(n.name, unfinished) {
			continue
		}
		if _, err := fmt.Sscanf(n.name, "%d-%d-%d", &n.term, &n.index, &millis); err != nil {
			continue
		}
		list = append(list, n)
	}
	sort.Slice(list, func(i, j int) bool { return list[i].index > list[j].index })
	for _, n := range list {
		err := checkSnapshot(filepath.Join(dir, n.name), n.term, n.index)
		if err == nil {
			found.Whole = n.index
			break
		}
		damage := new(DamageError)
		if !errors.As(err, &damage) {
			return nil, err
		}
		found.Damaged = append(found.Damaged, damage)
		found.Reached = max(found.Reached, n.index)
		found.folders = append(found.folders, n.name)
	}
	return found, nil
}

// checkSnapshot reads one snapshot's files. Its directory's name says what it is.
func checkSnapshot(dir string, term, index uint64) error {
	path := filepath.Join(dir, snapMeta)
	b, err := os.ReadFile(path)
	if err != nil {
		return &DamageError{path, -1, err}
	}
	want, err := os.ReadFile(filepath.Join(dir, snapMetaSum))
	if err == nil && string(want) != fmt.Sprintf("%08x\n", Checksum(b)) {
		return &DamageError{path, 0, fmt.Errorf("%w: the checksum is %08x, stored was %q", wire.ErrCorrupt, Checksum(b), want)}
	}
	var meta raft.SnapshotMeta
	if err := json.Unmarshal(b, &meta); err != nil {
		offset := int64(-1)
		if at := new(json.SyntaxError); errors.As(err, &at) {
			offset = at.Offset
		}
		return &DamageError{path, offset, err}
	}
	if meta.Term != term || meta.Index != index || meta.ID != filepath.Base(dir) {
		return &DamageError{path, 0, fmt.Errorf("%w: it tells of term %d, index %d, id %s", wire.ErrCorrupt, meta.Term, meta.Index, meta.ID)}
	}
	path = filepath.Join(dir, snapState)
	f, err := os.Open(path)
	if err != nil {
		return &DamageError{path, -1, err}
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if err := checkState(f, info.Size()); err != nil {
		if at := new(wire.DamageError); errors.As(err, &at) && !errors.Is(err, wire.ErrVersion) {
			return &DamageError{path, at.Offset, at.Err}
		}
		return fmt.Errorf("%s: %w", path, err)
	}
	if info.Size() != meta.Size {
		return &DamageError{path, min(info.Size(), meta.Size), fmt.Errorf("%w: it has %d bytes, %d were written", wire.ErrCorrupt, info.Size(), meta.Size)}
	}
	return nil
}

// checkState looks for damage in a snapshot's file.
func checkState(f *os.File, size int64) error {
	packed, _, err := isPacked(f, size)
	switch {
	case err != nil:
		return err
	case packed:
		return checkPacked(f)
	default:
		return wire.CheckSnapshot(f) // written before there was packing
	}
}

// Size is how many bytes of disk the newest snapshot takes; 0: there is none.
func (s *Snapshots) Size() int64 {
	list, err := s.List()
	if err != nil || len(list) == 0 {
		return 0
	}
	return list[0].Size
}
