package mvcc

import (
	"errors"
	"fmt"

	"github.com/google/btree"
)

// ErrCorrupt is returned when what a Builder was given does not add up to the
// header it was given.
var ErrCorrupt = errors.New("snapshot does not match its digest")

// Header is what a snapshot says of itself.
type Header struct {
	Digest Digest
	Limits Limits
	Floor  uint64 // of the result window
}

// Change is one entry of the history, complete enough to put it back.
type Change struct {
	Type EventType
	KV   KeyValue // for Delete: Key and ModRevision only
	Time int64    // store time, unix milliseconds
	// Origin is who asked for the change; "" when it is not known.
	Origin string
}

// WindowEntry is one remembered outcome.
type WindowEntry struct {
	ID       CommandID
	Verdict  Verdict
	Revision int64
	Index    uint64
}

// Snapshot is a keyspace as of one log index. It does not change and costs
// Apply nothing while it is written out.
//
// It consists of the state as of the oldest readable revision (Base), the
// changes since then, and the result window: nothing is in it twice.
type Snapshot struct {
	header  Header
	tree    *btree.BTreeG[item]
	changes []change
	window  []outcome
}

// Snapshot captures the present. Call it from the applying goroutine.
func (k *Keyspace) Snapshot() *Snapshot {
	v := k.view.Load()
	s := &Snapshot{
		header: Header{Digest: v.digest, Limits: k.limits, Floor: k.window.floor},
		tree:   v.tree,
		window: append([]outcome(nil), k.window.ring[k.window.head:]...),
	}
	s.changes, _ = k.history.copyAll()
	return s
}

// Header describes the snapshot.
func (s *Snapshot) Header() Header { return s.header }

// Base yields every key as of the oldest readable revision, in a fixed order. A
// key that is not what was applied, as its hash tells, gives ErrCorrupt.
func (s *Snapshot) Base(yield func(*KeyValue) error) error {
	oldest := s.header.Digest.Oldest
	var err error
	s.tree.Ascend(func(it item) bool {
		if it.head.live() && it.head.kv.ModRevision <= oldest {
			err = it.head.yield(yield)
		}
		return err == nil
	})
	// Keys that changed since: the first change's predecessor. The chains of
	// versions are not walked, Apply may be cutting them.
	for i := 0; i < len(s.changes) && err == nil; i++ {
		if p := s.changes[i].prev; p.live() && p.kv.ModRevision <= oldest {
			err = p.yield(yield)
		}
	}
	return err
}

func (v *version) yield(to func(*KeyValue) error) error {
	if hashKV(&v.kv) != v.sum {
		return fmt.Errorf("%w: key %q of revision %d has changed in memory", ErrCorrupt, v.kv.Key, v.kv.ModRevision)
	}
	return to(&v.kv)
}

// Changes yields the history, oldest first.
func (s *Snapshot) Changes(yield func(Change) error) error {
	for i := range s.changes {
		c := &s.changes[i]
		e := c.event()
		if err := yield(Change{Type: e.Type, KV: e.KV, Time: c.time, Origin: c.origin}); err != nil {
			return err
		}
	}
	return nil
}

// Window yields the remembered outcomes, oldest first.
func (s *Snapshot) Window(yield func(WindowEntry) error) error {
	for _, o := range s.window {
		if err := yield(WindowEntry{ID: o.id, Verdict: o.verdict, Revision: o.rev, Index: o.index}); err != nil {
			return err
		}
	}
	return nil
}

// Builder makes a Keyspace from the parts of a Snapshot, given in its order.
type Builder struct {
	k       *Keyspace
	header  Header
	highest string // of the base's keys
	run     folderRun
}

// NewBuilder starts with an empty keyspace.
func NewBuilder(h Header) *Builder {
	k := New()
	k.limits = h.Limits
	k.history.compacted = h.Digest.Oldest
	return &Builder{k: k, header: h}
}

// BaseKey is a key as of the oldest readable revision, ready to be added. To
// make one is most of the work, and needs no Builder.
type BaseKey struct{ v *version }

// NewBaseKey makes one.
func NewBaseKey(kv KeyValue) BaseKey { return BaseKey{&version{kv: kv, sum: hashKV(&kv)}} }

// Base adds a key as of the oldest readable revision.
func (b *Builder) Base(kv KeyValue) error { return b.BaseKey(NewBaseKey(kv)) }

// BaseKey is Base for a key made before. It takes less where the keys come in
// order.
func (b *Builder) BaseKey(base BaseKey) error {
	v := base.v
	key := v.kv.Key
	if v.kv.ModRevision > b.header.Digest.Oldest {
		return fmt.Errorf("%w: key %q of revision %d lies after the base's revision %d", ErrCorrupt, key, v.kv.ModRevision, b.header.Digest.Oldest)
	}
	if key <= b.highest && b.k.head(key) != nil {
		return fmt.Errorf("%w: key %q occurs twice", ErrCorrupt, key)
	}
	b.highest = max(b.highest, key)
	b.k.account(v, +1)
	b.run.add(&b.k.folders, v)
	b.k.tree.ReplaceOrInsert(item{key: key, head: v})
	return nil
}

// Change adds an entry of the history.
func (b *Builder) Change(c Change) error {
	b.run.flush(&b.k.folders)
	if c.KV.ModRevision < b.k.rev || c.KV.ModRevision <= b.header.Digest.Oldest {
		return fmt.Errorf("%w: the change of %q at revision %d is out of order", ErrCorrupt, c.KV.Key, c.KV.ModRevision)
	}
	prev := b.k.head(c.KV.Key)
	if prev != nil {
		c.KV.Key = prev.kv.Key
	}
	b.k.now = c.Time
	b.k.rev = c.KV.ModRevision
	origin := b.k.origins.shared(c.Origin)
	switch {
	case c.Type == Put:
		b.k.replace(prev, &version{kv: c.KV}, origin)
	case c.Type == Delete && prev.live():
		b.k.remove(prev, c.KV.ModRevision, origin)
	default:
		return fmt.Errorf("%w: change of type %d of %q", ErrCorrupt, c.Type, c.KV.Key)
	}
	return nil
}

// Window adds a remembered outcome.
func (b *Builder) Window(e WindowEntry) error {
	if _, ok := b.k.window.find(e.ID); ok {
		return fmt.Errorf("%w: command %v occurs twice in the result window", ErrCorrupt, e.ID)
	}
	b.k.window.add(outcome{e.ID, e.Index, decided{e.Verdict, e.Revision}}, b.header.Limits.Window)
	return nil
}

// Finish returns the keyspace when its digest is the header's.
func (b *Builder) Finish() (*Keyspace, error) {
	b.run.flush(&b.k.folders)
	k, want := b.k, b.header.Digest
	k.index, k.rev, k.now = want.Index, want.Revision, want.Time
	k.window.floor = b.header.Floor
	if want.Oldest == want.Revision {
		k.history.compactedTime = want.Time // that revision was the present then
	}
	k.publish(true)
	if got := k.Digest(); got != want {
		return nil, fmt.Errorf("%w: got %+v, want %+v", ErrCorrupt, got, want)
	}
	return k, nil
}
