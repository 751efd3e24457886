package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// batchVersion is the first byte of every log entry.
const batchVersion = 1

// batchHeader is version (1), checksum of all that follows (4), time (8).
const batchHeader = 13

// txnWithOrigin is the type of a transaction that says who asked for it, as a
// string before the rest. Other types are mvcc's numbers.
const txnWithOrigin = 4

// AppendCommand appends c's encoding to dst. What it cannot say is not lost
// silently: CheckCommand of the result fails.
func AppendCommand(dst []byte, c *mvcc.Command) []byte {
	kind := byte(c.Type)
	switch {
	case c.Type != mvcc.CmdTxn:
	case patches(&c.Txn):
		kind = txnWithPatches
	case c.Txn.Origin != "":
		kind = txnWithOrigin
	}
	dst = append(dst, kind)
	dst = binary.LittleEndian.AppendUint64(dst, c.ID.Session)
	dst = binary.AppendUvarint(dst, c.ID.Seq)
	dst = binary.AppendUvarint(dst, c.Basis)
	switch c.Type {
	case mvcc.CmdTxn:
		if kind != byte(mvcc.CmdTxn) {
			dst = appendString(dst, c.Txn.Origin)
		}
		dst = appendTxn(dst, &c.Txn)
	case mvcc.CmdLimits:
		dst = binary.AppendUvarint(dst, uint64(c.Limits.HistoryBytes))
		dst = binary.AppendUvarint(dst, uint64(c.Limits.HistoryAgeMillis))
		dst = binary.AppendUvarint(dst, uint64(c.Limits.Window))
	case mvcc.CmdDelete:
		dst = appendDelete(dst, &c.Delete)
	}
	return dst
}

func appendTxn(dst []byte, t *mvcc.Txn) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(t.Compares)))
	for i := range t.Compares {
		dst = appendString(dst, t.Compares[i].Key)
		dst = binary.AppendUvarint(dst, uint64(t.Compares[i].ModRevision))
	}
	dst = binary.AppendUvarint(dst, uint64(len(t.Ops)))
	for i := range t.Ops {
		op := &t.Ops[i]
		if op.Patch != nil {
			dst = appendPatched(dst, t, op)
			continue
		}
		dst = append(dst, byte(op.Type))
		dst = appendString(dst, op.Key)
		if op.Type == mvcc.OpPut {
			dst = binary.AppendUvarint(dst, uint64(op.TTL))
			dst = appendString(dst, op.Value)
		}
	}
	return dst
}

// CheckCommand reports why raw is not the encoding of one command.
func CheckCommand(raw []byte) error {
	_, err := decodeCommand(raw)
	return err
}

// CommandID returns the identity of an encoded command.
func CommandID(raw []byte) (mvcc.CommandID, error) {
	r := reader{b: raw}
	_ = r.byte()
	id := mvcc.CommandID{Session: r.uint64(), Seq: r.uvarint()}
	return id, r.err
}

func decodeCommand(raw []byte) (mvcc.Command, error) {
	r := reader{b: raw}
	kind := r.byte()
	c := mvcc.Command{Type: mvcc.CommandType(kind)}
	if kind == txnWithOrigin || kind == txnWithPatches {
		c.Type = mvcc.CmdTxn
	}
	c.ID.Session = r.uint64()
	c.ID.Seq = r.uvarint()
	c.Basis = r.uvarint()
	switch c.Type {
	case mvcc.CmdTxn:
		if kind != byte(mvcc.CmdTxn) {
			if c.Txn.Origin = r.string(); c.Txn.Origin == "" && kind == txnWithOrigin {
				r.fail("empty origin")
			}
		}
		r.txn(&c.Txn, kind == txnWithPatches)
	case mvcc.CmdTick:
	case mvcc.CmdLimits:
		c.Limits = mvcc.Limits{HistoryBytes: r.int(), HistoryAgeMillis: r.int(), Window: r.int()}
	case mvcc.CmdDelete:
		r.delete(&c.Delete)
	default:
		if r.err == nil {
			return c, fmt.Errorf("%w: command type %d", ErrVersion, c.Type)
		}
	}
	return c, r.done()
}

func (r *reader) txn(t *mvcc.Txn, patches bool) {
	if n := r.count(2); n > 0 {
		t.Compares = make([]mvcc.Compare, n)
	}
	for i := range t.Compares {
		t.Compares[i] = mvcc.Compare{Key: r.string(), ModRevision: r.int()}
	}
	if n := r.count(2); n > 0 {
		t.Ops = make([]mvcc.Op, n)
	}
	for i := range t.Ops {
		op := &t.Ops[i]
		op.Type = mvcc.OpType(r.byte())
		if op.Type == patchedPut && patches {
			r.patched(t, op)
			continue
		}
		op.Key = r.string()
		switch op.Type {
		case mvcc.OpPut:
			op.TTL = r.int()
			// A copy: one value that lives long must not hold its batch.
			op.Value = bytes.Clone(r.bytes())
		case mvcc.OpDelete:
		default:
			r.fail("unknown operation")
		}
		if r.err != nil {
			return
		}
	}
}

// AppendBatch appends the log entry of encoded commands to dst.
func AppendBatch(dst []byte, time int64, commands [][]byte) []byte {
	start := len(dst)
	dst = append(dst, batchVersion, 0, 0, 0, 0)
	dst = binary.LittleEndian.AppendUint64(dst, uint64(time))
	dst = binary.AppendUvarint(dst, uint64(len(commands)))
	for _, c := range commands {
		dst = appendString(dst, c)
	}
	binary.LittleEndian.PutUint32(dst[start+1:], checksum(dst[start+5:]))
	return dst
}

// DecodeBatch decodes a log entry. Nothing in the result aliases data.
func DecodeBatch(data []byte) (mvcc.Batch, error) {
	if len(data) < batchHeader {
		return mvcc.Batch{}, fmt.Errorf("%w: log entry of %d bytes", ErrCorrupt, len(data))
	}
	if data[0] != batchVersion {
		return mvcc.Batch{}, fmt.Errorf("%w: log entry %d", ErrVersion, data[0])
	}
	if got, want := checksum(data[5:]), binary.LittleEndian.Uint32(data[1:]); got != want {
		return mvcc.Batch{}, fmt.Errorf("%w: log entry's checksum is %08x, stored was %08x", ErrCorrupt, got, want)
	}
	r := reader{b: data, off: 5}
	b := mvcc.Batch{Time: int64(r.uint64())}
	if n := r.count(12); n > 0 {
		b.Commands = make([]mvcc.Command, n)
	}
	for i := range b.Commands {
		raw := r.bytes()
		if r.err != nil {
			break
		}
		c, err := decodeCommand(raw)
		if err != nil {
			return mvcc.Batch{}, fmt.Errorf("command %d: %w", i, err)
		}
		b.Commands[i] = c
	}
	return b, r.done()
}
