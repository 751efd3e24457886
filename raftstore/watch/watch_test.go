package watch

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/clusterd/clusterd/leaktest"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const testTimeout = 30 * time.Second

// source is a keyspace that can be written and replaced.
type source struct {
	ks    atomic.Pointer[mvcc.Keyspace]
	hub   *Hub
	mu    sync.Mutex
	index uint64
}

func newSource(t *testing.T) *source {
	s := &source{}
	s.ks.Store(mvcc.New())
	s.hub = NewHub(s, Listener{})
	t.Cleanup(s.hub.Close)
	return s
}

func (s *source) Revision() int64 { return s.ks.Load().Revision() }
func (s *source) Events(from int64, limit int) ([]mvcc.Event, int64, error) {
	return s.ks.Load().Events(from, limit)
}

func (s *source) apply(cs ...mvcc.Command) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.index++
	for i := range cs {
		cs[i].ID = mvcc.CommandID{Session: s.index, Seq: uint64(i)}
		cs[i].Basis = s.index - 1
	}
	s.ks.Load().Apply(s.index, mvcc.Batch{Time: int64(s.index), Commands: cs})
	s.hub.Notify()
}

func (s *source) put(keys ...string) {
	var t mvcc.Txn
	for _, k := range keys {
		t.Ops = append(t.Ops, mvcc.Op{Type: mvcc.OpPut, Key: k})
	}
	s.apply(mvcc.Command{Type: mvcc.CmdTxn, Txn: t})
}

func (s *source) limitHistory(bytes int64) {
	s.apply(mvcc.Command{Type: mvcc.CmdLimits, Limits: mvcc.Limits{HistoryBytes: bytes, HistoryAgeMillis: 1 << 40, Window: 100}})
}

func (s *source) watch(t *testing.T, prefix string, from int64) *Watcher {
	t.Helper()
	w, err := s.hub.Watch(t.Context(), prefix, from)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func next(t *testing.T, w *Watcher) Batch {
	t.Helper()
	select {
	case b, ok := <-w.C():
		if !ok {
			t.Fatalf("ended: %v", w.Err())
		}
		return b
	case <-time.After(testTimeout):
		t.Fatal("nothing came")
	}
	return Batch{}
}

// until collects "key@revision" up to a revision and checks order, wholeness
// and that Revision never goes back.
func until(t *testing.T, w *Watcher, rev int64) (got []string) {
	t.Helper()
	var at, last int64
	for at < rev {
		b := next(t, w)
		if b.Revision < at {
			t.Fatalf("progress went from %d back to %d", at, b.Revision)
		}
		for _, e := range b.Events {
			if e.KV.ModRevision <= at || e.KV.ModRevision > b.Revision || e.KV.ModRevision < last {
				t.Fatalf("event of %d in a batch from %d to %d, after %d", e.KV.ModRevision, at, b.Revision, last)
			}
			last = e.KV.ModRevision
			got = append(got, fmt.Sprintf("%s@%d", e.KV.Key, e.KV.ModRevision))
		}
		at = b.Revision
	}
	return got
}

func ended(t *testing.T, w *Watcher) error {
	t.Helper()
	deadline := time.After(testTimeout)
	for {
		select {
		case _, ok := <-w.C():
			if !ok {
				return w.Err()
			}
		case <-deadline:
			t.Fatal("did not end")
		}
	}
}

func TestWatch(t *testing.T) {
	s := newSource(t)
	s.put("/a/1") // 2
	s.put("/b/1") // 3
	now := s.watch(t, "/a/", 0)
	past := s.watch(t, "/a/", 2)
	all := s.watch(t, "", 3)
	ahead := s.watch(t, "/a/", 6)
	s.put("/a/2", "/b/2", "/a/3") // 4
	s.put("/a/1")                 // 5
	s.put("/a/1")                 // 6
	for name, tc := range map[string]struct {
		w    *Watcher
		want string
	}{
		"now":   {now, "[/a/2@4 /a/3@4 /a/1@5 /a/1@6]"},
		"past":  {past, "[/a/1@2 /a/2@4 /a/3@4 /a/1@5 /a/1@6]"},
		"all":   {all, "[/b/1@3 /a/2@4 /b/2@4 /a/3@4 /a/1@5 /a/1@6]"},
		"ahead": {ahead, "[/a/1@6]"},
	} {
		if got := fmt.Sprint(until(t, tc.w, 6)); got != tc.want {
			t.Errorf("%s: %s, want %s", name, got, tc.want)
		}
		tc.w.Stop()
		if err := ended(t, tc.w); err != nil {
			t.Errorf("%s: stopped with %v", name, err)
		}
	}
}

func TestProgress(t *testing.T) {
	s := newSource(t)
	w := s.watch(t, "/quiet/", 0)
	for range 100 {
		s.put("/noise")
		w.RequestProgress()
		at := s.Revision()
		if got := until(t, w, at); len(got) != 0 {
			t.Fatalf("got %v", got)
		}
	}
}

// A watcher that does not read costs the one who applies nothing, and has
// missed nothing when it begins to read.
func TestSlowWatcherCatchesUp(t *testing.T) {
	s := newSource(t)
	w := s.watch(t, "/k", 0)
	const n = 3 * maxQueue
	for i := range n {
		s.put(fmt.Sprintf("/k/%d", i%7), "/other")
	}
	if got := until(t, w, n+1); len(got) != n {
		t.Errorf("%d events of %d", len(got), n)
	}
	s.put("/k/live")
	if got := until(t, w, n+2); len(got) != 1 {
		t.Errorf("after it caught up: %v", got)
	}
}

// One that reads too slowly for the history gets an error, with the oldest
// revision.
func TestTooSlowWatcherIsCut(t *testing.T) {
	s := newSource(t)
	w := s.watch(t, "", 0)
	s.limitHistory(1000)
	for range 3 * maxQueue {
		s.put("/k")
	}
	err := ended(t, w)
	var compacted *mvcc.CompactedError
	if !errors.As(err, &compacted) || compacted.Oldest <= 1 {
		t.Errorf("ended with %v", err)
	}
	if _, err := s.hub.Watch(t.Context(), "", 2); !errors.Is(err, mvcc.ErrCompacted) {
		t.Errorf("a watch from a forgotten revision: %v", err)
	}
	// The hub itself may still be behind what is kept. A watcher that starts now misses nothing
	// of what is gone.
	w = s.watch(t, "", 0)
	s.put("/again")
	until(t, w, s.Revision())
}

// TestHubBehind: the hub finds that what it would read next is gone. It ends the
// watchers that needed it, and none that began after it.
func TestHubBehind(t *testing.T) {
	s := newSource(t)
	old := s.watch(t, "", 0)
	old.RequestProgress()
	until(t, old, s.Revision())
	s.put("/k")
	until(t, old, s.Revision())
	late := &Watcher{hub: s.hub, next: s.Revision() + 100, synced: true, stop: make(chan struct{})}
	early := &Watcher{hub: s.hub, next: s.Revision() + 1, synced: true, stop: make(chan struct{})}
	s.hub.mu.Lock()
	s.hub.watchers[late], s.hub.watchers[early] = struct{}{}, struct{}{}
	s.hub.mu.Unlock()
	oldest := s.Revision() + 50
	s.hub.cut(&mvcc.CompactedError{Oldest: oldest}, oldest)
	if early.Err() == nil || late.Err() != nil {
		t.Errorf("who needs what is gone: %v; who does not: %v", early.Err(), late.Err())
	}
	if err := ended(t, old); !errors.Is(err, mvcc.ErrCompacted) {
		t.Errorf("the one that followed: %v", err)
	}
	s.hub.remove(late)
	s.hub.remove(early)
}

func TestEnds(t *testing.T) {
	s := newSource(t)
	ctx, cancel := context.WithCancel(t.Context())
	w, err := s.hub.Watch(ctx, "", 0)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := ended(t, w); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	w = s.watch(t, "", 0)
	for range 100 {
		s.put("/x") // more than the channel holds: the watcher is blocked sending
	}
	s.hub.Close()
	if err := ended(t, w); !errors.Is(err, ErrClosed) {
		t.Errorf("closed: %v", err)
	}
	if _, err := s.hub.Watch(t.Context(), "", 0); !errors.Is(err, ErrClosed) {
		t.Errorf("watch after close: %v", err)
	}
	if n := s.hub.Len(); n != 0 {
		t.Errorf("%d watchers left", n)
	}
	w.RequestProgress()
}

func TestReplacedKeyspace(t *testing.T) {
	s := newSource(t)
	for range 5 {
		s.put("/k")
	}
	synced := s.watch(t, "", 0)
	synced.RequestProgress()
	until(t, synced, 6)

	// Newer, with a history that begins after what was delivered: a gap.
	newer := mvcc.New()
	for i := range uint64(20) {
		newer.Apply(i+1, mvcc.Batch{Commands: []mvcc.Command{
			{Type: mvcc.CmdTxn, ID: mvcc.CommandID{Session: 9, Seq: i}, Basis: i, Txn: mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/k"}}}},
			{Type: mvcc.CmdLimits, Limits: mvcc.Limits{HistoryBytes: 700, Window: 1, HistoryAgeMillis: 1}},
		}})
	}
	s.ks.Store(newer)
	s.hub.Notify()
	if err := ended(t, synced); !errors.Is(err, mvcc.ErrCompacted) {
		t.Errorf("over a gap: %v", err)
	}
	w := s.watch(t, "", 0)
	w.RequestProgress()
	until(t, w, 21)
	s.ks.Store(mvcc.New())
	s.hub.Notify()
	if err := ended(t, w); !errors.Is(err, ErrRewound) {
		t.Errorf("rewound: %v", err)
	}
}

// Many watchers come and go while changes flow; each sees all of its own.
func TestManyWatchers(t *testing.T) {
	s := newSource(t)
	const writes, watchers = 2000, 40
	var wg sync.WaitGroup
	for i := range watchers {
		from := int64(2)
		w := s.watch(t, fmt.Sprintf("/%d/", i%5), from)
		wg.Add(1)
		go func() {
			defer wg.Done()
			n := 0
			for n < writes/5 {
				b, ok := <-w.C()
				if !ok {
					t.Errorf("ended: %v", w.Err())
					return
				}
				n += len(b.Events)
			}
			w.Stop()
		}()
		other := s.watch(t, "", 0)
		wg.Add(1)
		go func() {
			defer wg.Done()
			<-other.C()
			other.Stop()
		}()
	}
	for i := range writes {
		s.put(fmt.Sprintf("/%d/k", i%5))
	}
	wg.Wait()
}
