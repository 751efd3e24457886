// Package settle decides when a member begins to use a format that versions
// before its own cannot read. A store that this version founds uses it at once.
// One that was upgraded goes on in the old format until all members have known
// the new one for a while, so that until then the version before can come back.
// It knows no Store: what others say and what time it is are handed in.
package settle

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/raftstore/wire"
)

// Formats of the store. Numbers are part of the protocol between members, and
// are in data directories.
const (
	// Plain: snapshots are as they are sent; each key takes a transaction to be
	// deleted.
	Plain = 1
	// Packed: snapshots are compressed on disk, and one command deletes many keys.
	Packed = 2
	// Patched: values are put into the log as patches of those before them.
	Patched = 3
	// Newest is the highest one that this version knows.
	Newest = Patched
)

// File is the record in the data directory. Versions before this package leave it
// alone.
const File = "format.json"

const fileVersion = 1

type record struct {
	Version int `json:"version"`
	Format  int `json:"format"` // in use; 0: not decided, others are to be asked
	// KnownMillis is for how long all members have known the newest format.
	KnownMillis int64 `json:"knownMillis,omitempty"`
	// LastIndex is where the log ended when this was written. If it ends elsewhere
	// when the store is opened, another version may have run meanwhile.
	LastIndex uint64 `json:"lastIndex,omitempty"`
}

// Other is another member, and what it said.
type Other struct {
	ID       string
	Answered bool
	// Knows is the highest format that it can read, 0 if it does not know the
	// question; Uses the one that it writes, 0 if it has not decided.
	Knows, Uses int
}

// Settling is one member's format. Its methods may be called concurrently.
type Settling struct {
	path   string
	after  time.Duration
	newest int

	mu     sync.Mutex
	rec    record
	noted  int64 // rec.KnownMillis as it is on disk
	asked  bool  // there was a Look
	looked int64 // store time of the last one; 0: none, or the count stood still
	older  []string
	silent []string
}

// Open reads the record of a data directory that has state, or has not. lastIndex
// is where its log ends, after is for how long all members have to know a format
// before it is used, newest is the highest one that this member knows.
func Open(dir string, had bool, lastIndex uint64, after time.Duration, newest int) (*Settling, error) {
	s := &Settling{path: filepath.Join(dir, File), after: after, newest: newest}
	b, err := os.ReadFile(s.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	default:
		if err := json.Unmarshal(b, &s.rec); err != nil {
			s.rec = record{} // what is lost is a count
		}
	}
	if s.rec.Version > fileVersion || s.rec.Format > newest {
		return nil, fmt.Errorf("%w: %s tells of format %d, and %d is the newest that this version knows", wire.ErrVersion, s.path, s.rec.Format, newest)
	}
	if had {
		s.rec.Format = max(s.rec.Format, Plain)
	}
	if s.rec.LastIndex != lastIndex {
		s.rec.KnownMillis = 0
	}
	s.noted = s.rec.KnownMillis
	return s, nil
}

// Uses is the format in use; 0: it is not decided, and nothing but Plain is
// written.
func (s *Settling) Uses() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec.Format
}

// Newest is the highest format that this member knows.
func (s *Settling) Newest() int { return s.newest }

// Found notes that the store was founded here, by this version.
func (s *Settling) Found() error { return s.use(s.newest) }

func (s *Settling) use(format int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.write(record{Format: format})
}

// noteEach is how much of the count may be lost in a crash.
const noteEach = time.Minute

// maxStep bounds what one Look adds to the count, whatever clocks did.
const maxStep = 2 * time.Minute

// Look takes what all other members have said at a store time (milliseconds),
// and reports whether the format in use has changed. A member that does not
// know the newest format restarts the count; while one does not answer it
// stands still. Where another one uses a higher format already that all know, this one does
// too: there is no way back for the cluster. An error is that of the disk;
// the format stays as it was.
func (s *Settling) Look(others []Other, now int64, lastIndex uint64) (changed bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	was, next := s.rec.Format, s.rec
	s.asked, s.older, s.silent = true, nil, nil
	used, known := Plain, s.newest // the highest that another one uses; that all know
	for _, o := range others {
		if !o.Answered {
			s.silent = append(s.silent, o.ID)
			continue
		}
		used, known = max(used, o.Uses), min(known, o.Knows)
		if o.Knows < s.newest {
			s.older = append(s.older, o.ID)
		}
	}
	along := min(used, known)
	if len(s.silent) > 0 {
		along = 0
	}
	step := min(now-s.looked, maxStep.Milliseconds())
	if s.looked == 0 || step < 0 {
		step = 0
	}
	s.looked = now
	switch {
	case len(s.older) > 0:
		s.looked, next.KnownMillis, next.Format = 0, 0, max(was, along, Plain)
	case len(s.silent) > 0:
		s.looked = 0
	case along >= s.newest || next.KnownMillis+step >= s.after.Milliseconds() && was != 0:
		next.Format, next.KnownMillis = s.newest, 0
	default:
		next.Format = max(was, along)
		next.KnownMillis += step
	}
	next.LastIndex = lastIndex
	if next == s.rec || was >= s.newest {
		return false, nil
	}
	// The log's end alone, and a step of the count, are not worth a write.
	if grown := next.KnownMillis - s.noted; was != 0 && next.Format == was && grown >= 0 && grown < noteEach.Milliseconds() {
		s.rec.KnownMillis = next.KnownMillis
		return false, nil
	}
	if err := s.write(next); err != nil {
		return false, err
	}
	return s.rec.Format != was, nil
}

// Close notes where the log ends, so that the count goes on at the next start.
func (s *Settling) Close(lastIndex uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rec.Format == 0 || s.rec.Format >= s.newest {
		return nil
	}
	next := s.rec
	next.LastIndex = lastIndex
	return s.write(next)
}

func (s *Settling) write(r record) error {
	r.Version = fileVersion
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := durable.ReplaceFile(s.path, append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("note the store's format: %w", err)
	}
	s.rec, s.noted = r, r.KnownMillis
	return nil
}

// Status is a member's format, for people.
type Status struct {
	InUse  int    `json:"inUse"`
	Newest int    `json:"newest"`         // that this member knows
	Note   string `json:"note,omitempty"` // when the newest one will be used
}

// Status says how it stands.
func (s *Settling) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Status{InUse: max(s.rec.Format, Plain), Newest: s.newest}
	left := max(0, s.after-time.Duration(s.rec.KnownMillis)*time.Millisecond).Round(time.Second)
	switch {
	case st.InUse >= s.newest:
	case len(s.older) > 0:
		st.Note = fmt.Sprintf("format %d waits for members that do not know it: %v", s.newest, s.older)
	case len(s.silent) > 0:
		st.Note = fmt.Sprintf("format %d waits for members that do not answer: %v; then %v to go", s.newest, s.silent, left)
	case !s.asked:
		st.Note = fmt.Sprintf("format %d: the other members have not been asked yet", s.newest)
	default:
		st.Note = fmt.Sprintf("all members know format %d: it is used in %v", s.newest, left)
	}
	return st
}
