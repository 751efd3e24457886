package wire

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

var rewrite = flag.Bool("update", false, "rewrite the golden files of the present version")

// commands is one of each kind.
func commands() []mvcc.Command {
	return []mvcc.Command{
		{Type: mvcc.CmdLimits, ID: mvcc.CommandID{Session: 1, Seq: 1}, Limits: mvcc.Limits{HistoryBytes: 1 << 20, HistoryAgeMillis: 600000, Window: 32768}},
		{Type: mvcc.CmdTxn, ID: mvcc.CommandID{Session: 0xfedcba9876543210, Seq: 300}, Basis: 12, Txn: mvcc.Txn{
			Compares: []mvcc.Compare{{Key: "/registry/pods/default/web-0", ModRevision: 0}},
			Ops: []mvcc.Op{
				{Type: mvcc.OpPut, Key: "/registry/pods/default/web-0", Value: []byte("\x00k8s value"), TTL: 3600},
				{Type: mvcc.OpPut, Key: "/empty", Value: []byte{}},
				{Type: mvcc.OpDelete, Key: "/registry/pods/default/web-1"},
			},
		}},
		{Type: mvcc.CmdTxn, ID: mvcc.CommandID{Session: 2, Seq: 2}, Txn: mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/registry/pods/default/web-1", Value: []byte("v")}}}},
		{Type: mvcc.CmdTick, ID: mvcc.CommandID{Session: 1, Seq: 2}},
	}
}

// named are the commands that say who asked for them.
func named() []mvcc.Command {
	return []mvcc.Command{
		{Type: mvcc.CmdTxn, ID: mvcc.CommandID{Session: 3, Seq: 1}, Basis: 9, Txn: mvcc.Txn{
			Origin: "admin via kubectl",
			Ops:    []mvcc.Op{{Type: mvcc.OpPut, Key: "/registry/pods/default/web-1", Value: []byte("w")}},
		}},
		{Type: mvcc.CmdTxn, ID: mvcc.CommandID{Session: 3, Seq: 2}, Basis: 9, Txn: mvcc.Txn{
			Origin: "gc", Ops: []mvcc.Op{{Type: mvcc.OpDelete, Key: "/registry/pods/default/web-1"}},
		}},
	}
}

// deletions are the commands that take many keys away.
func deletions() []mvcc.Command {
	return []mvcc.Command{
		{Type: mvcc.CmdDelete, ID: mvcc.CommandID{Session: 3, Seq: 3}, Basis: 9, Delete: mvcc.Deletion{
			Origin: "namespace controller",
			Keys: []mvcc.Compare{
				{Key: "/registry/pods/default/web-0", ModRevision: 2},
				{Key: "/registry/pods/default/web-1", ModRevision: 300},
				{Key: "/registry/secrets/default/s", ModRevision: 1 << 40},
			},
		}},
		{Type: mvcc.CmdDelete, ID: mvcc.CommandID{Session: 3, Seq: 4}, Delete: mvcc.Deletion{Keys: []mvcc.Compare{{Key: "/k", ModRevision: 1}}}},
	}
}

func encodedBatch() []byte { return encoded(commands()) }

func encoded(commands []mvcc.Command) []byte {
	var raws [][]byte
	for _, c := range commands {
		raws = append(raws, AppendCommand(nil, &c))
	}
	return AppendBatch(nil, 1_789_000_000_000, raws)
}

func keyspace(t testing.TB) *mvcc.Keyspace {
	b, err := DecodeBatch(encodedBatch())
	if err != nil {
		t.Fatal(err)
	}
	k := mvcc.New()
	k.Apply(5, b)
	b.Commands = b.Commands[2:3]
	b.Commands[0].ID.Seq = 77
	b.Commands[0].Basis = 5
	k.Apply(9, b)
	if b, err = DecodeBatch(encoded(named())); err != nil {
		t.Fatal(err)
	}
	k.Apply(10, b)
	return k
}

func encodedSnapshot(t testing.TB) []byte {
	var buf bytes.Buffer
	if err := WriteSnapshot(&buf, keyspace(t).Snapshot()); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func golden(t *testing.T, name string, got []byte) []byte {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *rewrite {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return want
}

// What this version writes, and every version ever shipped, can be read.
func TestGolden(t *testing.T) {
	batch := golden(t, "batch-v1.bin", encodedBatch())
	if !bytes.Equal(batch, encodedBatch()) {
		t.Error("a log entry looks different now: that is a new version")
	}
	b, err := DecodeBatch(batch)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(mvcc.Batch{Time: 1_789_000_000_000, Commands: commands()}, b); diff != "" {
		t.Error(diff)
	}
	origins := golden(t, "batch-v1-origin.bin", encoded(named()))
	if !bytes.Equal(origins, encoded(named())) {
		t.Error("a log entry with origins looks different now: that is a new version")
	}
	if b, err = DecodeBatch(origins); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(mvcc.Batch{Time: 1_789_000_000_000, Commands: named()}, b); diff != "" {
		t.Error(diff)
	}
	together := golden(t, "batch-v1-delete.bin", encoded(deletions()))
	if !bytes.Equal(together, encoded(deletions())) {
		t.Error("a log entry with deletions looks different now: that is a new version")
	}
	if b, err = DecodeBatch(together); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(mvcc.Batch{Time: 1_789_000_000_000, Commands: deletions()}, b); diff != "" {
		t.Error(diff)
	}
	patched := golden(t, "batch-v1-patch.bin", encoded(patchings()))
	if !bytes.Equal(patched, encoded(patchings())) {
		t.Error("a log entry with patches looks different now: that is a new version")
	}
	if b, err = DecodeBatch(patched); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(mvcc.Batch{Time: 1_789_000_000_000, Commands: patchings()}, b); diff != "" {
		t.Error(diff)
	}
	snap := golden(t, "snapshot-v2.bin", encodedSnapshot(t))
	if !bytes.Equal(snap, encodedSnapshot(t)) {
		t.Error("a snapshot looks different now: that is a new version")
	}
	k, err := ReadSnapshot(bytes.NewReader(snap))
	if err != nil {
		t.Fatal(err)
	}
	if k.Digest() != keyspace(t).Digest() {
		t.Errorf("%+v", k.Digest())
	}
	want := keyspace(t).History("/registry/pods/default/web-1", 0)
	if diff := cmp.Diff(want, k.History("/registry/pods/default/web-1", 0)); diff != "" || want.Changes[len(want.Changes)-1].Origin != "gc" {
		t.Errorf("history of a key after a restore: %s", diff)
	}

	// Version 1 was written before there were origins.
	old, err := os.ReadFile(filepath.Join("testdata", "snapshot-v1.bin"))
	if err != nil {
		t.Fatal(err)
	}
	k, err = ReadSnapshot(bytes.NewReader(old))
	if err != nil {
		t.Fatal(err)
	}
	if d := k.Digest(); d.Index != 9 || d.Revision != 4 || d.Keys != 3 {
		t.Errorf("snapshot of version 1: %+v", d)
	}
}

// Every single byte that is wrong or missing is noticed.
func TestDamage(t *testing.T) {
	batch, snap := encodedBatch(), encodedSnapshot(t)
	for name, tc := range map[string]struct {
		good []byte
		read func([]byte) error
	}{
		"batch":    {batch, func(b []byte) error { _, err := DecodeBatch(b); return err }},
		"deletes":  {encoded(deletions()), func(b []byte) error { _, err := DecodeBatch(b); return err }},
		"patches":  {encoded(patchings()), func(b []byte) error { _, err := DecodeBatch(b); return err }},
		"snapshot": {snap, func(b []byte) error { _, err := ReadSnapshot(bytes.NewReader(b)); return err }},
		"check":    {snap, func(b []byte) error { return CheckSnapshot(bytes.NewReader(b)) }},
	} {
		if err := tc.read(tc.good); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for i := range tc.good {
			bad := bytes.Clone(tc.good)
			bad[i] ^= 0x10
			if err := tc.read(bad); !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrVersion) {
				t.Fatalf("%s, byte %d flipped: %v", name, i, err)
			}
			if err := tc.read(tc.good[:i]); !errors.Is(err, ErrCorrupt) {
				t.Fatalf("%s, cut at %d: %v", name, i, err)
			}
		}
	}
	newer := bytes.Clone(batch)
	newer[0] = 2
	if _, err := DecodeBatch(newer); !errors.Is(err, ErrVersion) {
		t.Errorf("newer batch: %v", err)
	}
}

func TestLargeSnapshot(t *testing.T) {
	k := mvcc.New()
	for i := range 300 {
		k.Apply(uint64(i+1), mvcc.Batch{Time: 1, Commands: []mvcc.Command{{
			Type: mvcc.CmdTxn, ID: mvcc.CommandID{Session: 1, Seq: uint64(i)}, Basis: uint64(i),
			Txn: mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: string(rune('a' + i%50)), Value: bytes.Repeat([]byte{byte(i)}, 3000)}}},
		}}})
	}
	var buf bytes.Buffer
	if err := WriteSnapshot(&buf, k.Snapshot()); err != nil {
		t.Fatal(err)
	}
	got, err := ReadSnapshot(&buf)
	if err != nil {
		t.Fatal(err)
	}
	if got.Digest() != k.Digest() {
		t.Errorf("%+v, want %+v", got.Digest(), k.Digest())
	}
	for rev := k.Oldest(); rev <= k.Revision(); rev++ {
		a, errA := k.List(mvcc.Range{Revision: rev})
		b, errB := got.List(mvcc.Range{Revision: rev})
		if !reflect.DeepEqual(a, b) || errA != nil || errB != nil {
			t.Fatalf("at %d: %v, %v: the lists differ", rev, errA, errB)
		}
	}
	if err := WriteSnapshot(failing{}, k.Snapshot()); err == nil {
		t.Error("a disk that fails was not noticed")
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, os.ErrClosed }

func FuzzDecodeBatch(f *testing.F) {
	f.Add(encodedBatch())
	f.Add(encoded(named()))
	f.Add(encoded(deletions()))
	f.Add(encoded(patchings()))
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, data []byte) {
		// Repair the checksum, or nothing behind it is ever reached.
		if len(data) >= batchHeader {
			fixed := bytes.Clone(data)
			fixed[0] = batchVersion
			sum := checksum(fixed[5:])
			fixed[1], fixed[2], fixed[3], fixed[4] = byte(sum), byte(sum>>8), byte(sum>>16), byte(sum>>24)
			data = fixed
		}
		b, err := DecodeBatch(data)
		if err != nil {
			return
		}
		var raws [][]byte
		for i := range b.Commands {
			raws = append(raws, AppendCommand(nil, &b.Commands[i]))
		}
		again, err := DecodeBatch(AppendBatch(nil, b.Time, raws))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(b, again); diff != "" {
			t.Fatal(diff)
		}
		mvcc.New().Apply(1, b)
	})
}

func FuzzDecodeCommand(f *testing.F) {
	for _, c := range slices.Concat(commands(), named(), deletions(), patchings()) {
		f.Add(AppendCommand(nil, &c))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := decodeCommand(raw)
		if (err == nil) != (CheckCommand(raw) == nil) {
			t.Fatal("CheckCommand disagrees")
		}
		if id, idErr := CommandID(raw); err == nil && (idErr != nil || id != c.ID) {
			t.Fatalf("identity %v, %v", id, idErr)
		}
		w := Weight(raw)
		origin, key, alone := Put(raw)
		if err != nil {
			return
		}
		want := len(raw) + deleteWeight*len(c.Delete.Keys)
		for i := range c.Txn.Ops {
			if p := c.Txn.Ops[i].Patch; p != nil {
				want += p.Size
			}
		}
		if w != want {
			t.Fatalf("weighs %d instead of %d", w, want)
		}
		if alone != (len(c.Txn.Ops) == 1 && c.Txn.Ops[0].Type == mvcc.OpPut) ||
			alone && (string(origin) != c.Txn.Origin || string(key) != c.Txn.Ops[0].Key) {
			t.Fatalf("puts %q by %q alone: %t", key, origin, alone)
		}
	})
}

func FuzzReadSnapshot(f *testing.F) {
	f.Add(encodedSnapshot(f))
	if old, err := os.ReadFile(filepath.Join("testdata", "snapshot-v1.bin")); err == nil {
		f.Add(old)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		// Repair the checksums of the chunks.
		fixed := bytes.Clone(data)
		for off := 12; off+9 <= len(fixed); {
			n := int(uint32(fixed[off]) | uint32(fixed[off+1])<<8 | uint32(fixed[off+2])<<16 | uint32(fixed[off+3])<<24)
			if n < 0 || off+9+n > len(fixed) {
				break
			}
			sum := checksum(fixed[off+4 : off+5+n])
			copy(fixed[off+5+n:], []byte{byte(sum), byte(sum >> 8), byte(sum >> 16), byte(sum >> 24)})
			off += 9 + n
		}
		for _, b := range [][]byte{data, fixed} {
			checked := CheckSnapshot(bytes.NewReader(b))
			k, err := ReadSnapshot(bytes.NewReader(b))
			if err != nil {
				continue
			}
			if checked != nil {
				t.Fatalf("a snapshot that can be read: %v", checked)
			}
			var buf bytes.Buffer
			if err := WriteSnapshot(&buf, k.Snapshot()); err != nil {
				t.Fatal(err)
			}
			again, err := ReadSnapshot(&buf)
			if err != nil || again.Digest() != k.Digest() {
				t.Fatalf("%v", err)
			}
		}
	})
}
