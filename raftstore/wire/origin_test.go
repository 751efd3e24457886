package wire

import (
	"bytes"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// TestWithOrigin: of each kind of command, all but the origin is what it was.
func TestWithOrigin(t *testing.T) {
	stamp := func(who string) string { return mvcc.OriginFrom(who, "n2") }
	all := slices.Concat(commands(), named(), deletions(), patchings())
	changed := 0
	for _, c := range all {
		raw := AppendCommand(nil, &c)
		before := bytes.Clone(raw)
		out, err := WithOrigin(raw, stamp)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(raw, before) {
			t.Fatalf("%+v: the command before was written over", c)
		}
		got, err := decodeCommand(out)
		if err != nil {
			t.Fatalf("%+v: %v", c, err)
		}
		want := c
		switch c.Type {
		case mvcc.CmdTxn:
			want.Txn.Origin = stamp(c.Txn.Origin)
		case mvcc.CmdDelete:
			want.Delete.Origin = stamp(c.Delete.Origin)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
		if !bytes.Equal(out, AppendCommand(nil, &want)) {
			t.Errorf("%+v: not as it would have been written", want)
		}
		if got.Origin() != "" {
			changed++
			back, err := WithOrigin(out, func(string) string { return c.Origin() })
			if err != nil || !bytes.Equal(back, raw) {
				t.Errorf("%+v: not what it was: %v", c, err)
			}
		}
		for n := range raw {
			if out, err := WithOrigin(raw[:n], stamp); err == nil && CheckCommand(out) == nil {
				t.Fatalf("%+v cut to %d bytes is a command", c, n)
			}
		}
	}
	if changed < 4 {
		t.Errorf("%d commands have an origin", changed)
	}
}

// FuzzWithOrigin: what is no command does not become one, and a command stays the same one.
func FuzzWithOrigin(f *testing.F) {
	for _, c := range slices.Concat(commands(), named(), deletions(), patchings()) {
		f.Add(AppendCommand(nil, &c), "n2")
	}
	f.Fuzz(func(t *testing.T, raw []byte, from string) {
		out, err := WithOrigin(raw, func(who string) string { return mvcc.OriginFrom(who, from) })
		was, wasErr := decodeCommand(raw)
		if wasErr != nil {
			if err == nil && CheckCommand(out) == nil {
				t.Fatalf("%q became a command", raw)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		got, err := decodeCommand(out)
		if err != nil {
			t.Fatal(err)
		}
		switch was.Type {
		case mvcc.CmdTxn:
			was.Txn.Origin = mvcc.OriginFrom(was.Txn.Origin, from)
		case mvcc.CmdDelete:
			was.Delete.Origin = mvcc.OriginFrom(was.Delete.Origin, from)
		}
		if diff := cmp.Diff(was, got); diff != "" {
			t.Fatal(diff)
		}
	})
}
