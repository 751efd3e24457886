package raftstore

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/hashicorp/raft"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/raftstore/wire"
)

// stable keeps raft's term and vote in one small file: twice the same record,
// each with a checksum and synced on its own. A write that a crash tore leaves
// the other copy, as it was before (raft had no answer yet) or already new; a
// damaged copy is made good from the other one. The file is never longer than
// it was made, so a full disk does not stop an election.
type stable struct {
	mu  sync.Mutex
	f   *os.File
	rec stableRecord
}

var _ raft.StableStore = (*stable)(nil)

// stableRecord is all that raft ever stores.
type stableRecord struct {
	seq      uint64 // counts writes
	term     uint64 // raft's CurrentTerm
	voteTerm uint64 // LastVoteTerm
	voteCand []byte // LastVoteCand
}

const (
	stableFile    = "vote" // in the data folder
	stableMagic   = "CLDRVOTE"
	stableVersion = 1
	stableSlot    = 4096 // bytes of one copy
	stableCopies  = 2
	// stableHead is magic (8), version (4), checksum of the rest of the slot (4).
	stableHead = 16
	// stableCand is how long a candidate's ID may be.
	stableCand = 1024
)

func (r *stableRecord) encode() []byte {
	b := make([]byte, 0, stableSlot)
	b = append(b, stableMagic...)
	b = binary.LittleEndian.AppendUint32(b, stableVersion)
	b = append(b, 0, 0, 0, 0)
	b = binary.LittleEndian.AppendUint64(b, r.seq)
	b = binary.LittleEndian.AppendUint64(b, r.term)
	b = binary.LittleEndian.AppendUint64(b, r.voteTerm)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(r.voteCand)))
	b = append(b, r.voteCand...)
	b = b[:stableSlot]
	binary.LittleEndian.PutUint32(b[12:], checksum(b[stableHead:]))
	return b
}

func decodeStable(b []byte) (r stableRecord, err error) {
	if len(b) != stableSlot || string(b[:8]) != stableMagic {
		return r, fmt.Errorf("%w: not a record of term and vote", wire.ErrCorrupt)
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != stableVersion {
		return r, fmt.Errorf("%w: record of term and vote %d", wire.ErrVersion, v)
	}
	if got, want := checksum(b[stableHead:]), binary.LittleEndian.Uint32(b[12:]); got != want {
		return r, fmt.Errorf("%w: the checksum is %08x, stored was %08x", wire.ErrCorrupt, got, want)
	}
	r.seq = binary.LittleEndian.Uint64(b[16:])
	r.term = binary.LittleEndian.Uint64(b[24:])
	r.voteTerm = binary.LittleEndian.Uint64(b[32:])
	n := binary.LittleEndian.Uint32(b[40:])
	if n > stableCand {
		return r, fmt.Errorf("%w: an ID of %d bytes", wire.ErrCorrupt, n)
	}
	r.voteCand = bytes.Clone(b[44 : 44+n])
	return r, nil
}

// openStable opens the file, made if need be. With both copies damaged it
// returns a *DamageError. repaired, if not nil, is what was wrong with one.
func openStable(dir string) (s *stable, repaired, err error) {
	path := filepath.Join(dir, stableFile)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		empty := (&stableRecord{}).encode()
		if err = replaceFile(path, append(empty, empty...)); err == nil {
			f, err = os.OpenFile(path, os.O_RDWR, 0)
		}
	}
	if err != nil {
		return nil, nil, err
	}
	s = &stable{f: f}
	if err = lockFile(f); err == nil {
		repaired, err = s.load()
	}
	if err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	return s, repaired, nil
}

// lockFile makes this process the only one that has the data folder open. One
// that is just ending gets a second to do so.
func lockFile(f *os.File) error {
	for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EWOULDBLOCK):
			return fmt.Errorf("lock %s: %w", f.Name(), err)
		case time.Since(began) > time.Second:
			return fmt.Errorf("%s is locked: another process has this store open", f.Name())
		}
	}
}

func (s *stable) load() (repaired, err error) {
	buf := make([]byte, stableSlot)
	good := 0
	for i := range int64(stableCopies) {
		_, err := s.f.ReadAt(buf, i*stableSlot)
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		r, err := decodeStable(buf)
		if err != nil {
			repaired = &DamageError{s.f.Name(), i * stableSlot, err}
			continue
		}
		if good++; r.seq >= s.rec.seq {
			s.rec = r
		}
	}
	switch good {
	case 0:
		return nil, repaired
	case stableCopies:
		repaired = nil
	}
	// A copy may be damaged or behind.
	return repaired, s.write()
}

// write makes both copies the present record, one after the other. mu is held.
func (s *stable) write() error {
	b := s.rec.encode()
	for i := range int64(stableCopies) {
		if _, err := s.f.WriteAt(b, i*stableSlot); err != nil {
			return err
		}
		if err := s.f.Sync(); err != nil {
			return err
		}
	}
	return nil
}

// Names that raft uses.
const (
	keyTerm     = "CurrentTerm"
	keyVoteTerm = "LastVoteTerm"
	keyVoteCand = "LastVoteCand"
)

// update changes the record, on disk first.
func (s *stable) update(change func(*stableRecord)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.rec
	s.rec.seq++
	change(&s.rec)
	if err := s.write(); err != nil {
		s.rec = old
		return err
	}
	return nil
}

// Set implements raft.StableStore.
func (s *stable) Set(key, val []byte) error {
	if string(key) != keyVoteCand || len(val) > stableCand {
		return fmt.Errorf("raft stores %q (%d bytes), which there is no place for", key, len(val))
	}
	return s.update(func(r *stableRecord) { r.voteCand = bytes.Clone(val) })
}

// SetUint64 implements raft.StableStore.
func (s *stable) SetUint64(key []byte, val uint64) error {
	switch string(key) {
	case keyTerm:
		s.mu.Lock()
		same := s.rec.term == val && val != 0
		s.mu.Unlock()
		if same {
			return nil // raft sets it anew at each start
		}
		return s.update(func(r *stableRecord) { r.term = val })
	case keyVoteTerm:
		return s.update(func(r *stableRecord) { r.voteTerm = val })
	}
	return fmt.Errorf("raft stores %q, which there is no place for", key)
}

// errNotFound is what raft expects for a value that was never set. It compares
// the text.
var errNotFound = errors.New("not found")

// Get implements raft.StableStore.
func (s *stable) Get(key []byte) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if string(key) != keyVoteCand || len(s.rec.voteCand) == 0 {
		return nil, errNotFound
	}
	return bytes.Clone(s.rec.voteCand), nil
}

// GetUint64 implements raft.StableStore.
func (s *stable) GetUint64(key []byte) (n uint64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch string(key) {
	case keyTerm:
		n = s.rec.term
	case keyVoteTerm:
		n = s.rec.voteTerm
	}
	if n == 0 {
		return 0, errNotFound
	}
	return n, nil
}

func (s *stable) Close() error { return s.f.Close() }
