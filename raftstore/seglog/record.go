package seglog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"time"

	"github.com/hashicorp/raft"
)

// The bytes of a segment file are described in ../formats.md.
const (
	segmentMagic   = "CLDRLOG\n"
	segmentVersion = 2
	segmentHeader  = 32

	recordHeader   = 56
	recordHeaderV1 = 48 // without the link to the record before
	align          = 8  // of a record's offset and length

	kindEntry = 1
	kindMark  = 2

	// maxBody is more than any entry can be; a longer one is damage.
	maxBody = 1 << 30
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// record is one parsed record. Its slices alias what was parsed.
type record struct {
	kind       byte
	logType    raft.LogType
	synced     int64 // where the append began: all before it had been synced
	index      uint64
	term       uint64
	appendedAt int64  // unix nanoseconds; 0: unknown
	prev       uint32 // checksum of the record before; of the first one: of the segment's header
	sum        uint32 // its own
	extensions []byte
	data       []byte
	size       int64
}

// life tells the records of one life of a segment file from all others.
type life struct {
	salt    uint32
	version uint32
}

func (v life) header() int64 {
	if v.version == 1 {
		return recordHeaderV1
	}
	return recordHeader
}

func recordSize(e *raft.Log) int64 {
	return padded(recordHeader + int64(len(e.Data)) + int64(len(e.Extensions)))
}

func padded(n int64) int64 { return (n + align - 1) &^ (align - 1) }

// appendRecord appends the record of e to dst, behind one with the checksum
// prev. It returns its own.
func appendRecord(dst []byte, salt, prev uint32, synced int64, e *raft.Log) ([]byte, uint32) {
	var at int64
	if !e.AppendedAt.IsZero() {
		at = e.AppendedAt.UnixNano()
	}
	return appendRaw(dst, salt, &record{
		kind: kindEntry, logType: e.Type, synced: synced, index: e.Index, term: e.Term, appendedAt: at, prev: prev,
		extensions: e.Extensions, data: e.Data,
	})
}

// appendMark appends a record that holds no entry; next is the index of the one
// that would follow.
func appendMark(dst []byte, salt, prev uint32, synced int64, next uint64) []byte {
	dst, _ = appendRaw(dst, salt, &record{kind: kindMark, synced: synced, index: next, prev: prev})
	return dst
}

func appendRaw(dst []byte, salt uint32, r *record) ([]byte, uint32) {
	start := len(dst)
	le := binary.LittleEndian
	dst = le.AppendUint32(dst, salt)
	dst = le.AppendUint32(dst, uint32(len(r.extensions)+len(r.data)))
	dst = le.AppendUint32(dst, 0) // the checksum
	dst = le.AppendUint32(dst, uint32(len(r.extensions)))
	dst = le.AppendUint64(dst, uint64(r.synced)<<16|uint64(r.logType)<<8|uint64(r.kind))
	dst = le.AppendUint64(dst, r.index)
	dst = le.AppendUint64(dst, r.term)
	dst = le.AppendUint64(dst, uint64(r.appendedAt))
	dst = le.AppendUint32(dst, r.prev)
	dst = le.AppendUint32(dst, 0)
	dst = append(dst, r.extensions...)
	dst = append(dst, r.data...)
	for (len(dst)-start)%align != 0 {
		dst = append(dst, 0)
	}
	sum := recordSum(dst[start:])
	le.PutUint32(dst[start+8:], sum)
	return dst, sum
}

// recordSum covers a whole record but the sum itself.
func recordSum(b []byte) uint32 {
	return crc32.Update(crc32.Checksum(b[:8], castagnoli), castagnoli, b[12:])
}

// parseRecord parses the record at the beginning of b. reason is why there is
// none. Whether it follows the record before it is for the caller to see.
func parseRecord(b []byte, of life) (r record, reason string) {
	le := binary.LittleEndian
	head := of.header()
	if int64(len(b)) < head {
		return r, "the file ends"
	}
	if got := le.Uint32(b); got != of.salt {
		return r, fmt.Sprintf("begins with %08x, records of this file with %08x", got, of.salt)
	}
	body, ext := int64(le.Uint32(b[4:])), int64(le.Uint32(b[12:]))
	r.size = padded(head + body)
	if body > maxBody || r.size > int64(len(b)) || ext > body {
		return r, fmt.Sprintf("is said to be %d bytes long", body)
	}
	b = b[:r.size]
	r.sum = le.Uint32(b[8:])
	if got := recordSum(b); got != r.sum {
		return r, fmt.Sprintf("its checksum is %08x, stored was %08x", got, r.sum)
	}
	word := le.Uint64(b[16:])
	r.synced, r.logType, r.kind = int64(word>>16), raft.LogType(word>>8), byte(word)
	if r.kind != kindEntry && r.kind != kindMark {
		return r, fmt.Sprintf("is of the unknown kind %d", r.kind)
	}
	r.index, r.term, r.appendedAt = le.Uint64(b[24:]), le.Uint64(b[32:]), int64(le.Uint64(b[40:]))
	if of.version > 1 {
		r.prev = le.Uint32(b[48:])
	}
	r.extensions = b[head : head+ext : head+ext]
	r.data = b[head+ext : head+body : head+body]
	return r, ""
}

// into fills a raft.Log, which then aliases what was parsed.
func (r *record) into(out *raft.Log) {
	*out = raft.Log{Index: r.index, Term: r.term, Type: r.logType, Data: r.data}
	if len(r.extensions) > 0 {
		out.Extensions = r.extensions
	}
	if r.appendedAt != 0 {
		out.AppendedAt = time.Unix(0, r.appendedAt)
	}
}

// appendHeader appends the header of a segment file.
func appendHeader(dst []byte, first uint64, salt uint32) []byte {
	start := len(dst)
	le := binary.LittleEndian
	dst = append(dst, segmentMagic...)
	dst = le.AppendUint32(dst, segmentVersion)
	dst = le.AppendUint32(dst, salt)
	dst = le.AppendUint64(dst, first)
	dst = le.AppendUint32(dst, 0)
	return le.AppendUint32(dst, crc32.Checksum(dst[start:], castagnoli))
}

// headerSum is the checksum in a header, to which the first record is linked.
func headerSum(b []byte) uint32 { return binary.LittleEndian.Uint32(b[28:]) }

func parseHeader(b []byte) (first uint64, of life, err error) {
	le := binary.LittleEndian
	if len(b) < segmentHeader {
		return 0, of, fmt.Errorf("the file is %d bytes long", len(b))
	}
	if string(b[:8]) != segmentMagic {
		return 0, of, errors.New("it is not a log segment")
	}
	if got, want := crc32.Checksum(b[:28], castagnoli), headerSum(b); got != want {
		return 0, of, fmt.Errorf("the header's checksum is %08x, stored was %08x", got, want)
	}
	of.version, of.salt = le.Uint32(b[8:]), le.Uint32(b[12:])
	if of.version == 0 || of.version > segmentVersion {
		return 0, of, fmt.Errorf("unknown format version %d: it was written by a newer clusterd", of.version)
	}
	return le.Uint64(b[16:]), of, nil
}
