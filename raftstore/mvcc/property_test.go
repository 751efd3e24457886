package mvcc

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// randomBatches is a log: puts, deletes one by one and together, comparisons, expiries, repeated
// commands, changing limits and clocks that jump.
func randomBatches(r *rand.Rand, n int) []Batch {
	var (
		batches []Batch
		sent    []Command
		now     = int64(1_000_000)
		seq     uint64
	)
	key := func() string { return fmt.Sprintf("/%c/%d", 'a'+rune(r.IntN(3)), r.IntN(8)) }
	for i := range n {
		now += int64(r.IntN(3000)) - 500
		b := Batch{Time: now}
		for range 1 + r.IntN(4) {
			seq++
			c := Command{Type: CmdTxn, ID: CommandID{uint64(r.IntN(2)), seq}, Basis: uint64(max(0, i-r.IntN(40)))}
			switch p := r.IntN(20); {
			case p == 0:
				c = Command{Type: CmdTick}
			case p == 1:
				c = Command{Type: CmdLimits, Limits: Limits{
					HistoryBytes: int64(r.IntN(40_000)), HistoryAgeMillis: int64(r.IntN(60_000)), Window: int64(r.IntN(60)),
				}}
			case p < 5 && len(sent) > 0:
				c = sent[max(0, len(sent)-1-r.IntN(30))]
			case p < 7:
				c.Type = CmdDelete
				c.Delete.Origin = fmt.Sprint("maker of ", seq)
				for n := 1 + r.IntN(8); n > 0; n-- {
					c.Delete.Keys = append(c.Delete.Keys, Compare{key(), 1 + int64(r.IntN(2*i+2))})
				}
				slices.SortFunc(c.Delete.Keys, func(a, b Compare) int { return strings.Compare(a.Key, b.Key) })
				c.Delete.Keys = slices.CompactFunc(c.Delete.Keys, func(a, b Compare) bool { return a.Key == b.Key })
				sent = append(sent, c)
			default:
				c.Txn.Origin = fmt.Sprint("maker of ", seq)
				for range r.IntN(3) {
					c.Txn.Compares = append(c.Txn.Compares, Compare{key(), int64(r.IntN(2) * r.IntN(i+2))})
				}
				for range r.IntN(4) {
					op := Op{Type: OpPut, Key: key(), Value: []byte(fmt.Sprint(seq))}
					if r.IntN(4) == 0 {
						op.TTL = int64(r.IntN(20))
					}
					if r.IntN(3) == 0 {
						op = Op{Type: OpDelete, Key: key()}
					}
					c.Txn.Ops = append(c.Txn.Ops, op) // now and then a key twice: invalid
				}
				sent = append(sent, c)
			}
			b.Commands = append(b.Commands, c)
		}
		batches = append(batches, b)
	}
	return batches
}

// model is a keyspace as a list of whole states, one per revision.
type model map[int64]map[string]KeyValue

func (m model) note(k *Keyspace, seen int64) int64 {
	events, through, err := k.Events(seen+1, 1<<30)
	if err != nil { // compacted in the same batch: start again from the present
		l, _ := k.List(Range{})
		state := map[string]KeyValue{}
		for _, kv := range l.KVs {
			state[kv.Key] = kv
		}
		m[l.Revision] = state
		return l.Revision
	}
	for i, e := range events {
		rev := e.KV.ModRevision
		if i == 0 || rev != events[i-1].KV.ModRevision {
			m[rev] = maps.Clone(m[rev-1])
			if m[rev] == nil {
				m[rev] = map[string]KeyValue{}
			}
		}
		if e.Type == Delete {
			delete(m[rev], e.KV.Key)
		} else {
			m[rev][e.KV.Key] = e.KV
		}
	}
	return through
}

func TestRandomLogs(t *testing.T) {
	for seed := range uint64(30) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(seed, 1))
			batches := randomBatches(r, 300)
			a, b := New(), New()
			m := model{1: {}}
			seen := int64(1)
			restoreAt := r.IntN(len(batches))
			for i, batch := range batches {
				before := a.Revision()
				outs := a.Apply(uint64(i+1), batch)
				if diff := cmp.Diff(outs, b.Apply(uint64(i+1), batch), cmp.Comparer(func(a, b error) bool { return fmt.Sprint(a) == fmt.Sprint(b) })); diff != "" {
					t.Fatalf("batch %d: two answers: %s", i, diff)
				}
				if a.Digest() != b.Digest() {
					t.Fatalf("batch %d: %+v and %+v", i, a.Digest(), b.Digest())
				}
				if a.Revision() < before {
					t.Fatalf("batch %d: revision went back", i)
				}
				seen = m.note(a, seen)
				if seen != a.Revision() {
					t.Fatalf("batch %d: events end at %d of %d", i, seen, a.Revision())
				}
				if i == restoreAt || r.IntN(40) == 0 {
					b = rebuilt(t, b)
				}
				if r.IntN(10) == 0 {
					m.check(t, a)
					m.check(t, b)
				}
			}
			m.check(t, a)
			m.check(t, b)
		})
	}
}

// check compares every readable revision with the model, and the totals with
// a recount.
func (m model) check(t *testing.T, k *Keyspace) {
	t.Helper()
	for rev := k.Oldest(); rev <= k.Revision(); rev++ {
		want, ok := m[rev]
		if !ok {
			continue
		}
		l, err := k.List(Range{Revision: rev})
		if err != nil {
			t.Fatalf("list at %d: %v", rev, err)
		}
		got := map[string]KeyValue{}
		for _, kv := range l.KVs {
			got[kv.Key] = kv
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("at revision %d: %s", rev, diff)
		}
		if keys := slices.Sorted(maps.Keys(got)); len(keys) > 0 {
			one := keys[len(keys)/2]
			kv, _, err := k.Get(one, rev)
			if err != nil || cmp.Diff(&KeyValue{}, kv) == "" || kv.ModRevision != got[one].ModRevision {
				t.Fatalf("get %s at %d: %+v, %v", one, rev, kv, err)
			}
			if l, _ := k.List(Range{Revision: rev, From: one, CountOnly: true}); int(l.Count) != len(keys)-len(keys)/2 {
				t.Fatalf("count from %s at %d: %d of %d", one, rev, l.Count, len(keys))
			}
		}
	}
	var keys, bytes int64
	var sum uint64
	l, _ := k.List(Range{})
	for _, kv := range l.KVs {
		keys++
		bytes += int64(len(kv.Key) + len(kv.Value))
		sum += hashKV(&kv)
	}
	m.checkPast(t, k)
	folders := map[string]Use{}
	for _, kv := range l.KVs {
		for i := range kv.Key {
			if kv.Key[i] == '/' {
				u := folders[kv.Key[:i+1]]
				folders[kv.Key[:i+1]] = Use{u.Keys + 1, u.Bytes + int64(len(kv.Key)+len(kv.Value))}
			}
		}
	}
	if diff := cmp.Diff(folders, k.Folders()); diff != "" {
		t.Fatalf("folders: %s", diff)
	}
	if d := k.Digest(); d.Keys != keys || d.Bytes != bytes || k.sum != sum {
		t.Fatalf("totals %+v, recounted %d keys, %d bytes", d, keys, bytes)
	}
}

// checkPast compares each key's history with the model, and the revision at
// the time of each change with the change's.
func (m model) checkPast(t *testing.T, k *Keyspace) {
	t.Helper()
	ext := k.Extent()
	if ext.Oldest != k.Oldest() || ext.Newest != k.Revision() || ext.OldestTime > ext.NewestTime {
		t.Fatalf("extent %+v", ext)
	}
	for rev := ext.Oldest; rev <= ext.Newest; rev++ {
		if m[rev] == nil {
			return // several batches of the model in one: it does not know them all
		}
	}
	for _, folder := range []string{"/a/", "/b/", "/c/"} {
		for i := range 8 {
			key := fmt.Sprint(folder, i)
			h := k.History(key, 0)
			state, before := h.Base, ext.Oldest
			for _, c := range h.Changes {
				for ; before < c.KV.ModRevision; before++ {
					m.same(t, key, before, state)
				}
				if state = &c.KV; c.Type == Delete {
					state = nil
				}
				at, err := k.RevisionAt(c.Time)
				if err != nil || at < c.KV.ModRevision {
					t.Fatalf("revision at the time %d of %d: %d, %v", c.Time, c.KV.ModRevision, at, err)
				}
				if got, want := c.Origin, OriginExpiry; c.Type == Put && got != "maker of "+string(c.KV.Value) ||
					c.Type == Delete && got != want && !strings.HasPrefix(got, "maker of ") {
					t.Fatalf("%s at %d: origin %q", key, c.KV.ModRevision, got)
				}
			}
			for ; before <= ext.Newest; before++ {
				m.same(t, key, before, state)
			}
			if n := len(h.Changes); n > 1 {
				part := k.History(key, n-1)
				if !part.More || part.Base != nil || cmp.Diff(h.Changes[1:], part.Changes) != "" {
					t.Fatalf("the last %d changes of %s: %+v", n-1, key, part)
				}
			}
		}
	}
}

func (m model) same(t *testing.T, key string, rev int64, got *KeyValue) {
	t.Helper()
	want, ok := m[rev][key]
	if ok != (got != nil) || ok && cmp.Diff(want, *got) != "" {
		t.Fatalf("%s as of %d: history says %+v, the model %+v", key, rev, got, want)
	}
}

// rebuilt is k by way of a snapshot.
func rebuilt(t *testing.T, k *Keyspace) *Keyspace {
	t.Helper()
	s := k.Snapshot()
	b := NewBuilder(s.Header())
	for _, err := range []error{
		s.Base(func(kv *KeyValue) error { return b.Base(*kv) }),
		s.Changes(b.Change),
		s.Window(b.Window),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	n, err := b.Finish()
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A snapshot does not change while commands are applied behind its back.
func TestSnapshotIsFrozen(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	k := New()
	batches := randomBatches(r, 200)
	for i, b := range batches[:100] {
		k.Apply(uint64(i+1), b)
	}
	want := k.Digest()
	s := k.Snapshot()
	for i, b := range batches[100:] {
		k.Apply(uint64(i+101), b)
	}
	b := NewBuilder(s.Header())
	_ = s.Base(func(kv *KeyValue) error { return b.Base(*kv) })
	_ = s.Changes(b.Change)
	_ = s.Window(b.Window)
	n, err := b.Finish()
	if err != nil || n.Digest() != want {
		t.Errorf("%+v, %v; want %+v", n, err, want)
	}
}

// Readers run beside Apply and see whole revisions only.
func TestConcurrentReaders(t *testing.T) {
	k := newKS()
	k.limit(Limits{HistoryBytes: 20_000, HistoryAgeMillis: 1 << 40, Window: 10})
	done := make(chan struct{})
	errs := make(chan error, 4)
	for range 4 {
		go func() {
			for {
				select {
				case <-done:
					errs <- nil
					return
				default:
				}
				rev := max(k.Revision()-20, k.Oldest())
				for _, at := range []int64{0, rev} {
					l, err := k.List(Range{Prefix: "/p/", Revision: at})
					if err != nil {
						continue // compacted meanwhile
					}
					// Each transaction writes both keys with the same value.
					if len(l.KVs) == 1 || (len(l.KVs) == 2 && string(l.KVs[0].Value) != string(l.KVs[1].Value)) {
						errs <- fmt.Errorf("half a transaction at %d: %+v", at, l)
						return
					}
				}
				events, _, err := k.Events(rev+1, 10)
				if err == nil && len(events)%2 != 0 {
					errs <- fmt.Errorf("half a revision: %+v", events)
					return
				}
			}
		}()
	}
	for i := range 3000 {
		v := []byte(strings.Repeat("x", i%50) + fmt.Sprint(i))
		k.txn(Txn{Ops: []Op{{Type: OpPut, Key: "/p/1", Value: v}, {Type: OpPut, Key: "/p/2", Value: v}}})
	}
	close(done)
	for range 4 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}
