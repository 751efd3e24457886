package seglog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"path/filepath"

	"github.com/hashicorp/raft"
	"golang.org/x/sys/unix"
)

// segment is one file of the log.
//
//	0                 end              room
//	│ header │ entries │ mark │ leftovers │
//
// Up to end is synced. Beyond it lies nothing of value: a mark, zeros, or what
// the file held in an earlier life, distinguished by the salt of its records.
//
// Each record holds the checksum of the one before it: what an append that was
// torn left behind cannot become the continuation of another one.
type segment struct {
	f      file
	dir    string // for messages
	name   string
	first  uint64 // index of its first entry
	life   life
	origin uint32 // the header's checksum
	end    int64
	room   int64    // length of the file: writing inside it changes no metadata
	step   int64    // in which room is made
	starts []int64  // offset of each entry
	sums   []uint32 // its checksum
	marked bool     // a mark stands at end
	torn   bool     // an append failed: its bytes may lie behind end
}

func (s *segment) path() string { return filepath.Join(s.dir, s.name) }
func (s *segment) close() error { return s.f.Close() }

// current reports whether the segment is of the version that is written now.
// An older one is only read.
func (s *segment) current() bool { return s.life.version == segmentVersion }

// link is what the next record holds of the one before it.
func (s *segment) link() uint32 {
	if n := len(s.sums); n > 0 {
		return s.sums[n-1]
	}
	return s.origin
}
func (s *segment) next() uint64 { return s.first + uint64(len(s.starts)) }

// maxStep bounds the steps in which a file's room is made, by writing zeros: to
// sync what overwrites allocated blocks takes half as long as to sync what
// allocates them.
const maxStep = 1 << 20

// append writes records at end and syncs them. The caller moves end.
func (s *segment) append(records []byte) error {
	if s.torn {
		if err := s.truncate(); err != nil {
			return err
		}
	}
	s.marked = false
	err := s.reserve(s.end + int64(len(records)))
	if err == nil {
		_, err = s.f.WriteAt(records, s.end)
	}
	if err == nil {
		err = s.f.datasync()
	}
	if err != nil {
		// Some of it may be on disk, and must not be found there later. The
		// disk may be too full or too broken to see to that now.
		s.torn = true
	}
	return err
}

// reserve makes room up to offset n at least. Zeros are written a page at a
// time: the kernel keeps what is written at once together in its cache, and
// counts all of that as written whenever a part of it is.
func (s *segment) reserve(n int64) error {
	if n <= s.room {
		return nil
	}
	to := (n + s.step - 1) / s.step * s.step
	// What an append larger than the step fills itself needs no zeros first.
	for at := max(s.room, to-s.step); at < to; {
		m, err := s.f.WriteAt(zeros[:min(int64(len(zeros)), to-at)], at)
		if err != nil {
			s.torn = true // truncated before the next append: frees what was taken
			return err
		}
		at += int64(m)
	}
	s.room = to
	return nil
}

var zeros [4096]byte

// truncate ends the file at end, durably.
func (s *segment) truncate() error {
	if err := s.f.Truncate(s.end); err != nil {
		return err
	}
	if err := s.f.sync(); err != nil {
		return err
	}
	s.room, s.torn, s.marked = s.end, false, false
	return nil
}

// cut removes entry index and what follows it. The Log's mu is held.
func (s *segment) cut(index uint64) error {
	if index >= s.next() {
		return nil
	}
	s.end = s.starts[index-s.first]
	s.starts, s.sums = s.starts[:index-s.first], s.sums[:index-s.first]
	if err := s.truncate(); err != nil {
		s.torn = true
		return err
	}
	return nil
}

// mark writes a record without an entry at end.
func (s *segment) mark() error {
	if s.marked || s.torn || len(s.starts) == 0 || !s.current() {
		return nil
	}
	if err := s.reserve(s.end + recordHeader); err != nil {
		return err
	}
	if _, err := s.f.WriteAt(appendMark(nil, s.life.salt, s.link(), s.end, s.next()), s.end); err != nil {
		return err
	}
	s.marked = true
	return nil
}

// read reads entry index. The Log's mu is held for reading.
func (s *segment) read(index uint64, out *raft.Log) error {
	i := int(index - s.first)
	from, to := s.starts[i], s.end
	if i+1 < len(s.starts) {
		to = s.starts[i+1]
	}
	b := make([]byte, to-from)
	if _, err := s.f.ReadAt(b, from); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, unix.EIO) {
			return s.corrupt(from, index, "cannot be read: "+err.Error())
		}
		return fmt.Errorf("read entry %d at offset %d of %s: %w", index, from, s.path(), err)
	}
	rec, reason := parseRecord(b, s.life)
	switch {
	case reason != "":
	case rec.kind != kindEntry || rec.index != index || rec.size != int64(len(b)):
		reason = fmt.Sprintf("holds entry %d", rec.index)
	default:
		rec.into(out)
		return nil
	}
	return s.corrupt(from, index, reason)
}

func (s *segment) corrupt(at int64, index uint64, reason string) error {
	return &CorruptError{File: s.path(), Offset: at, Index: index, Reason: reason}
}

// openSegment opens a file and checks all of its entries. newest: it is the
// last one, whose last append may be unfinished. buf is used to read it and is
// grown if need be.
//
// What the newest one holds may not be on disk: the process that wrote it may
// have ended before its sync, or the sync failed. It is synced first, and then
// read from the disk: raft counts what it finds here.
func (l *Log) openSegment(name string, newest bool, buf *[]byte) (_ *segment, err error) {
	f, err := l.files.open(name)
	if err != nil {
		return nil, err
	}
	s := &segment{f: f, dir: l.dir, name: name, step: l.opts.step()}
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	if newest {
		if err := f.datasync(); err != nil {
			return nil, fmt.Errorf("sync log segment %s: %w", s.path(), err)
		}
		f.forget()
	}
	data, err := readAll(f, buf)
	if err != nil {
		return nil, fmt.Errorf("read log segment %s: %w", s.path(), err)
	}
	s.room = int64(len(data))
	if s.first, s.life, err = parseHeader(data); err != nil {
		return nil, s.corrupt(0, 0, err.Error())
	}
	reason := s.scan(data)
	if !s.marked && syncedBeyond(data, s.life, s.end, s.next()) {
		return nil, s.corrupt(s.end, s.next(), reason)
	}
	rest := s.end
	if s.marked {
		rest += s.life.header()
	}
	// Behind a mark, too: the append that was to take its place may have been
	// torn so that the mark is still there.
	if newest && belongs(data[rest:], s.life) {
		l.opts.Logger.Warn("cut off an append that was not finished", "file", s.path(), "offset", s.end, "entry", s.next(), "found", reason)
		err = s.truncate()
	}
	return s, err
}

// scan takes the entries from what the file holds, up to the first record that
// does not follow the one before it. It returns what that one is.
func (s *segment) scan(data []byte) (reason string) {
	var term uint64
	s.end, s.origin = segmentHeader, headerSum(data)
	for {
		rec, reason := parseRecord(data[s.end:], s.life)
		switch {
		case reason != "":
			return reason
		case s.life.version > 1 && rec.prev != s.link():
			return fmt.Sprintf("follows a record with the checksum %08x, the one before it has %08x", rec.prev, s.link())
		case rec.kind == kindMark:
			s.marked = rec.index == s.next()
			return "a mark"
		case rec.index != s.next() || rec.term < term:
			return fmt.Sprintf("holds entry %d of term %d", rec.index, rec.term)
		}
		term = rec.term
		s.starts, s.sums = append(s.starts, s.end), append(s.sums, rec.sum)
		s.end += rec.size
	}
}

// readAll reads a file in one go into buf, grown if need be.
func readAll(f file, buf *[]byte) ([]byte, error) {
	size, err := f.size()
	if err != nil {
		return nil, err
	}
	if int64(cap(*buf)) < size {
		*buf = make([]byte, size)
	}
	b := (*buf)[:size]
	if n, err := f.ReadAt(b, 0); err != nil && !(errors.Is(err, io.EOF) && n == len(b)) {
		return nil, err
	}
	return b, nil
}

// belongs reports whether there is a trace of this life of the file in rest.
func belongs(rest []byte, of life) bool {
	for at := 0; at+4 <= len(rest); at += align {
		if binary.LittleEndian.Uint32(rest[at:]) == of.salt {
			return true
		}
	}
	return false
}

// syncedBeyond reports whether a whole record behind offset end proves that
// something at end had been synced: an append begins only when all before it
// is on disk, and each record names the offset at which its append began.
func syncedBeyond(data []byte, of life, end int64, next uint64) bool {
	for at := end + align; at+of.header() <= int64(len(data)); at += align {
		if binary.LittleEndian.Uint32(data[at:]) != of.salt {
			continue
		}
		if rec, reason := parseRecord(data[at:], of); reason == "" && rec.synced > end && rec.index >= next {
			return true
		}
	}
	return false
}
