package wire

import (
	"encoding/binary"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// WithOrigin is an encoded command with another origin: what of makes of the one that it has,
// "" if it has none. Commands that name no origin, such as limits, are returned as they are; so is
// raw if the origin stays. A transaction or a deletion is not decoded beyond its origin.
func WithOrigin(raw []byte, of func(origin string) string) ([]byte, error) {
	r := reader{b: raw}
	kind := r.byte()
	r.uint64()
	r.uvarint()
	r.uvarint()
	head := r.off
	var was string
	switch kind {
	case byte(mvcc.CmdTxn):
	case txnWithOrigin, txnWithPatches, byte(mvcc.CmdDelete):
		was = r.string()
	default:
		return raw, r.err
	}
	if r.err != nil {
		return nil, r.err
	}
	origin := of(was)
	if origin == was {
		return raw, nil
	}
	switch {
	case kind == byte(mvcc.CmdTxn): // has none, and gets one
		kind = txnWithOrigin
	case kind == txnWithOrigin && origin == "":
		kind = byte(mvcc.CmdTxn)
	}
	out := make([]byte, 0, len(raw)+len(origin)+binary.MaxVarintLen64)
	out = append(out, kind)
	out = append(out, raw[1:head]...)
	if kind != byte(mvcc.CmdTxn) {
		out = appendString(out, origin)
	}
	out = append(out, raw[r.off:]...)
	return out, nil
}
