package raftstore_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
	"github.com/clusterd/clusterd/raftstore/settle"
	"github.com/clusterd/clusterd/raftstore/wire"
)

// manyDeletes counts the commands that versions before format 2 cannot read.
func manyDeletes(seen *atomic.Int64) func(*mvcc.Batch) {
	return func(b *mvcc.Batch) {
		for i := range b.Commands {
			if b.Commands[i].Type == mvcc.CmdDelete {
				seen.Add(1)
			}
		}
	}
}

// work deletes many keys through a member and has it take a snapshot.
func work(t *testing.T, ctx context.Context, s *raftstore.Store) {
	t.Helper()
	keys := filled(t, s, 300)
	deleted, err := s.Delete(ctx, keys[:200], "")
	if err != nil {
		t.Fatal(err)
	}
	for i, kv := range deleted {
		if kv == nil {
			t.Fatalf("%s was not deleted", keys[i].Key)
		}
	}
	if err := s.Snapshot(ctx); err != nil {
		t.Fatal(err)
	}
}

// plainly reads all snapshots of a data directory as versions before packing did,
// and fails the test if one of them could not have.
func plainly(t *testing.T, dir string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "snapshots", "*", "state.bin"))
	if err != nil || len(files) == 0 {
		t.Fatalf("snapshots: %v, %v", files, err)
	}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := wire.ReadSnapshot(f); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		_ = f.Close()
	}
}

func packed(t *testing.T, dir string) (n int) {
	t.Helper()
	files, _ := filepath.Glob(filepath.Join(dir, "snapshots", "*", "state.bin"))
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(string(b), "CLDRPACK") {
			n++
		}
	}
	return n
}

// versions says what kind of program each member is when it starts next.
type versions struct {
	seen atomic.Int64 // commands that versions before format 2 cannot read
	mu   sync.Mutex
	old  map[string]bool
	soon map[string]bool // it settles within a second
}

func (v *versions) config(cfg *raftstore.Config) {
	v.mu.Lock()
	defer v.mu.Unlock()
	cfg.Inject(raftstore.Faults{Mangle: manyDeletes(&v.seen), Older: v.old[cfg.ID], LookAt: 200 * time.Millisecond})
	if v.soon[cfg.ID] {
		cfg.FormatAfter = time.Second
	}
	cfg.SnapshotEntries = 1 << 30 // only when asked
}

func (v *versions) set(of map[string]bool, id string, on bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	of[id] = on
}

// none fails the test if something came into the log that the version before
// cannot read, or is in a snapshot.
func (v *versions) none(t *testing.T, c *raftstoretest.Cluster) {
	t.Helper()
	if n := v.seen.Load(); n > 0 {
		t.Fatalf("%d commands came into the log that the version before cannot read", n)
	}
	for _, id := range c.IDs() {
		plainly(t, c.Dir(id))
	}
}

// again starts a member as another kind.
func (v *versions) again(t *testing.T, c *raftstoretest.Cluster, id string, old bool) {
	t.Helper()
	c.Stop(id)
	v.set(v.old, id, old)
	work(t, testContext(t), c.Start(id))
}

// TestMultiUpgradeAndBack: a store of a version before is opened by this one,
// member by member, and works; what this one writes the version before reads
// when it comes back. After the upgrade has stood for a while the new format is
// used by all.
func TestMultiUpgradeAndBack(t *testing.T) {
	t.Parallel()
	v := &versions{old: map[string]bool{"n0": true, "n1": true, "n2": true}, soon: map[string]bool{}}
	c := raftstoretest.New(t, 3, v.config)
	ctx := testContext(t)
	for _, old := range []bool{false, true} {
		for _, id := range c.IDs() {
			v.again(t, c, id, old)
		}
		for _, id := range c.IDs() {
			c.Wait(id+" has asked the others", func() bool {
				st := c.Store(id).Status().Format
				if st.InUse != settle.Plain {
					t.Fatalf("%s: %+v", id, st)
				}
				return old || strings.HasPrefix(st.Note, "all members know format 3")
			})
			work(t, ctx, c.Store(id))
		}
		v.none(t, c)
	}
	v.again(t, c, "n1", false)
	c.Wait("n1 knows about older members", func() bool { return strings.Contains(c.Store("n1").Status().Format.Note, "do not know it: [n0 n2]") })
	v.none(t, c)

	// Upgraded permanently. One has counted to the end, and the others follow.
	v.set(v.soon, "n2", true)
	v.again(t, c, "n0", false)
	v.again(t, c, "n2", false)
	for _, id := range c.IDs() {
		c.Wait(id+" uses the new format", func() bool { return c.Store(id).Status().Format.InUse == settle.Newest })
	}
	c.Wait("the command is used", func() bool {
		work(t, ctx, c.Store("n0"))
		return v.seen.Load() > 0
	})
	for _, id := range c.IDs() {
		work(t, ctx, c.Store(id))
		if packed(t, c.Dir(id)) == 0 {
			t.Errorf("%s packs no snapshots", id)
		}
		v.again(t, c, id, false)
		if st := c.Store(id).Status().Format; st.InUse != settle.Newest {
			t.Errorf("%s after a restart: %+v", id, st)
		}
	}
}

// TestMultiFormatOfNewMembers: a store that this version founds uses the newest
// format at once, with all its members; one that joins a store which was upgraded
// does not.
func TestMultiFormatOfNewMembers(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, nil)
	ctx := testContext(t)
	for _, id := range c.IDs() {
		c.Wait(id+" uses the newest format", func() bool { return c.Store(id).Status().Format.InUse == settle.Newest })
		work(t, ctx, c.Store(id))
		if packed(t, c.Dir(id)) == 0 {
			t.Errorf("%s packs no snapshots", id)
		}
	}

	v := &versions{old: map[string]bool{"n0": true}, soon: map[string]bool{}}
	up := raftstoretest.New(t, 2, v.config)
	up.Wait("n1 knows that n0 is older", func() bool { return strings.Contains(up.Store("n1").Status().Format.Note, "do not know it: [n0]") })
	work(t, ctx, up.Store("n1"))
	v.again(t, up, "n0", false)
	up.Wait("n1 knows that n0 is newer", func() bool { return strings.HasPrefix(up.Store("n1").Status().Format.Note, "all members know") })
	work(t, ctx, up.Store("n1"))
	v.none(t, up)
}

// TestNewerFormatIsRefused: a data directory that a later version has settled in is
// not opened.
func TestNewerFormatIsRefused(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 1, nil)
	c.Stop("n0")
	file := filepath.Join(c.Dir("n0"), settle.File)
	was, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(`{"version":1,"format":4}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := c.TryStart("n0"); err == nil || !strings.Contains(err.Error(), "format 4") {
		t.Errorf("opened: %v", err)
	}
	if err := os.WriteFile(file, was, 0o600); err != nil {
		t.Fatal(err)
	}
	c.Start("n0")
}
