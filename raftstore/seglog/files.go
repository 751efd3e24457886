package seglog

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"

	"golang.org/x/sys/unix"
)

// Files of a log folder. Segments are named by their first entry, in
// hexadecimal, so that their names sort as they do.
const (
	segmentName = "%016x.seg"
	spareName   = "%d.spare"
)

func (l *Log) file(name string) string { return filepath.Join(l.dir, name) }

// inventory returns the names of the segments in order, and notes the spares.
func (l *Log) inventory() (names []string, err error) {
	dir, err := os.ReadDir(l.dir)
	if err != nil {
		return nil, err
	}
	for _, e := range dir {
		var first uint64
		var n int
		switch {
		case matches(e.Name(), segmentName, &first):
			names = append(names, e.Name())
		case matches(e.Name(), spareName, &n):
			l.spares = append(l.spares, e.Name())
			l.made = max(l.made, n+1)
		}
	}
	sort.Strings(names)
	return names, nil
}

// matches reports whether name is exactly what format makes of a number, and
// which.
func matches[T uint64 | int](name, format string, n *T) bool {
	if _, err := fmt.Sscanf(name, format, n); err != nil {
		return false
	}
	return name == fmt.Sprintf(format, *n)
}

// begin makes the segment file that starts with entry first, out of a spare one
// if there is any. It gets its name last, when its header is on disk: a file
// with the name of a segment is one.
func (l *Log) begin(first uint64) (_ *segment, err error) {
	var salt [4]byte
	if _, err := rand.Read(salt[:]); err != nil {
		return nil, err
	}
	s := &segment{first: first, salt: binary.LittleEndian.Uint32(salt[:]), end: segmentHeader, step: l.opts.step()}
	if s.f, err = l.takeSpare(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.f.Close(), os.Remove(s.f.Name()))
		}
	}()
	info, err := s.f.Stat()
	if err != nil {
		return nil, err
	}
	s.room = info.Size()
	if _, err := s.f.WriteAt(appendHeader(nil, first, s.salt), 0); err != nil {
		return nil, err
	}
	s.room = max(s.room, segmentHeader)
	if err := s.f.Sync(); err != nil {
		return nil, err
	}
	if err := s.rename(l.file(fmt.Sprintf(segmentName, first))); err != nil {
		return nil, err
	}
	return s, syncDir(l.dir)
}

// rename gives the file another name; the file is opened anew so that it knows
// it.
func (s *segment) rename(path string) error {
	if err := os.Rename(s.f.Name(), path); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	err = s.f.Close()
	s.f = f
	return err
}

// takeSpare opens a spare file, or makes one.
func (l *Log) takeSpare() (*os.File, error) {
	if n := len(l.spares); n > 0 {
		name := l.spares[n-1]
		l.spares = l.spares[:n-1]
		return os.OpenFile(l.file(name), os.O_RDWR, 0)
	}
	l.made++
	return os.OpenFile(l.file(fmt.Sprintf(spareName, l.made-1)), os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
}

// discard closes a segment and makes it a spare, or removes it. The folder is
// synced by the caller.
func (l *Log) discard(s *segment) error {
	if len(l.spares) >= l.opts.MaxSpares || s.room > 2*l.opts.SegmentBytes {
		return errors.Join(os.Remove(s.path()), s.close())
	}
	name := fmt.Sprintf(spareName, l.made)
	if err := os.Rename(s.path(), l.file(name)); err != nil {
		return err
	}
	l.made++
	l.spares = append(l.spares, name)
	return s.close()
}

func fdatasync(f *os.File) error {
	for {
		if err := unix.Fdatasync(int(f.Fd())); err != unix.EINTR {
			return err
		}
	}
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
