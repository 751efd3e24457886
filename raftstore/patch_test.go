package raftstore_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftlog"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
	"github.com/clusterd/clusterd/raftstore/settle"
)

// eachPatch calls f with every patch of an entry.
func eachPatch(b *mvcc.Batch, f func(*mvcc.Patch)) {
	for i := range b.Commands {
		for j := range b.Commands[i].Txn.Ops {
			if p := b.Commands[i].Txn.Ops[j].Patch; p != nil {
				f(p)
			}
		}
	}
}

func leaseValue(n int) string {
	return "k8s lease of the node a: " + strings.Repeat("what it holds and stays as it is; ", 8) + fmt.Sprintf("renewed at %09d; the end of it", n)
}

// renew puts a value that differs from the one that is there in some bytes. The
// comparison is of what this member holds: it may fail.
func renew(t testing.TB, ctx context.Context, s *raftstore.Store, key string, n int) mvcc.TxnResult {
	t.Helper()
	kv, _, err := s.Get(ctx, key, raftstore.ReadOptions{Stale: true})
	if err != nil {
		t.Fatal(err)
	}
	var rev int64
	if kv != nil {
		rev = kv.ModRevision
	}
	res, err := s.Txn(ctx, mvcc.Txn{
		Origin: "system:node:a", Compares: []mvcc.Compare{{Key: key, ModRevision: rev}},
		Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: key, Value: []byte(leaseValue(n))}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return res
}

// TestMultiPatches: values that differ little from those before them come into the
// log as patches, through any member, and all members have the same.
func TestMultiPatches(t *testing.T) {
	t.Parallel()
	var seen atomic.Int64
	var logged atomic.Int64
	c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) {
		cfg.Inject(raftstore.Faults{Mangle: func(b *mvcc.Batch) { eachPatch(b, func(*mvcc.Patch) { seen.Add(1) }) }})
		cfg.Events.Committed = func(_, bytes int, _ time.Duration) { logged.Add(int64(bytes)) }
		cfg.SnapshotEntries = 40 // raft cuts its log: what comes behind has its bases in snapshots
	})
	ctx := testContext(t)
	for _, id := range c.IDs() {
		key := "/leases/" + id
		c.Wait("patches are used by "+id, func() bool {
			before := seen.Load()
			renew(t, ctx, c.Store(id), key, 1)
			renew(t, ctx, c.Store(id), key, 2)
			return seen.Load() > before
		})
	}
	const rounds = 60
	before := logged.Load()
	var wg sync.WaitGroup
	for _, id := range c.IDs() {
		wg.Go(func() {
			for n := range rounds {
				if res := renew(t, ctx, c.Store(id), "/leases/"+id, 100+n); !res.Succeeded {
					t.Errorf("%s: %+v", id, res)
				}
			}
		})
	}
	wg.Wait()
	each := (logged.Load() - before) / int64(3*rounds)
	t.Logf("%d bytes of log for a renewal of a value of %d bytes", each, len(leaseValue(1)))
	if each > int64(len(leaseValue(1)))*2/3 {
		t.Errorf("%d bytes of log for each renewal", each)
	}
	c.Stop("n1")
	for n := range 50 {
		// A leader may have changed, and the next one is behind for a moment.
		c.Wait("a renewal", func() bool { return renew(t, ctx, c.Leader(), "/leases/n0", 500+n).Succeeded })
	}
	c.Start("n1") // by log or by snapshot
	for _, id := range c.IDs() {
		for _, of := range c.IDs() {
			kv, _, err := c.Store(id).Get(ctx, "/leases/"+of, raftstore.ReadOptions{})
			want := leaseValue(100 + rounds - 1)
			if of == "n0" {
				want = leaseValue(549)
			}
			if err != nil || string(kv.Value) != want {
				t.Errorf("%s has for %s %q, %v", id, of, kv.Value, err)
			}
		}
	}
}

// TestMultiPatchesBesideOlderMember: while a member is of the version before, which
// would stop at a patch, none comes into the log; values are written all the same.
func TestMultiPatchesBesideOlderMember(t *testing.T) {
	t.Parallel()
	var seen atomic.Int64
	var renewed atomic.Bool
	c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) {
		f := raftstore.Faults{Mangle: func(b *mvcc.Batch) { eachPatch(b, func(*mvcc.Patch) { seen.Add(1) }) }, LookAt: 200 * time.Millisecond}
		if cfg.ID == "n2" && !renewed.Load() {
			f.Knows = settle.Packed
		}
		cfg.Inject(f)
		cfg.FormatAfter = time.Second
	})
	ctx := testContext(t)
	for _, id := range c.IDs() {
		c.Wait(id+" has its format", func() bool { return c.Store(id).Status().Format.InUse > 0 })
	}
	// For longer than an answer is believed: it is asked for again.
	for n, end := 0, time.Now().Add(3*time.Second); time.Now().Before(end); n++ {
		for _, id := range c.IDs() {
			renew(t, ctx, c.Store(id), "/leases/"+id, n)
		}
	}
	if n := seen.Load(); n > 0 {
		t.Fatalf("%d patches came into the log that a member does not know", n)
	}
	keys := filled(t, c.Store("n0"), 20)
	if _, err := c.Store("n2").Delete(ctx, keys, ""); err != nil { // the format before goes on
		t.Fatal(err)
	}
	renewed.Store(true)
	c.Stop("n2")
	c.Start("n2")
	for _, id := range c.IDs() {
		c.Wait(id+" uses patches", func() bool {
			before := seen.Load()
			for n := range 3 {
				renew(t, ctx, c.Store(id), "/leases/"+id, 100+n)
			}
			return c.Store(id).Status().Format.InUse == settle.Patched && seen.Load() > before
		})
	}
}

// TestMultiWrongPatch: a patch that does not give the value of its maker changes
// nothing anywhere, and the value is written as a whole, once.
func TestMultiWrongPatch(t *testing.T) {
	t.Parallel()
	var wrong atomic.Int64
	c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) {
		cfg.Inject(raftstore.Faults{Mangle: func(b *mvcc.Batch) {
			eachPatch(b, func(p *mvcc.Patch) {
				p.Sum ^= 1
				wrong.Add(1)
			})
		}})
	})
	ctx := testContext(t)
	for _, id := range c.IDs() {
		n := 0
		c.Wait("wrong patches of "+id, func() bool {
			before := wrong.Load()
			n++
			res := renew(t, ctx, c.Store(id), "/leases/"+id, n)
			if !res.Succeeded {
				t.Fatalf("%s: %+v", id, res)
			}
			if got := get(t, c.Store(id), "/leases/"+id); got != leaseValue(n) {
				t.Fatalf("%s: %q", id, got)
			}
			return wrong.Load() > before
		})
		kv, _, err := c.Store(id).Get(ctx, "/leases/"+id, raftstore.ReadOptions{})
		if err != nil || kv.Version != int64(n) {
			t.Errorf("%s: written %d times instead of %d, %v", id, kv.Version, n, err)
		}
	}
}

// TestMultiPatchOfAnotherValue: a member at which a patch gives something else than
// at the others has another keyspace, and stops.
func TestMultiPatchOfAnotherValue(t *testing.T) {
	t.Parallel()
	var broken atomic.Bool
	c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) {
		raftstoretest.Steady(cfg)
		if cfg.ID == "n2" {
			cfg.Inject(raftstore.Faults{Mangle: func(b *mvcc.Batch) {
				eachPatch(b, func(p *mvcc.Patch) {
					if broken.CompareAndSwap(false, true) {
						p.Sum ^= 1
					}
				})
			}})
		}
	})
	knowsMembers(c)
	ctx := testContext(t)
	n := 0
	c.Wait("n2 has refused a patch", func() bool {
		n++
		renew(t, ctx, c.Store("n0"), "/leases/a", n)
		return broken.Load()
	})
	s := c.Store("n2")
	select {
	case <-s.Failed():
	case <-ctx.Done():
		t.Fatal("it goes on")
	}
	if err := s.Err(); !errors.Is(err, raftstore.ErrDiverged) {
		t.Error(err)
	}
	c.Kill("n2")
	s = c.Start("n2")
	c.Wait("it reads what the others do", func() bool {
		kv, _, err := s.Get(testContext(t), "/leases/a", raftstore.ReadOptions{})
		return err == nil && kv != nil && string(kv.Value) == leaseValue(n)
	})
	c.Agree()
}

// TestMultiMayWait: writes that may wait are gathered into few entries, wherever
// they come from, and others do not wait.
func TestMultiMayWait(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var entries [][2]int // commands, bytes
	c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) {
		cfg.MayWait = func(origin, key []byte) bool {
			return strings.HasPrefix(string(key), "/leases/") && strings.HasPrefix(string(origin), "system:node:")
		}
		cfg.MayWaitFor = time.Second // a busy machine needs a while to bring them all
		cfg.Events.Committed = func(commands, bytes int, _ time.Duration) {
			mu.Lock()
			defer mu.Unlock()
			entries = append(entries, [2]int{commands, bytes})
		}
	})
	ctx := testContext(t)
	const nodes, rounds = 40, 4
	var wg sync.WaitGroup
	for i := range nodes {
		s := c.Store(c.IDs()[i%3])
		wg.Go(func() {
			for n := range rounds {
				if res := renew(t, ctx, s, fmt.Sprintf("/leases/%d", i), n); !res.Succeeded {
					t.Errorf("node %d: %+v", i, res)
				}
			}
		})
	}
	wg.Wait()
	mu.Lock()
	commands, most := 0, 0
	for _, e := range entries {
		commands, most = commands+e[0], max(most, e[0])
	}
	n := len(entries)
	mu.Unlock()
	t.Logf("%d commands in %d entries, at most %d", commands, n, most)
	if commands < nodes*rounds || most < nodes/4 || n > commands/4 {
		t.Errorf("%d commands in %d entries, at most %d", commands, n, most)
	}
	// A leader that is lost takes none with it.
	c.Agree() // the comparison is of what the follower holds
	follower := c.Follower()
	done := make(chan mvcc.TxnResult, 1)
	go func() { done <- renew(t, ctx, follower, "/leases/0", 100) }()
	c.Kill(c.LeaderID())
	if res := <-done; !res.Succeeded {
		t.Errorf("%+v", res)
	}
}

// What a renewal of a node's Lease costs the disk of a server, with ten nodes that
// renew each second: as the kernel counts it, in pages.
func BenchmarkRenewals(b *testing.B) {
	for _, tt := range []struct {
		name    string
		knows   int
		mayWait bool
	}{{"whole", settle.Packed, false}, {"patched", settle.Newest, false}, {"whole and gathered", settle.Packed, true}, {"patched and gathered", settle.Newest, true}} {
		b.Run(tt.name, func(b *testing.B) {
			var entries atomic.Int64
			c := raftstoretest.New(b, 1, func(cfg *raftstore.Config) {
				cfg.Inject(raftstore.Faults{Knows: tt.knows})
				cfg.LogEngine = raftlog.Segments
				if tt.mayWait {
					cfg.MayWait = func(_, key []byte) bool { return strings.HasPrefix(string(key), "/leases/") }
				}
				cfg.Events.Committed = func(int, int, time.Duration) { entries.Add(1) }
			})
			ctx, s := context.Background(), c.Leader()
			const nodes = 10
			value := strings.Repeat("k", 270) // with leaseValue as long as a Lease
			one := func(node, n int) {
				key := fmt.Sprintf("/leases/%d", node)
				kv, _, err := s.Get(ctx, key, raftstore.ReadOptions{Stale: true})
				if err != nil {
					b.Error(err)
					return
				}
				var rev int64
				if kv != nil {
					rev = kv.ModRevision
				}
				if _, err := s.Txn(ctx, mvcc.Txn{
					Origin: "system:node:worker-0123", Compares: []mvcc.Compare{{Key: key, ModRevision: rev}},
					Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: key, Value: []byte(value + leaseValue(n))}},
				}); err != nil {
					b.Error(err)
				}
			}
			for n := range 3 {
				for node := range nodes {
					one(node, n)
				}
			}
			before, began, made := written(b), time.Now(), entries.Load()
			b.ResetTimer()
			var wg sync.WaitGroup
			for node := range nodes {
				wg.Go(func() {
					time.Sleep(time.Duration(node) * time.Second / nodes) // they are spread
					next := time.NewTicker(time.Second)
					defer next.Stop()
					for n := range b.N {
						one(node, 1000+n)
						<-next.C
					}
				})
			}
			wg.Wait()
			renewals := float64(nodes * b.N)
			b.ReportMetric(float64(written(b)-before)/renewals, "disk-B/renewal")
			b.ReportMetric(float64(entries.Load()-made)/time.Since(began).Seconds(), "entries/s")
		})
	}
}

// written is what this process has made dirty of files' pages.
func written(b *testing.B) (n int64) {
	data, err := os.ReadFile("/proc/self/io")
	if err != nil {
		b.Skip(err)
	}
	for line := range strings.Lines(string(data)) {
		if _, err := fmt.Sscanf(line, "write_bytes: %d", &n); err == nil {
			return n
		}
	}
	b.Fatal("/proc/self/io has no write_bytes")
	return 0
}
