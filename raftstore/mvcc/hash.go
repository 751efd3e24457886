package mvcc

import (
	"encoding/binary"

	"github.com/cespare/xxhash/v2"
)

// hashKV is the same on every machine: it is compared between nodes.
func hashKV(kv *KeyValue) uint64 {
	var d xxhash.Digest
	d.Reset()
	var b [8]byte
	num := func(n uint64) {
		binary.LittleEndian.PutUint64(b[:], n)
		_, _ = d.Write(b[:])
	}
	num(uint64(len(kv.Key)))
	_, _ = d.WriteString(kv.Key)
	num(uint64(len(kv.Value)))
	_, _ = d.Write(kv.Value)
	num(uint64(kv.CreateRevision))
	num(uint64(kv.ModRevision))
	num(uint64(kv.Version))
	num(uint64(kv.ExpiresAt))
	return d.Sum64()
}

func mix(nums ...uint64) uint64 {
	b := make([]byte, 0, 64)
	for _, n := range nums {
		b = binary.LittleEndian.AppendUint64(b, n)
	}
	return xxhash.Sum64(b)
}
