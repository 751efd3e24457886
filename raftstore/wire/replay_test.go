package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// replayHash is the keyspace's hash after testdata/replay-v1.bin. It may never
// change: members of different versions apply the same log side by side, and a
// log that is replayed after an upgrade has to give what it gave before.
const replayHash = 0x3747b990eb7a91be

// The same log gives the same hash, on every machine, in every version, whether
// it is applied in one go or goes through a snapshot after every entry.
func TestReplay(t *testing.T) {
	log := golden(t, "replay-v1.bin", encodedLog())
	direct, snapshotted := mvcc.New(), mvcc.New()
	index := uint64(0)
	for len(log) > 0 {
		n := binary.LittleEndian.Uint32(log)
		raw := log[4 : 4+n]
		log = log[4+n:]
		index++
		for _, k := range []*mvcc.Keyspace{direct, snapshotted} {
			b, err := DecodeBatch(raw)
			if err != nil {
				t.Fatalf("entry %d: %v", index, err)
			}
			k.Apply(index, b)
		}
		var buf bytes.Buffer
		if err := WriteSnapshot(&buf, snapshotted.Snapshot()); err != nil {
			t.Fatal(err)
		}
		var err error
		if snapshotted, err = ReadSnapshot(&buf); err != nil {
			t.Fatalf("after entry %d: %v", index, err)
		}
		if direct.Digest() != snapshotted.Digest() {
			t.Fatalf("after entry %d:\n%+v\n%+v", index, direct.Digest(), snapshotted.Digest())
		}
	}
	if got := direct.Digest(); index != 150 || got.Hash != replayHash {
		t.Errorf("after %d entries the hash is %#x, and was %#x: %+v", index, got.Hash, uint64(replayHash), got)
	}
}

// encodedLog makes the log of TestReplay: -update writes it.
func encodedLog() (log []byte) {
	r := rand.New(rand.NewPCG(7, 7))
	key := func() string { return fmt.Sprintf("/%c/%d", 'a'+rune(r.IntN(3)), r.IntN(12)) }
	now, seq := int64(1_789_000_000_000), uint64(0)
	for i := range 150 {
		now += int64(r.IntN(2000)) - 300
		var raws [][]byte
		for range 1 + r.IntN(5) {
			seq++
			c := mvcc.Command{Type: mvcc.CmdTxn, ID: mvcc.CommandID{Session: uint64(r.IntN(3)), Seq: seq}, Basis: uint64(max(0, i-r.IntN(20)))}
			switch r.IntN(12) {
			case 0:
				c.Type = mvcc.CmdTick
			case 1:
				c.Type = mvcc.CmdLimits
				c.Limits = mvcc.Limits{HistoryBytes: int64(2000 + r.IntN(20_000)), HistoryAgeMillis: int64(5000 + r.IntN(60_000)), Window: int64(20 + r.IntN(60))}
			default:
				if r.IntN(2) == 0 {
					c.Txn.Origin = "user"
				}
				for range r.IntN(2) {
					c.Txn.Compares = append(c.Txn.Compares, mvcc.Compare{Key: key(), ModRevision: int64(r.IntN(2) * r.IntN(i+2))})
				}
				for range 1 + r.IntN(3) {
					op := mvcc.Op{Type: mvcc.OpPut, Key: key(), Value: bytes.Repeat([]byte{byte(seq)}, r.IntN(40)), TTL: int64(r.IntN(3) * r.IntN(10))}
					if r.IntN(4) == 0 {
						op = mvcc.Op{Type: mvcc.OpDelete, Key: key()}
					}
					c.Txn.Ops = append(c.Txn.Ops, op)
				}
			}
			raws = append(raws, AppendCommand(nil, &c))
		}
		entry := AppendBatch(nil, now, raws)
		log = binary.LittleEndian.AppendUint32(log, uint32(len(entry)))
		log = append(log, entry...)
	}
	return log
}
