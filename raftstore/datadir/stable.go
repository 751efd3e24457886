package datadir

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"

	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"

	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/raftstore/boltlog"
	"github.com/clusterd/clusterd/raftstore/wire"
)

// Stable keeps raft's term and vote: one record in each of two databases of
// raft-boltdb, with a checksum, written and synced one after the other. bolt
// replaces the record as a whole, so a crash leaves the old one or the new one
// in each. A copy that is damaged is made good from the other one. The files
// have all the pages they will ever need from the beginning, so a full disk
// does not stop an election.
type Stable struct {
	mu     sync.Mutex
	copies []stableCopy
	rec    stableRecord
	// voteTerm is the term of a vote whose candidate raft is about to say. The
	// two are written together. 0: there is none.
	voteTerm uint64
	// Failed is called with an error in writing, and the goroutine ends: raft would
	// end the process with a stack trace. nil: the error is returned. It is set
	// before the first write.
	Failed func(error)
}

type stableCopy struct {
	path string
	db   *raftboltdb.BoltStore
}

var _ raft.StableStore = (*Stable)(nil)

// stableRecord is all that raft ever stores.
type stableRecord struct {
	seq      uint64 // counts writes
	term     uint64 // raft's CurrentTerm
	voteTerm uint64 // LastVoteTerm
	voteCand []byte // LastVoteCand
}

// VoteFiles are the names of the databases in the data directory.
var VoteFiles = []string{"vote-1.db", "vote-2.db"}

// VoteFileV1 is the file of version 1, which held both copies.
const VoteFileV1 = "vote"

const (
	stableMagic   = "CLDRVOTE"
	stableVersion = 2
	stableSlotV1  = 4096 // bytes of one copy of version 1
	// stableHead is magic (8), version (4), checksum of the rest (4).
	stableHead = 16
	stableMin  = 44
	// stableCand is how long a candidate's ID may be.
	stableCand = 1024
	// stableRoom is how long a file is from the beginning: several times what
	// bolt's pages for one record, old and new, take.
	stableRoom = 128 << 10
)

var stableKey = []byte("vote") // of the record, in bolt

func (r *stableRecord) encode() []byte {
	b := append(make([]byte, 0, stableMin+len(r.voteCand)), stableMagic...)
	b = binary.LittleEndian.AppendUint32(b, stableVersion)
	b = append(b, 0, 0, 0, 0)
	b = binary.LittleEndian.AppendUint64(b, r.seq)
	b = binary.LittleEndian.AppendUint64(b, r.term)
	b = binary.LittleEndian.AppendUint64(b, r.voteTerm)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(r.voteCand)))
	b = append(b, r.voteCand...)
	binary.LittleEndian.PutUint32(b[12:], Checksum(b[stableHead:]))
	return b
}

func decodeStable(b []byte) (r stableRecord, err error) {
	if len(b) < stableMin || string(b[:8]) != stableMagic {
		return r, fmt.Errorf("%w: not a record of term and vote", wire.ErrCorrupt)
	}
	switch v := binary.LittleEndian.Uint32(b[8:]); {
	case v == 0 || v > stableVersion:
		return r, fmt.Errorf("%w: record of term and vote %d", wire.ErrVersion, v)
	case v == 1 && len(b) != stableSlotV1:
		return r, fmt.Errorf("%w: a record of %d bytes", wire.ErrCorrupt, len(b))
	}
	if got, want := Checksum(b[stableHead:]), binary.LittleEndian.Uint32(b[12:]); got != want {
		return r, fmt.Errorf("%w: the checksum is %08x, stored was %08x", wire.ErrCorrupt, got, want)
	}
	r.seq = binary.LittleEndian.Uint64(b[16:])
	r.term = binary.LittleEndian.Uint64(b[24:])
	r.voteTerm = binary.LittleEndian.Uint64(b[32:])
	n := binary.LittleEndian.Uint32(b[40:])
	if n > stableCand || int(n) > len(b)-stableMin {
		return r, fmt.Errorf("%w: an ID of %d bytes", wire.ErrCorrupt, n)
	}
	r.voteCand = bytes.Clone(b[stableMin : stableMin+n])
	return r, nil
}

// OpenStable opens the databases, made if need be. With both copies damaged it
// returns a *DamageError. repaired, if not nil, is what was wrong with one.
func OpenStable(dir string) (s *Stable, repaired, err error) {
	s = &Stable{}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
			s = nil
		}
	}()
	good, gone := 0, 0
	newer := func(r stableRecord) {
		if good++; r.seq >= s.rec.seq {
			s.rec = r
		}
	}
	for _, name := range VoteFiles {
		c := stableCopy{path: filepath.Join(dir, name)}
		r, err := c.open()
		damage := new(DamageError)
		switch {
		case errors.Is(err, os.ErrNotExist):
			gone++
		case errors.As(err, &damage):
			repaired = damage
		case err != nil:
			return s, nil, err
		default:
			newer(r)
		}
		s.copies = append(s.copies, c)
	}
	old, err := readStableV1(dir)
	if err != nil && (good == 0 || !errors.As(err, new(*DamageError))) {
		return s, nil, err
	}
	for _, r := range old {
		newer(r)
	}
	if good == 0 && repaired != nil {
		return s, nil, repaired
	}
	if gone == 1 && repaired == nil && len(old) == 0 && good > 0 && s.rec.term > 0 {
		// A crash while they were made leaves this, too, but not with a term.
		repaired = &DamageError{dir, -1, errors.New("one of two copies of term and vote is gone")}
	}
	// A copy may be missing, damaged or behind, or in the kernel's memory only.
	for i := range s.copies {
		if c := &s.copies[i]; c.db == nil {
			if err := c.make(&s.rec); err != nil {
				return s, nil, err
			}
		}
	}
	if err := s.write(); err != nil {
		return s, nil, err
	}
	err = os.Remove(filepath.Join(dir, VoteFileV1))
	if errors.Is(err, os.ErrNotExist) {
		return s, repaired, nil
	}
	return s, repaired, errors.Join(err, durable.SyncDir(dir))
}

// open opens a copy and reads it. It is not used if either of bolt's
// descriptions of the file is damaged: the other one may be of the record
// before.
func (c *stableCopy) open() (r stableRecord, err error) {
	info, err := os.Stat(c.path)
	if err != nil {
		return r, err
	}
	if info.Size() < stableRoom {
		return r, &DamageError{c.path, info.Size(), errors.New("it is cut off")}
	}
	whole, err := boltlog.CheckFile(c.path)
	if err == nil {
		c.db, err = boltlog.OpenStore(c.path, 0)
	}
	var b []byte
	if err == nil {
		err = boltlog.Guard(c.path, func() (err error) {
			b, err = c.db.Get(stableKey)
			return err
		})
	}
	switch {
	case err == nil && !whole:
		err = &DamageError{c.path, 0, errors.New("one of its two descriptions is damaged")}
	case err == nil:
		if r, err = decodeStable(b); err != nil && !errors.Is(err, wire.ErrVersion) {
			err = &DamageError{c.path, 0, err}
		}
	case errors.Is(err, raftboltdb.ErrKeyNotFound):
		err = &DamageError{c.path, 0, errors.New("it holds no record")}
	default:
		err = AsDamage(err)
	}
	if err != nil && c.db != nil {
		_ = boltlog.Guard(c.path, c.db.Close)
		c.db = nil
	}
	return r, err
}

// make creates a copy. It gets its name when it is whole.
func (c *stableCopy) make(r *stableRecord) error {
	temp := c.path + ".tmp"
	if err := os.Remove(temp); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	db, err := boltlog.OpenStore(temp, 0)
	if err != nil {
		return err
	}
	err = errors.Join(db.Set(stableKey, r.encode()), db.Close())
	if err == nil {
		err = pad(temp, stableRoom)
	}
	if err == nil {
		err = durable.Rename(temp, c.path)
	}
	if err == nil {
		c.db, err = boltlog.OpenStore(c.path, 0)
	}
	return err
}

// pad makes a file that long, with blocks of its own all along: bolt leaves
// holes.
func pad(path string, size int) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return WriteSynced(path, append(b, make([]byte, max(0, size-len(b)))...))
}

// readStableV1 reads the copies in a file of version 1; damaged ones are left
// out, and with none that is whole it returns a *DamageError.
func readStableV1(dir string) (rs []stableRecord, err error) {
	path := filepath.Join(dir, VoteFileV1)
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for at := 0; at+stableSlotV1 <= len(b); at += stableSlotV1 {
		r, derr := decodeStable(b[at : at+stableSlotV1])
		if derr != nil {
			err = &DamageError{path, int64(at), derr}
			continue
		}
		rs = append(rs, r)
	}
	if len(rs) > 0 {
		return rs, nil
	}
	if err == nil {
		err = &DamageError{path, int64(len(b)), fmt.Errorf("%w: it is too short", wire.ErrCorrupt)}
	}
	return nil, err
}

// write makes both copies the present record, one after the other. mu is held.
func (s *Stable) write() error {
	b := s.rec.encode()
	for _, c := range s.copies {
		if c.db == nil {
			return fmt.Errorf("%s: %w", c.path, os.ErrClosed)
		}
		if err := boltlog.Guard(c.path, func() error { return c.db.Set(stableKey, b) }); err != nil {
			return fmt.Errorf("%s: %w", c.path, err)
		}
	}
	return nil
}

// KeyTerm is raft's name of the current term.
const KeyTerm = "CurrentTerm"

// Names that raft uses for the last vote.
const (
	keyVoteTerm = "LastVoteTerm"
	keyVoteCand = "LastVoteCand"
)

// update changes the record, on disk first.
func (s *Stable) update(change func(*stableRecord)) error {
	s.mu.Lock()
	old := s.rec
	s.rec.seq++
	change(&s.rec)
	err := s.write()
	if err != nil {
		s.rec = old
	}
	failed := s.Failed
	s.mu.Unlock()
	if err == nil || failed == nil {
		return err
	}
	// What is on disk is not known, and raft has no answer to that but a panic.
	failed(fmt.Errorf("term and vote cannot be written down: %w", err))
	runtime.Goexit()
	return err
}

// Set implements raft.StableStore.
func (s *Stable) Set(key, val []byte) error {
	if string(key) != keyVoteCand || len(val) > stableCand {
		return fmt.Errorf("raft stores %q (%d bytes), which there is no place for", key, len(val))
	}
	return s.update(func(r *stableRecord) {
		r.voteCand = bytes.Clone(val)
		if s.voteTerm != 0 {
			r.voteTerm, s.voteTerm = s.voteTerm, 0
		}
	})
}

// SetUint64 implements raft.StableStore. The term of a vote is kept until its
// candidate is set, as raft always does next: one half is no vote.
func (s *Stable) SetUint64(key []byte, val uint64) error {
	switch string(key) {
	case KeyTerm:
		s.mu.Lock()
		same := s.rec.term == val
		s.mu.Unlock()
		if same {
			return nil // raft sets it at each start, from its caller's goroutine
		}
		return s.update(func(r *stableRecord) { r.term = val })
	case keyVoteTerm:
		s.mu.Lock()
		defer s.mu.Unlock()
		s.voteTerm = val
		return nil
	}
	return fmt.Errorf("raft stores %q, which there is no place for", key)
}

// errNotFound is what raft expects for a value that was never set. It compares
// the text.
var errNotFound = errors.New("not found")

// Get implements raft.StableStore.
func (s *Stable) Get(key []byte) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if string(key) != keyVoteCand || len(s.rec.voteCand) == 0 {
		return nil, errNotFound
	}
	return bytes.Clone(s.rec.voteCand), nil
}

// GetUint64 implements raft.StableStore.
func (s *Stable) GetUint64(key []byte) (n uint64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch string(key) {
	case KeyTerm:
		n = s.rec.term
	case keyVoteTerm:
		if n = s.voteTerm; n == 0 {
			n = s.rec.voteTerm
		}
	}
	if n == 0 {
		return 0, errNotFound
	}
	return n, nil
}

// Close closes the databases.
func (s *Stable) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for i := range s.copies {
		if c := &s.copies[i]; c.db != nil {
			errs = append(errs, boltlog.Guard(c.path, c.db.Close))
			c.db = nil
		}
	}
	return errors.Join(errs...)
}
