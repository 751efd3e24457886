package seglog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/hashicorp/raft"
	"golang.org/x/sys/unix"
)

// segment is one file of the log.
//
//	0                 end              room
//	│ header │ entries │ mark │ leftovers │
//
// Up to end is synced. Beyond it lies nothing of value: a mark, zeros, or what
// the file held in an earlier life, told apart by the salt of its records.
type segment struct {
	f      *os.File
	first  uint64 // index of its first entry
	salt   uint32
	end    int64
	room   int64   // length of the file: writing inside it changes no metadata
	step   int64   // in which room is made
	starts []int64 // offset of each entry
	marked bool    // a mark stands at end
	torn   bool    // an append failed: its bytes may lie behind end
}

func (s *segment) path() string { return s.f.Name() }
func (s *segment) close() error { return s.f.Close() }
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
		err = fdatasync(s.f)
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
	if err := s.f.Sync(); err != nil {
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
	s.starts = s.starts[:index-s.first]
	if err := s.truncate(); err != nil {
		s.torn = true
		return err
	}
	return nil
}

// mark writes a record without an entry at end.
func (s *segment) mark() error {
	if s.marked || s.torn || len(s.starts) == 0 {
		return nil
	}
	if err := s.reserve(s.end + recordHeader); err != nil {
		return err
	}
	if _, err := s.f.WriteAt(appendMark(nil, s.salt, s.end, s.next()), s.end); err != nil {
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
	rec, reason := parseRecord(b, s.salt)
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
func openSegment(path string, newest bool, buf *[]byte, opts *Options) (_ *segment, err error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	s := &segment{f: f, step: opts.step()}
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	data, err := readAll(f, buf)
	if err != nil {
		return nil, fmt.Errorf("read log segment %s: %w", path, err)
	}
	s.room = int64(len(data))
	if s.first, s.salt, err = parseHeader(data); err != nil {
		return nil, s.corrupt(0, 0, err.Error())
	}
	var reason string
	var term uint64
	s.end = segmentHeader
	for {
		var rec record
		if rec, reason = parseRecord(data[s.end:], s.salt); reason != "" {
			break
		}
		if rec.kind == kindMark {
			s.marked = rec.index == s.next()
			break
		}
		if rec.index != s.next() || rec.term < term {
			reason = fmt.Sprintf("holds entry %d of term %d", rec.index, rec.term)
			break
		}
		term = rec.term
		s.starts = append(s.starts, s.end)
		s.end += rec.size
	}
	if !s.marked {
		if syncedBeyond(data, s.salt, s.end, s.next()) {
			return nil, s.corrupt(s.end, s.next(), reason)
		}
		if newest && belongs(data[s.end:], s.salt) {
			opts.Logger.Warn("cut off an append that was not finished", "file", path, "offset", s.end, "entry", s.next(), "found", reason)
			err = s.truncate()
		}
	}
	return s, err
}

// readAll reads a file in one go into buf, grown if need be.
func readAll(f *os.File, buf *[]byte) ([]byte, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if int64(cap(*buf)) < info.Size() {
		*buf = make([]byte, info.Size())
	}
	b := (*buf)[:info.Size()]
	_, err = io.ReadFull(f, b)
	return b, err
}

// belongs reports whether there is a trace of this life of the file in rest.
func belongs(rest []byte, salt uint32) bool {
	for at := 0; at+4 <= len(rest); at += align {
		if binary.LittleEndian.Uint32(rest[at:]) == salt {
			return true
		}
	}
	return false
}

// syncedBeyond reports whether a whole record behind offset end proves that
// something at end had been synced: an append begins only when all before it
// is on disk, and each record names the offset at which its append began.
func syncedBeyond(data []byte, salt uint32, end int64, next uint64) bool {
	for at := end + align; at+recordHeader <= int64(len(data)); at += align {
		if binary.LittleEndian.Uint32(data[at:]) != salt {
			continue
		}
		if rec, reason := parseRecord(data[at:], salt); reason == "" && rec.synced > end && rec.index >= next {
			return true
		}
	}
	return false
}
