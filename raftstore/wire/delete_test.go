package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// What a peer encodes in few bytes must not become more than a request may ask for.
func TestDeletionBounds(t *testing.T) {
	head := binary.AppendUvarint(binary.AppendUvarint(append([]byte{byte(mvcc.CmdDelete)}, make([]byte, 8)...), 1), 1)
	head = appendString(head, "origin")
	key := func(b []byte, same uint64, rest string) []byte {
		return binary.AppendUvarint(appendString(binary.AppendUvarint(b, same), rest), 7)
	}
	bomb := key(binary.AppendUvarint(bytes.Clone(head), 1000), 0, strings.Repeat("k", 1<<20))
	for range 999 {
		bomb = key(bomb, 1<<20, "k")
	}
	flood := binary.AppendUvarint(bytes.Clone(head), mvcc.MaxDeletes+1)
	for range mvcc.MaxDeletes + 1 {
		flood = key(flood, 0, "k")
	}
	for what, raw := range map[string][]byte{
		"too long":    bomb,
		"too many":    flood,
		"shares more": key(key(binary.AppendUvarint(bytes.Clone(head), 2), 0, "ab"), 3, "c"),
		"count":       binary.AppendUvarint(bytes.Clone(head), 1<<40),
	} {
		if _, err := decodeCommand(raw); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
		_ = Weight(raw)
	}
}

// The keys of a namespace take a fraction of what they are long.
func TestDeletionIsShort(t *testing.T) {
	var d mvcc.Deletion
	for i := range 1000 {
		d.Keys = append(d.Keys, mvcc.Compare{Key: "/registry/core/configmaps/a-namespace/object-" + string(rune('a'+i/100)) + string(rune('a'+i/10%10)) + string(rune('a'+i%10)), ModRevision: 1_000_000 + int64(i)})
	}
	raw := AppendCommand(nil, &mvcc.Command{Type: mvcc.CmdDelete, Delete: d})
	if len(raw) > 8*len(d.Keys) {
		t.Errorf("%d keys take %d bytes", len(d.Keys), len(raw))
	}
	c, err := decodeCommand(raw)
	if err != nil || cmp.Diff(d, c.Delete) != "" {
		t.Errorf("%v %s", err, cmp.Diff(d, c.Delete))
	}
}

// A snapshot written before there were deletions is taken up, and goes on with
// them: the hash afterwards may never change.
func TestDeletionAfterOldSnapshot(t *testing.T) {
	for name, want := range map[string]uint64{"snapshot-v1.bin": hashAfterV1, "snapshot-v2.bin": hashAfterV2} {
		old, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		k, err := ReadSnapshot(bytes.NewReader(old))
		if err != nil {
			t.Fatal(err)
		}
		l, _ := k.List(mvcc.Range{})
		d := mvcc.Deletion{Origin: "sweeper"}
		for _, kv := range l.KVs {
			d.Keys = append(d.Keys, mvcc.Compare{Key: kv.Key, ModRevision: kv.ModRevision})
		}
		raw := AppendCommand(nil, &mvcc.Command{Type: mvcc.CmdDelete, ID: mvcc.CommandID{Session: 5, Seq: 1}, Basis: 10, Delete: d})
		b, err := DecodeBatch(AppendBatch(nil, 1_789_000_000_500, [][]byte{raw}))
		if err != nil {
			t.Fatal(err)
		}
		before := k.Revision()
		k.Apply(20, b)
		if got := k.Digest(); got.Keys != 0 || got.Revision != before+int64(len(d.Keys)) || got.Hash != want {
			t.Errorf("%s: %+v, hash %#x, was %#x", name, got, got.Hash, want)
		}
	}
}

const (
	hashAfterV1 = 0x297639c38e77ae9
	hashAfterV2 = 0xcfd94dcc6fc1e710
)
