package quota

import (
	"errors"
	"testing"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

func put(key string, size int) mvcc.Op {
	return mvcc.Op{Type: mvcc.OpPut, Key: key, Value: make([]byte, size-len(key))}
}

// TestLimits: what a keyspace of 100 KiB takes at a quota of 128 KiB of which
// 16 KiB are the reserve.
func TestLimits(t *testing.T) {
	const kib = 1 << 10
	ks := mvcc.New()
	out := ks.Apply(1, mvcc.Batch{Time: 1, Commands: []mvcc.Command{{
		Type: mvcc.CmdTxn, ID: mvcc.CommandID{Session: 1, Seq: 1},
		Txn: mvcc.Txn{Ops: []mvcc.Op{put("/a/1", 60*kib), put("/b/1", 40*kib)}},
	}}})
	if out[0].Err != nil {
		t.Fatal(out[0].Err)
	}
	l := Limits{Bytes: 128 * kib, Reserve: 16 * kib, Folders: map[string]int64{"/b/": 45 * kib}, Prefixes: []string{"/vital/"}}
	for _, tc := range []struct {
		name      string
		ops       []mvcc.Op
		folder    string // whose quota refuses it; "all": the store's
		essential bool   // it passes with a full disk
	}{
		{"a new key before the reserve", []mvcc.Op{put("/c", 12*kib)}, "", false},
		{"a new key into the reserve", []mvcc.Op{put("/c", 13*kib)}, "all", false},
		{"a vital one into the reserve", []mvcc.Op{put("/vital/c", 28*kib)}, "", true},
		{"a vital one beyond the end", []mvcc.Op{put("/vital/c", 29*kib)}, "all", true},
		{"an old key grows a little, into the reserve", []mvcc.Op{put("/a/1", 76*kib)}, "", true},
		{"an old key grows a little, into what is vital keys' alone", []mvcc.Op{put("/vital/c", 12*kib), put("/a/1", 73*kib)}, "all", true},
		{"a vital one there, and an old key that does not grow", []mvcc.Op{put("/vital/c", 27*kib), put("/a/1", 60*kib)}, "", true},
		{"an old key grows a lot", []mvcc.Op{put("/a/1", 77*kib)}, "all", false},
		{"a folder is full", []mvcc.Op{put("/b/2", 6*kib)}, "/b/", false},
		{"an old key grows beyond its folder's", []mvcc.Op{put("/b/1", 50*kib)}, "", true},
		{"no growth", []mvcc.Op{put("/a/1", 60*kib)}, "", true},
		{"a delete", []mvcc.Op{{Type: mvcc.OpDelete, Key: "/a/1"}}, "", true},
		{"room is made in the same breath", []mvcc.Op{{Type: mvcc.OpDelete, Key: "/a/1"}, put("/c", 40*kib)}, "", false},
	} {
		txn := &mvcc.Txn{Ops: tc.ops}
		err := l.Check(ks, txn)
		var e *Error
		switch {
		case tc.folder == "":
			if err != nil {
				t.Errorf("%s: %v", tc.name, err)
			}
		case !errors.As(err, &e) || !errors.Is(err, ErrNoSpace) || e.Growth <= 0 || tc.folder == "all" && e.Folder != "" || tc.folder != "all" && e.Folder != tc.folder:
			t.Errorf("%s: %v", tc.name, err)
		}
		if got := l.Essential(ks, txn); got != tc.essential {
			t.Errorf("%s: essential %v", tc.name, got)
		}
	}
	// Small steps do not lead beyond a folder's quota without end.
	l.Folders["/b/"] = 30 * kib
	for size, ok := range map[int]bool{45 * kib: true, 47 * kib: false} {
		var e *Error
		if err := l.Check(ks, &mvcc.Txn{Ops: []mvcc.Op{put("/b/1", size)}}); (err == nil) != ok || !ok && (!errors.As(err, &e) || e.Folder != "/b/") {
			t.Errorf("%d bytes in a folder with a quota of 30 KiB: %v", size, err)
		}
	}
}
