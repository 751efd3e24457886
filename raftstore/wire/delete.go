package wire

import (
	"encoding/binary"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// maxDeleteBytes bounds the keys of one command that deletes: written short,
// they could become anything.
const maxDeleteBytes = 8 << 20

// deleteWeight is what one key to delete counts for when commands are gathered
// into an entry: it takes few bytes there, and as long to apply as an object.
const deleteWeight = 256

// Weight is the size of an encoded command for the bounds of a log entry: what
// it takes there, or more where applying it costs more.
func Weight(raw []byte) int {
	if len(raw) == 0 {
		return 0
	}
	switch raw[0] {
	case byte(mvcc.CmdDelete):
		r := body(raw)
		_ = r.bytes()
		return len(raw) + deleteWeight*r.count(3)
	case txnWithPatches:
		n := len(raw)
		skim(raw, func(_ []byte, patched int) { n += patched })
		return n
	}
	return len(raw)
}

// body is what of an encoded command comes after what all have.
func body(raw []byte) *reader {
	r := &reader{b: raw[1:]}
	r.uint64()
	r.uvarint()
	r.uvarint()
	return r
}

// appendDelete writes each key as what it has in common with the one before it,
// and the rest.
func appendDelete(dst []byte, d *mvcc.Deletion) []byte {
	dst = appendString(dst, d.Origin)
	dst = binary.AppendUvarint(dst, uint64(len(d.Keys)))
	last := ""
	for i := range d.Keys {
		key := d.Keys[i].Key
		same := common(last, key)
		dst = binary.AppendUvarint(dst, uint64(same))
		dst = appendString(dst, key[same:])
		dst = binary.AppendUvarint(dst, uint64(d.Keys[i].ModRevision))
		last = key
	}
	return dst
}

// common is the length of the longest beginning of both.
func common(a, b string) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

func (r *reader) delete(d *mvcc.Deletion) {
	d.Origin = r.string()
	n := r.count(3)
	if n > mvcc.MaxDeletes {
		r.fail("too many keys to delete")
		return
	}
	if n > 0 {
		d.Keys = make([]mvcc.Compare, n)
	}
	var last []byte
	total := 0
	for i := range d.Keys {
		same := r.uvarint()
		rest := r.bytes()
		if same > uint64(len(last)) {
			r.fail("key shares more than the one before it has")
			return
		}
		last = append(last[:same], rest...)
		if total += len(last); total > maxDeleteBytes {
			r.fail("keys to delete are too long")
			return
		}
		d.Keys[i] = mvcc.Compare{Key: string(last), ModRevision: r.int()}
		if r.err != nil {
			return
		}
	}
}
