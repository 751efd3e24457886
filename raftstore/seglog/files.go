package seglog

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sort"
)

// Files of a log directory. Segments are named by their first entry, in
// hexadecimal, so that their names sort as they do.
const (
	segmentName = "%016x.seg"
	spareName   = "%d.spare"
)

// inventory returns the names of the segments in order, and notes the spares.
func (l *Log) inventory() (names []string, err error) {
	all, err := l.files.list()
	if err != nil {
		return nil, err
	}
	for _, name := range all {
		var first uint64
		var n int
		switch {
		case matches(name, segmentName, &first):
			names = append(names, name)
		case matches(name, spareName, &n):
			l.spares = append(l.spares, name)
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
	header := appendHeader(nil, first, binary.LittleEndian.Uint32(salt[:]))
	s := &segment{dir: l.dir, first: first, origin: headerSum(header), end: segmentHeader, step: l.opts.step()}
	if _, s.life, err = parseHeader(header); err != nil {
		return nil, err
	}
	if s.f, s.name, err = l.takeSpare(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.f.Close(), l.files.remove(s.name))
		}
	}()
	if s.room, err = s.f.size(); err != nil {
		return nil, err
	}
	if _, err := s.f.WriteAt(header, 0); err != nil {
		return nil, err
	}
	s.room = max(s.room, segmentHeader)
	if err := s.f.sync(); err != nil {
		return nil, err
	}
	name := fmt.Sprintf(segmentName, first)
	if err := l.files.rename(s.name, name); err != nil {
		return nil, err
	}
	s.name = name
	return s, l.files.sync()
}

// takeSpare opens a spare file, or makes one.
func (l *Log) takeSpare() (f file, name string, err error) {
	if n := len(l.spares); n > 0 {
		name = l.spares[n-1]
		l.spares = l.spares[:n-1]
		f, err = l.files.open(name)
		return f, name, err
	}
	name = fmt.Sprintf(spareName, l.made)
	l.made++
	f, err = l.files.create(name)
	return f, name, err
}

// discard closes a segment and makes it a spare, or removes it. The directory is
// synced by the caller.
func (l *Log) discard(s *segment) error {
	if len(l.spares) >= l.opts.MaxSpares || s.room > 2*l.opts.SegmentBytes {
		return errors.Join(l.files.remove(s.name), s.close())
	}
	name := fmt.Sprintf(spareName, l.made)
	if err := l.files.rename(s.name, name); err != nil {
		return err
	}
	l.made++
	l.spares = append(l.spares, name)
	return s.close()
}
