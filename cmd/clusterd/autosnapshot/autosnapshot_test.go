package autosnapshot

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"filippo.io/age"
	"github.com/robfig/cron/v3"

	"github.com/clusterd/clusterd/leaktest"
	"github.com/clusterd/clusterd/raftstore/backup"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// memory is a State that several leaders share.
type memory struct {
	mu       sync.Mutex // guards all below
	rec      Record
	revision int64
	lost     bool // a Save is answered as if another had come first, and saves nothing
}

func (m *memory) Load(context.Context) (Record, int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.rec, m.revision, nil
}

func (m *memory) Save(ctx context.Context, r Record, revision int64) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.lost && r.Last != nil || revision != m.revision || ctx.Err() != nil {
		return false, ctx.Err()
	}
	m.rec, m.revision = r, m.revision+1
	return true, nil
}

// kit is a cluster whose state is always the same.
type kit struct {
	t      *testing.T
	state  *memory
	folder string
	key    *age.X25519Identity
	writes int
	write  func(ctx context.Context, w Writer) error // in the place of the archive
	failed []string
}

func newKit(t *testing.T) *kit {
	key, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	return &kit{t: t, state: &memory{}, folder: filepath.Join(t.TempDir(), "snapshots"), key: key}
}

func (k *kit) archive(w io.Writer) error {
	ks := mvcc.New()
	ks.Apply(1, mvcc.Batch{Time: 1, Commands: []mvcc.Command{{
		Type: mvcc.CmdTxn, ID: mvcc.CommandID{Session: 1, Seq: 1}, Txn: mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/registry/core/pods/a/b", Value: bytes.Repeat([]byte{7}, 200_000)}}},
	}}})
	counts, err := backup.Counts(ks)
	if err != nil {
		return err
	}
	return backup.Write(w, backup.Manifest{Cluster: "c"}, backup.Secrets{CACert: []byte("CERT"), CAKey: []byte("KEY")}, ks.Snapshot(), counts)
}

func (k *kit) taker(node, schedule string, change ...func(*Config)) *Taker {
	s, err := cron.ParseStandard(schedule)
	if err != nil {
		k.t.Fatal(err)
	}
	lock, err := backup.Recipients([]string{k.key.Recipient().String()})
	if err != nil {
		k.t.Fatal(err)
	}
	cfg := Config{
		Schedule: s, Target: Folder{k.folder, node}, Lock: lock, Node: node, State: k.state, Log: slog.New(slog.DiscardHandler),
		Cluster: func(context.Context) (string, error) { return "c", nil },
		Failed:  func(m string) { k.failed = append(k.failed, m) },
		Write: func(ctx context.Context, w Writer) error {
			k.writes++
			if k.write != nil {
				return k.write(ctx, w)
			}
			return k.archive(w)
		},
	}
	for _, c := range change {
		c(&cfg)
	}
	return New(cfg)
}

// lead runs a Taker for some of the bubble's time.
func (k *kit) lead(t *Taker, d time.Duration) {
	ctx, cancel := context.WithTimeout(k.t.Context(), d)
	defer cancel()
	if err := t.Run(ctx); err != nil {
		k.t.Errorf("run: %v", err)
	}
}

func (k *kit) files() []string {
	list, err := os.ReadDir(k.folder)
	if err != nil {
		k.t.Fatal(err)
	}
	var out []string
	for _, f := range list {
		out = append(out, f.Name())
	}
	return out
}

// TestSchedule: a bubble's time begins at midnight, 2000-01-01. Files are whole, sealed,
// and as many as are to be kept; one that a leader missed is taken by the next.
func TestSchedule(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKit(t)
		daily := func(node string) *Taker {
			return k.taker(node, "0 3 * * *", func(c *Config) { c.Keep = 2 })
		}
		k.lead(daily("n1"), 2*time.Hour)
		if k.writes > 0 {
			t.Fatalf("%d snapshots before the first is due", k.writes)
		}
		k.lead(daily("n1"), 2*time.Hour)
		if got, want := k.files(), []string{"c-20000101T030000Z.backup"}; !slices.Equal(got, want) {
			t.Fatalf("%v, want %v", got, want)
		}
		f, err := os.Open(filepath.Join(k.folder, k.files()[0]))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		plain, err := backup.Open(f, backup.Key{k.key})
		if err != nil {
			t.Fatal(err)
		}
		if c, err := backup.Read(plain); err != nil || c.Digest.Keys != 1 {
			t.Fatalf("read again: %+v, %v", c, err)
		}
		if st, err := f.Stat(); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("mode %v, %v", st.Mode(), err)
		}
		k.lead(daily("n2"), time.Hour) // of another leader, in the same directory
		if k.writes != 1 {
			t.Errorf("another leader took it again: %d", k.writes)
		}
		time.Sleep(4 * 24 * time.Hour) // nobody leads
		k.lead(daily("n2"), time.Hour)
		k.lead(daily("n1"), 24*time.Hour)
		want := []string{"c-20000105T030000Z.backup", "c-20000106T030000Z.backup"}
		if got := k.files(); !slices.Equal(got, want) || k.writes != 3 {
			t.Errorf("%v of %d, want %v", got, k.writes, want)
		}
		if r := k.state.rec; r.Last == nil || r.Last.Node != "n1" || r.Last.Revision != 2 || r.Last.Bytes < 200_000 || r.Failure != nil {
			t.Errorf("record %+v, last %+v", r, r.Last)
		}
	})
}

// TestEvery: times of an interval are counted from the first, whatever a snapshot takes.
func TestEvery(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKit(t)
		k.lead(k.taker("n1", "@every 6h", func(c *Config) { c.KeepAge = 13 * time.Hour }), 25*time.Hour)
		// The newest ones: what is older than 13 h at the last one is gone.
		if got := k.files(); len(got) != 3 || k.writes != 4 {
			t.Errorf("%v of %d", got, k.writes)
		}
	})
}

// TestNotTwice: a leader that could not record what it had taken, and the next one, make one
// file of it.
func TestNotTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKit(t)
		k.lead(k.taker("n1", "@every 1h"), time.Second)
		time.Sleep(time.Hour)
		k.state.lost = true
		k.lead(k.taker("n1", "@every 1h"), time.Second/2)
		k.state.lost = false
		k.lead(k.taker("n2", "@every 1h"), time.Minute)
		if r := k.state.rec; len(k.files()) != 1 || k.writes != 1 || r.Last == nil {
			t.Errorf("%v, %d written, record %+v", k.files(), k.writes, r)
		}
	})
}

// TestFailure: nothing of a file that could not be written is left; it is tried again,
// one event tells of it, and another leader tries at once.
func TestFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKit(t)
		k.write = func(_ context.Context, w Writer) error {
			_, err := w.Write(make([]byte, 1<<20))
			return errors.Join(err, errors.New("no space left on device"))
		}
		k.lead(k.taker("n1", "@every 12h"), 12*time.Hour+30*time.Minute)
		if got := k.files(); len(got) > 0 {
			t.Errorf("left: %v", got)
		}
		if len(k.failed) != 1 || !strings.Contains(k.failed[0], "no space left on device") {
			t.Errorf("told %q", k.failed)
		}
		f := k.state.rec.Failure
		if f == nil || f.Node != "n1" || f.Tries != k.writes || k.writes < 4 || k.writes > 6 { // after 1, 2, 4, 8, 16 min
			t.Errorf("%d tries, failure %+v", k.writes, f)
		}
		k.write = nil
		k.lead(k.taker("n2", "@every 12h"), time.Minute)
		if got := k.files(); len(got) != 1 || k.state.rec.Failure != nil {
			t.Errorf("%v, failure %+v", got, k.state.rec.Failure)
		}
	})
}

// TestLeftOfTries: what tries of a leader leave does not pile up while it leads.
func TestLeftOfTries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKit(t)
		k.write = func(context.Context, Writer) error {
			f, err := os.CreateTemp(k.folder, Unfinished+"n1_")
			if err != nil {
				return err
			}
			return errors.Join(f.Close(), errors.New("the store does not answer"))
		}
		k.lead(k.taker("n1", "@every 12h"), 12*time.Hour+30*time.Minute)
		if got := k.files(); k.writes < 4 || len(got) != 1 {
			t.Errorf("%d tries left %q", k.writes, got)
		}
	})
}

// TestFoundFiles: a file that was there before its time, or is empty, is no snapshot.
func TestFoundFiles(t *testing.T) {
	k := newKit(t)
	slot := time.Now().UTC().Truncate(time.Second)
	taker := k.taker("n1", "@every 1h")
	path := filepath.Join(k.folder, fileName("c", slot))
	for what, c := range map[string]struct {
		text string
		at   time.Time
		ok   bool
	}{
		"empty":          {"", slot, false},
		"of before":      {"text", slot.Add(-time.Hour), false},
		"by other clock": {"text", slot.Add(-10 * time.Minute), true},
		"of then":        {"text", slot.Add(time.Minute), true},
	} {
		if err := errors.Join(os.MkdirAll(k.folder, 0o700), os.WriteFile(path, []byte(c.text), 0o600), os.Chtimes(path, c.at, c.at)); err != nil {
			t.Fatal(err)
		}
		s, err := taker.take(t.Context(), slot)
		if ok := err == nil && s.Bytes == int64(len(c.text)); ok != c.ok || !c.ok && !strings.Contains(err.Error(), "remove it") {
			t.Errorf("%s: %+v, %v", what, s, err)
		}
	}
	if k.writes > 0 {
		t.Errorf("%d were written over what was there", k.writes)
	}
}

// TestDamaged: what reads otherwise than it was written gets no name.
func TestDamaged(t *testing.T) {
	k := newKit(t)
	k.write = func(_ context.Context, w Writer) error {
		var b bytes.Buffer
		if err := k.archive(&b); err != nil {
			return err
		}
		raw := b.Bytes()
		raw[len(raw)/2] ^= 1
		_, err := w.Write(raw)
		return err
	}
	if _, err := k.taker("n1", "@every 1h").take(t.Context(), time.Now()); !errors.Is(err, backup.ErrDamaged) {
		t.Errorf("%v", err)
	}
	if got := k.files(); len(got) > 0 {
		t.Errorf("left: %v", got)
	}
}

// TestLeadershipIsLost: in the middle of a file, which goes.
func TestLeadershipIsLost(t *testing.T) {
	k := newKit(t)
	ctx, cancel := context.WithCancel(t.Context())
	k.write = func(_ context.Context, w Writer) error {
		cancel()
		return k.archive(w)
	}
	if _, err := k.taker("n1", "@every 1h").take(ctx, time.Now()); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if got := k.files(); len(got) > 0 {
		t.Errorf("left: %v", got)
	}
}

// TestForeignFiles: only the cluster's own snapshots are removed, and unfinished files
// of this node, or old ones.
func TestForeignFiles(t *testing.T) {
	k := newKit(t)
	if err := os.Mkdir(k.folder, 0o700); err != nil {
		t.Fatal(err)
	}
	now := time.Date(2026, 11, 27, 3, 0, 0, 0, time.UTC)
	stay := []string{
		".clusterd-snapshot-n1-a_1", "c-20261127T030000Z.backup", "c-20261127T030000Z.backup.old", "c-notes.txt",
		"cluster.backup", "other-20200101T030000Z.backup",
	}
	for _, name := range append([]string{".clusterd-snapshot-n1_1", ".clusterd-snapshot-n2_1", "c-20261126T030000Z.backup"}, stay...) {
		if err := os.WriteFile(filepath.Join(k.folder, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chtimes(filepath.Join(k.folder, ".clusterd-snapshot-n2_1"), now, now.Add(-25*time.Hour)); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(filepath.Join(k.folder, ".clusterd-snapshot-n1-a_1"), now, now); err != nil {
		t.Fatal(err)
	}
	taker := k.taker("n1", "@every 1h", func(c *Config) { c.Keep = 1 })
	if err := errors.Join(taker.cleanUp(t.Context(), now), taker.prune(t.Context(), now)); err != nil {
		t.Fatal(err)
	}
	if got := k.files(); !slices.Equal(got, stay) {
		t.Errorf("left: %q, want %q", got, stay)
	}
}

// TestNoFolder: a directory in a directory that is not there is not made.
func TestNoFolder(t *testing.T) {
	k := newKit(t)
	k.folder = filepath.Join(k.folder, "of", "a", "disk")
	if _, err := k.taker("n1", "@every 1h").take(t.Context(), time.Now()); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "folder of snapshots") {
		t.Errorf("%v", err)
	}
}
