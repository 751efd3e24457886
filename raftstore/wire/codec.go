// Package wire is how raftstore's values look as bytes: log entries,
// snapshots, and the frames between members. Every format begins with a
// version, carries a checksum, and is described in ../formats.md. What is
// decoded was written by a disk or a peer, so nothing in it is trusted before
// it is checked.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// Errors of decoding.
var (
	// ErrCorrupt is returned when bytes are not what was written.
	ErrCorrupt = errors.New("corrupt data")
	// ErrVersion is returned when bytes were written by a newer version.
	ErrVersion = errors.New("unknown format version")
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

func appendString[T string | []byte](dst []byte, s T) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(s)))
	return append(dst, s...)
}

// reader takes values off the front of b. The first fault sticks; what is read
// after it is zero.
type reader struct {
	b   []byte
	off int
	err error
}

func (r *reader) fail(what string) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: %s at offset %d", ErrCorrupt, what, r.off)
	}
}

func (r *reader) rest() int { return len(r.b) - r.off }

func (r *reader) byte() byte {
	if r.err != nil || r.rest() < 1 {
		r.fail("short byte")
		return 0
	}
	c := r.b[r.off]
	r.off++
	return c
}

func (r *reader) uint64() uint64 {
	if r.err != nil || r.rest() < 8 {
		r.fail("short number")
		return 0
	}
	n := binary.LittleEndian.Uint64(r.b[r.off:])
	r.off += 8
	return n
}

func (r *reader) uvarint() uint64 {
	if r.err != nil {
		return 0
	}
	n, size := binary.Uvarint(r.b[r.off:])
	if size <= 0 {
		r.fail("bad number")
		return 0
	}
	r.off += size
	return n
}

// int is a uvarint that fits an int64.
func (r *reader) int() int64 {
	n := r.uvarint()
	if n > 1<<63-1 {
		r.fail("number out of range")
		return 0
	}
	return int64(n)
}

// count is a number of things that take at least size bytes each.
func (r *reader) count(size int) int {
	n := r.uvarint()
	if r.err == nil && n > uint64(r.rest()/size) {
		r.fail("count larger than what follows")
		return 0
	}
	return int(n)
}

// bytes aliases the input.
func (r *reader) bytes() []byte {
	n := r.count(1)
	if r.err != nil {
		return nil
	}
	s := r.b[r.off : r.off+n : r.off+n]
	r.off += n
	return s
}

func (r *reader) string() string { return string(r.bytes()) }

// done reports the first fault, or that something was left over.
func (r *reader) done() error {
	if r.err == nil && r.rest() > 0 {
		r.fail("trailing bytes")
	}
	return r.err
}

func update(sum uint32, b []byte) uint32 { return crc32.Update(sum, castagnoli, b) }

// Update adds b to a checksum; that of nothing is 0.
func Update(sum uint32, b []byte) uint32 { return update(sum, b) }
