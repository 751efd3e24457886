package wire

import (
	"bytes"
	"encoding/binary"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// txnWithPatches is the type of a transaction that puts values by what they differ in
// from those that their keys have. It names its origin, which may be empty, as
// txnWithOrigin does.
const txnWithPatches = 6

// patchedPut is the operation of such a put. Its key is that of a comparison, and is
// written there.
const patchedPut = 3

// Numbers of commands that came later than others, as members ask each other for
// them.
const (
	// Patched is that of a transaction with patches.
	Patched = uint64(txnWithPatches)
	// Newest is the highest one that this version can read.
	Newest = Patched
)

func patches(t *mvcc.Txn) bool {
	for i := range t.Ops {
		if t.Ops[i].Patch != nil {
			return true
		}
	}
	return false
}

func appendPatched(dst []byte, t *mvcc.Txn, op *mvcc.Op) []byte {
	at := 0
	for at < len(t.Compares) && t.Compares[at].Key != op.Key {
		at++
	}
	dst = append(dst, patchedPut)
	dst = binary.AppendUvarint(dst, uint64(at))
	dst = binary.AppendUvarint(dst, uint64(op.TTL))
	dst = binary.AppendUvarint(dst, uint64(op.Patch.Size))
	dst = binary.LittleEndian.AppendUint64(dst, op.Patch.Sum)
	return appendString(dst, op.Patch.Bytes)
}

// maxPatched bounds what a patch is said to make. What it makes is bounded by its
// base, too; this keeps sums of such numbers in their range.
const maxPatched = 64 << 20

// patched reads what comes after the type of the operation.
func (r *reader) patched(t *mvcc.Txn, op *mvcc.Op) {
	at := r.uvarint()
	if at >= uint64(len(t.Compares)) {
		r.fail("patch of a value that no comparison names")
		return
	}
	op.Type, op.Key = mvcc.OpPut, t.Compares[at].Key
	op.TTL = r.int()
	size := r.uvarint()
	if size > maxPatched {
		r.fail("patch for too large a value")
		return
	}
	op.Patch = &mvcc.Patch{Size: int(size), Sum: r.uint64()}
	op.Patch.Bytes = bytes.Clone(r.bytes())
}

// skim calls put for each key that an encoded transaction puts, with the size of the
// value that a patch makes, or 0, and returns the transaction's origin. ok: raw is a
// transaction, and all its operations are puts. Nothing is copied.
func skim(raw []byte, put func(key []byte, patched int)) (origin []byte, ok bool) {
	if len(raw) == 0 {
		return nil, false
	}
	r := body(raw)
	switch raw[0] {
	case txnWithOrigin, txnWithPatches:
		origin = r.bytes()
	case byte(mvcc.CmdTxn):
	default:
		return nil, false
	}
	var few [4][]byte
	keys := few[:0]
	for n := r.count(2); n > 0 && r.err == nil; n-- {
		keys = append(keys, r.bytes())
		r.uvarint()
	}
	ok = true
	for n := r.count(2); n > 0 && r.err == nil; n-- {
		switch r.byte() {
		case byte(mvcc.OpPut):
			key := r.bytes()
			r.uvarint()
			_ = r.bytes()
			put(key, 0)
		case patchedPut:
			at := r.uvarint()
			r.uvarint()
			size := r.uvarint()
			r.uint64()
			_ = r.bytes()
			if at >= uint64(len(keys)) || size > maxPatched {
				return nil, false
			}
			put(keys[at], int(size))
		default:
			_ = r.bytes()
			ok = false
		}
	}
	return origin, ok && r.err == nil
}

// Put returns the origin and the key of an encoded transaction that puts one key and
// does nothing else. Both alias raw.
func Put(raw []byte) (origin, key []byte, ok bool) {
	puts := 0
	origin, ok = skim(raw, func(k []byte, _ int) {
		key = k
		puts++
	})
	return origin, key, ok && puts == 1
}
