package pathprobe

import (
	"encoding/binary"
	"hash/crc32"
)

// A message is a header and filling up to its size, all of it in the checksum:
//
//	magic 4 | version 1 | kind 1 | reserved 2 | run 8 | seq 4 | received 4 | checksum 4 | filling
//
// Numbers are big-endian. An answer is as long as what it answers, so that
// a node cannot be used to amplify traffic.
type message struct {
	kind kind
	run  uint64 // the sender's of the ping: another one after each start
	seq  uint32 // of the ping in its run
	// received is how many pings of the run had come by then; of an answer.
	received uint32
}

type kind byte

const (
	kindPing   kind = 1
	kindAnswer kind = 2
)

const (
	version      = 1
	headerLen    = 28
	checksumAt   = 24
	longestFrame = 64 << 10
)

var (
	magic = [4]byte{'c', 'l', 'p', 'p'}
	table = crc32.MakeTable(crc32.Castagnoli)
)

// put writes the message over b, which has headerLen bytes at least; what is
// behind the header is left as the filling.
func (m message) put(b []byte) {
	copy(b, magic[:])
	b[4], b[5], b[6], b[7] = version, byte(m.kind), 0, 0
	binary.BigEndian.PutUint64(b[8:], m.run)
	binary.BigEndian.PutUint32(b[16:], m.seq)
	binary.BigEndian.PutUint32(b[20:], m.received)
	binary.BigEndian.PutUint32(b[checksumAt:], checksum(b))
}

func checksum(b []byte) uint32 {
	return crc32.Update(crc32.Checksum(b[:checksumAt], table), table, b[headerLen:])
}

// verdict is what became of a packet.
type verdict int

const (
	foreign verdict = iota // not of this protocol, or of another version of it
	damaged                // some of its bytes are others than were sent
	sound
)

// parse reads a message.
func parse(b []byte) (message, verdict) {
	if len(b) < headerLen || [4]byte(b[:4]) != magic || b[4] != version {
		return message{}, foreign
	}
	if checksum(b) != binary.BigEndian.Uint32(b[checksumAt:]) {
		return message{}, damaged
	}
	m := message{
		kind: kind(b[5]), run: binary.BigEndian.Uint64(b[8:]),
		seq: binary.BigEndian.Uint32(b[16:]), received: binary.BigEndian.Uint32(b[20:]),
	}
	if m.kind != kindPing && m.kind != kindAnswer {
		return message{}, foreign
	}
	return m, sound
}
