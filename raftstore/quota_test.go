package raftstore_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// A full store refuses what is bulky, and lets itself be cleaned up.
func TestMultiQuota(t *testing.T) {
	t.Parallel()
	const kib = 1 << 10
	c := raftstoretest.New(t, 1, func(cfg *raftstore.Config) {
		cfg.QuotaBytes, cfg.ReserveBytes = 1024*kib, 128*kib
		cfg.VitalPrefixes = []string{"/leases/"}
		cfg.FolderQuotas = map[string]int64{"/secrets/a/": 100 * kib}
	})
	s := c.Store("n0")
	long := func(n int) string { return strings.Repeat("x", n) }
	refused := func(what, folder, key string, n int) {
		t.Helper()
		var quota *raftstore.QuotaError
		_, err := s.Txn(testContext(t), put(key, long(n)))
		if !errors.As(err, &quota) || !errors.Is(err, raftstore.ErrNoSpace) || quota.Folder != folder || quota.Used == 0 {
			t.Errorf("%s: %v", what, err)
		}
	}
	mustPut(t, s, "/secrets/a/1", long(60*kib))
	refused("second secret beyond the folder's quota", "/secrets/a/", "/secrets/a/2", 60*kib)
	mustPut(t, s, "/secrets/b/2", long(60*kib))
	for _, key := range []string{"/cm/1", "/cm/2", "/cm/3"} {
		mustPut(t, s, key, long(250*kib))
	}
	refused("a new key into the reserve", "", "/cm/4", 40*kib)
	refused("a small new key into the reserve", "", "/cm/4", 30*kib)
	refused("an old key that swells", "", "/cm/1", 290*kib)

	mustPut(t, s, "/cm/1", long(258*kib)) // marked for deletion, say: in the reserve
	mustPut(t, s, "/cm/2", long(250*kib)) // no growth
	mustPut(t, s, "/leases/node-1", long(20*kib))
	mustPut(t, s, "/secrets/a/1", long(62*kib))
	// Small growth fills the reserve but for its last quarter.
	var err error
	for n := 265 * kib; err == nil; n += 15 * kib {
		_, err = s.Txn(testContext(t), put("/cm/3", long(n)))
	}
	var quota *raftstore.QuotaError
	if used := s.Status().Keyspace.Bytes; !errors.As(err, &quota) || used < 970*kib || used > 992*kib {
		t.Errorf("small growth ended at %d: %v", used, err)
	}
	// So it does a folder's quota, but for a little.
	for n := 64 * kib; err == nil || n == 64*kib; n += 2 * kib {
		_, err = s.Txn(testContext(t), put("/secrets/a/1", long(n)))
	}
	for i := 3; s.Status().Keyspace.Bytes < 1010*kib; i++ {
		mustPut(t, s, fmt.Sprintf("/leases/node-%d", i), long(10*kib))
	}
	refused("even leases beyond the end", "", "/leases/node-2", 20*kib)
	mustPut(t, s, "/leases/node-1", long(20*kib)) // heartbeats do not grow
	swap := mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpDelete, Key: "/cm/1"}, {Type: mvcc.OpPut, Key: "/cm/5", Value: []byte(long(100 * kib))}}}
	if _, err := s.Txn(testContext(t), swap); err != nil {
		t.Errorf("a transaction that makes room: %v", err)
	}
	mustPut(t, s, "/cm/4", long(10*kib))
}

// Every member names the same writers and places.
func TestMultiTop(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) { cfg.FolderQuotas = map[string]int64{"/r/pods/a/": 1 << 20} })
	write := func(origin string, keys ...string) {
		for _, key := range keys {
			txn := put(key, "12345")
			txn.Origin = origin
			if _, err := c.Follower().Txn(testContext(t), txn); err != nil {
				t.Fatal(err)
			}
		}
	}
	write("ann", "/r/pods/a/1", "/r/pods/a/2", "/r/nodes/n", "/r/pods/a/1")
	write("bob", "/r/pods/b/1")
	long := put("/r/pods/c/1", "")
	long.Origin = strings.Repeat("o", 257)
	if _, err := c.Leader().Txn(testContext(t), long); !errors.Is(err, raftstore.ErrTooLarge) {
		t.Errorf("origin without end: %v", err)
	}
	c.Agree()
	for id, s := range c.Running() {
		top := s.Top()
		if len(top.Writers) != 2 || top.Writers[0].Origin != "ann" || top.Writers[0].Writes != 4 || top.Writers[1].Writes != 1 ||
			top.Writers[0].Bytes != 11+5+11+5+10+5+11+5 {
			t.Errorf("%s: writers %+v", id, top.Writers)
		}
		if h := top.History; h.Bytes != top.Writers[0].HistoryBytes+top.Writers[1].HistoryBytes || top.Writers[0].HistoryBytes <= top.Writers[1].HistoryBytes ||
			h.MaxBytes != 64<<20 || h.MaxAge != time.Hour.Milliseconds() || h.Age < 0 {
			t.Errorf("%s: history %+v of %+v", id, h, top.Writers)
		}
		places := map[string]raftstore.FolderUse{}
		for _, f := range top.Folders {
			places[f.Folder] = f
		}
		if a := places["/r/pods/a/"]; len(places) != 3 || a.Live != (mvcc.Use{Keys: 2, Bytes: 32}) || a.Writes != 3 || a.Quota != 1<<20 ||
			top.Folders[0].Folder != "/r/pods/a/" || places["/r/nodes/"].Live.Keys != 1 {
			t.Errorf("%s: folders %+v", id, top.Folders)
		}
		if top.Live != (mvcc.Use{Keys: 4, Bytes: 32 + 15 + 16}) {
			t.Errorf("%s: live %+v", id, top.Live)
		}
	}
}

// The past of a key is the same on every member, and after a restore.
func TestMultiHistory(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, nil)
	first := mustPut(t, c.Follower(), "/a", "1")
	second := mustPut(t, c.Leader(), "/a", "2")
	for id, s := range c.Running() {
		h, err := s.History(testContext(t), "/a", 0, raftstore.ReadOptions{})
		if err != nil || len(h.Changes) != 2 || h.Changes[0].KV.ModRevision != first.Revision || string(h.Changes[1].Prev.Value) != "1" {
			t.Fatalf("%s: %+v, %v", id, h, err)
		}
		if rev, err := s.RevisionAt(time.UnixMilli(h.Changes[1].Time)); err != nil || rev != second.Revision {
			t.Errorf("%s: at the second change's time: %d, %v", id, rev, err)
		}
		if _, err := s.RevisionAt(time.UnixMilli(h.Changes[0].Time).Add(-time.Hour)); !errors.Is(err, mvcc.ErrCompacted) {
			t.Errorf("%s: an hour before: %v", id, err)
		}
		if e := s.Extent(); e.Newest != second.Revision || e.Oldest >= first.Revision {
			t.Errorf("%s: %+v", id, e)
		}
	}
}
