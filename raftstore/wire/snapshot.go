package wire

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"slices"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// A snapshot is a magic, a version, and chunks. A chunk is its payload's
// length (4), its kind (1), the payload, and the checksum of kind and payload
// (4).
const (
	snapshotMagic   = "CLDRSNAP"
	snapshotVersion = 2 // 1 had no origins

	chunkHeader = 1 // one Header, first
	chunkBase   = 2 // keys as of the oldest revision
	chunkChange = 3 // history
	chunkWindow = 4 // remembered outcomes
	chunkEnd    = 5 // number of records before it, last

	chunkTarget = 64 << 10  // a chunk is closed when it has grown to this
	chunkMax    = 256 << 20 // longer is corruption
)

// WriteSnapshot writes s to w.
func WriteSnapshot(w io.Writer, s *mvcc.Snapshot) error {
	sw := snapshotWriter{w: w}
	sw.write(binary.LittleEndian.AppendUint32([]byte(snapshotMagic), snapshotVersion))
	sw.record(chunkHeader, func(b []byte) []byte { return appendHeader(b, s.Header()) })
	sw.fail(s.Base(func(kv *mvcc.KeyValue) error {
		return sw.record(chunkBase, func(b []byte) []byte { return appendKV(b, kv) })
	}))
	sw.fail(s.Changes(func(c mvcc.Change) error {
		return sw.record(chunkChange, func(b []byte) []byte {
			b = append(b, byte(c.Type))
			b = binary.LittleEndian.AppendUint64(b, uint64(c.Time))
			b = appendString(b, c.Origin)
			return appendKV(b, &c.KV)
		})
	}))
	sw.fail(s.Window(func(e mvcc.WindowEntry) error {
		return sw.record(chunkWindow, func(b []byte) []byte {
			b = binary.LittleEndian.AppendUint64(b, e.ID.Session)
			b = binary.AppendUvarint(b, e.ID.Seq)
			b = append(b, byte(e.Verdict))
			b = binary.AppendUvarint(b, uint64(e.Revision))
			return binary.AppendUvarint(b, e.Index)
		})
	}))
	records := sw.records
	sw.record(chunkEnd, func(b []byte) []byte { return binary.AppendUvarint(b, records) })
	sw.flush()
	return sw.err
}

type snapshotWriter struct {
	w       io.Writer
	kind    byte
	buf     []byte // the open chunk, with room for its length and kind in front
	records uint64
	err     error // the first one sticks
}

func (w *snapshotWriter) fail(err error) {
	if w.err == nil {
		w.err = err
	}
}

func (w *snapshotWriter) write(b []byte) {
	if w.err == nil {
		_, w.err = w.w.Write(b)
	}
}

func (w *snapshotWriter) record(kind byte, add func([]byte) []byte) error {
	if kind != w.kind || len(w.buf) >= chunkTarget {
		w.flush()
		w.kind = kind
		w.buf = append(w.buf[:0], 0, 0, 0, 0, kind)
	}
	w.buf = add(w.buf)
	w.records++
	return w.err
}

func (w *snapshotWriter) flush() {
	if len(w.buf) == 0 {
		return
	}
	binary.LittleEndian.PutUint32(w.buf, uint32(len(w.buf)-5))
	w.write(binary.LittleEndian.AppendUint32(w.buf, checksum(w.buf[4:])))
	w.buf = w.buf[:0]
}

func appendHeader(b []byte, h mvcc.Header) []byte {
	for _, n := range []uint64{
		h.Digest.Index, uint64(h.Digest.Revision), uint64(h.Digest.Oldest), uint64(h.Digest.Time),
		uint64(h.Digest.Keys), uint64(h.Digest.Bytes), uint64(h.Digest.HistoryBytes), h.Digest.Hash,
		uint64(h.Limits.HistoryBytes), uint64(h.Limits.HistoryAgeMillis), uint64(h.Limits.Window), h.Floor,
	} {
		b = binary.LittleEndian.AppendUint64(b, n)
	}
	return b
}

func (r *reader) header() mvcc.Header {
	i64 := func() int64 { return int64(r.uint64()) }
	return mvcc.Header{
		Digest: mvcc.Digest{
			Index: r.uint64(), Revision: i64(), Oldest: i64(), Time: i64(),
			Keys: i64(), Bytes: i64(), HistoryBytes: i64(), Hash: r.uint64(),
		},
		Limits: mvcc.Limits{HistoryBytes: i64(), HistoryAgeMillis: i64(), Window: i64()},
		Floor:  r.uint64(),
	}
}

func appendKV(b []byte, kv *mvcc.KeyValue) []byte {
	b = appendString(b, kv.Key)
	b = binary.AppendUvarint(b, uint64(kv.CreateRevision))
	b = binary.AppendUvarint(b, uint64(kv.ModRevision))
	b = binary.AppendUvarint(b, uint64(kv.Version))
	b = binary.AppendUvarint(b, uint64(kv.ExpiresAt))
	return appendString(b, kv.Value)
}

func (r *reader) kv() mvcc.KeyValue {
	return mvcc.KeyValue{
		Key: r.string(), CreateRevision: r.int(), ModRevision: r.int(), Version: r.int(), ExpiresAt: r.int(),
		Value: bytes.Clone(r.bytes()),
	}
}

type snapshotReader struct {
	r   *bufio.Reader
	buf []byte // what full returns is in it, and overwritten by the next call
	off int64  // of the chunk being read
	pos int64
}

func (s *snapshotReader) full(n int) ([]byte, error) {
	// In steps, so that a length that lies costs no more memory than there is
	// input.
	const step = 1 << 20
	b := s.buf[:0]
	for len(b) < n {
		m := min(step, n-len(b))
		b = slices.Grow(b, m)[:len(b)+m]
		got, err := io.ReadFull(s.r, b[len(b)-m:])
		s.pos += int64(got)
		if err != nil {
			return nil, fmt.Errorf("%w: it ends after %d bytes", ErrCorrupt, s.pos)
		}
	}
	s.buf = b
	return b, nil
}

func (s *snapshotReader) chunk() (kind byte, payload []byte, err error) {
	head, err := s.full(5)
	if err != nil {
		return 0, nil, err
	}
	n := binary.LittleEndian.Uint32(head)
	kind, sum := head[4], checksum(head[4:5])
	if n > chunkMax {
		return 0, nil, fmt.Errorf("%w: chunk of %d bytes", ErrCorrupt, n)
	}
	body, err := s.full(int(n) + 4)
	if err != nil {
		return 0, nil, err
	}
	payload = body[:n]
	sum = update(sum, payload)
	if want := binary.LittleEndian.Uint32(body[n:]); sum != want {
		return 0, nil, fmt.Errorf("%w: chunk's checksum is %08x, stored was %08x", ErrCorrupt, sum, want)
	}
	return kind, payload, nil
}
