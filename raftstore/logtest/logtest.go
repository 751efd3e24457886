// Package logtest proves a raft log: what it does in a life without faults, and
// what it may hold after a crash. Every engine passes the same tests.
package logtest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/raft"
)

// Log is what is proved.
type Log interface {
	raft.LogStore
	Mark() error
	Close() error
}

// Opener opens the log in a directory. It fails the test when it cannot.
type Opener func(t testing.TB, dir string) Log

// MemDir is a directory in memory where there is such a place, for tests that sync
// a lot. It is removed when the test ends.
func MemDir(t testing.TB) string {
	dir, err := os.MkdirTemp("/dev/shm", "raftstore-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// Entry makes one whose data follow from its index and term.
func Entry(index, term uint64, size int) *raft.Log {
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(index) + byte(term)*3 + byte(i)
	}
	return &raft.Log{Index: index, Term: term, Type: raft.LogCommand, Data: data, AppendedAt: time.Unix(1700000000, int64(index))}
}

// Entries makes several in a row.
func Entries(from, to, term uint64, size int) (es []*raft.Log) {
	for i := from; i <= to; i++ {
		es = append(es, Entry(i, term, size))
	}
	return es
}

// Contents is all that a store holds.
func Contents(t testing.TB, s raft.LogStore) (es []*raft.Log) {
	t.Helper()
	first := FirstOf(t, s)
	last, err := s.LastIndex()
	if err != nil {
		t.Fatal(err)
	}
	if first == 0 {
		return nil
	}
	for i := first; i <= last; i++ {
		e := &raft.Log{}
		if err := s.GetLog(i, e); err != nil {
			t.Fatalf("entry %d of %d to %d: %v", i, first, last, err)
		}
		es = append(es, e)
	}
	return es
}

// FirstOf is the first index that a store holds.
func FirstOf(t testing.TB, s raft.LogStore) uint64 {
	t.Helper()
	first, err := s.FirstIndex()
	if err != nil {
		t.Fatal(err)
	}
	return first
}

// Store appends.
func Store(t testing.TB, s raft.LogStore, es ...*raft.Log) {
	t.Helper()
	if err := s.StoreLogs(es); err != nil {
		t.Fatal(err)
	}
}

// Suite is passed by every engine. dir makes a directory for a log; steps is how
// long the comparison with a model goes on.
func Suite(t *testing.T, open Opener, dir func(testing.TB) string, steps int) {
	t.Run("against a model", func(t *testing.T) { againstModel(t, open, dir(t), steps) })
	t.Run("a gap starts a new log", func(t *testing.T) { gapBeginsAnew(t, open, dir(t)) })
	t.Run("the middle cannot be deleted", func(t *testing.T) { middleCannotBeDeleted(t, open, dir(t)) })
	t.Run("readers and a writer", func(t *testing.T) { readersAndWriter(t, open, dir(t)) })
}

// againstModel does to a store what raft does, at random, and compares it
// with a slice after every step.
func againstModel(t *testing.T, openStore Opener, dir string, steps int) {
	rng := rand.New(rand.NewPCG(1, 2))
	s := openStore(t, dir)
	var model []*raft.Log
	next, term := uint64(1), uint64(1)
	for step := range steps {
		op := rng.IntN(10)
		switch {
		case op < 6:
			es := Entries(next, next+uint64(rng.IntN(8)), term, rng.IntN(700))
			if rng.IntN(3) == 0 {
				es[0].Extensions = []byte("ext")
				es[0].AppendedAt = time.Time{}
				es[0].Type = raft.LogConfiguration
			}
			Store(t, s, es...)
			model = append(model, es...)
			next += uint64(len(es))
		case op == 6 && len(model) > 1: // a conflict with a new leader
			at := 1 + rng.IntN(len(model)-1)
			if err := s.DeleteRange(model[at].Index, next-1); err != nil {
				t.Fatal(err)
			}
			next, term = model[at].Index, term+1
			model = model[:at]
		case op == 7 && len(model) > 1: // a snapshot was taken
			at := rng.IntN(len(model) - 1)
			if err := s.DeleteRange(FirstOf(t, s), model[at].Index); err != nil {
				t.Fatal(err)
			}
			model = model[at+1:]
		case op == 8 && len(model) > 0 && rng.IntN(3) == 0: // a snapshot was installed
			if err := s.DeleteRange(FirstOf(t, s), next-1); err != nil {
				t.Fatal(err)
			}
			model, next = nil, next+uint64(rng.IntN(1000))
		case op == 9:
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = openStore(t, dir)
		}
		got := Contents(t, s)
		if len(got) > len(model) {
			got = got[len(got)-len(model):] // after a restart it may begin earlier
		}
		if len(got) == 0 {
			got = nil
		}
		if diff := cmp.Diff(model, got); diff != "" {
			t.Fatalf("step %d, operation %d (-want +got):\n%s", step, op, diff)
		}
	}
}

func gapBeginsAnew(t *testing.T, open Opener, dir string) {
	l := open(t, dir)
	Store(t, l, Entries(1, 10, 1, 10)...)
	Store(t, l, Entries(500, 501, 2, 10)...)
	if diff := cmp.Diff(Entries(500, 501, 2, 10), Contents(t, l)); diff != "" {
		t.Fatal(diff)
	}
	if err := l.StoreLog(Entry(501, 3, 10)); err == nil {
		t.Fatal("an entry was stored twice")
	}
	if err := l.StoreLogs([]*raft.Log{Entry(502, 2, 1), Entry(504, 2, 1)}); err == nil {
		t.Fatal("a gap inside an append was stored")
	}
	if err := l.DeleteRange(1, 1000); err != nil {
		t.Fatal(err)
	}
	if got := Contents(t, l); got != nil {
		t.Fatalf("after deleting everything: %v", got)
	}
}

func middleCannotBeDeleted(t *testing.T, open Opener, dir string) {
	l := open(t, dir)
	Store(t, l, Entries(1, 10, 1, 10)...)
	if err := l.DeleteRange(3, 5); err == nil {
		t.Fatal("a hole was made")
	}
	if got := Contents(t, l); len(got) != 10 {
		t.Fatalf("%d entries are left", len(got))
	}
}

// readersAndWriter is for the race detector: raft reads the log from a
// goroutine for each follower while it appends and trims.
func readersAndWriter(t *testing.T, open Opener, dir string) {
	l := open(t, dir)
	Store(t, l, Entry(1, 1, 100))
	done := make(chan error, 3)
	stop := make(chan struct{})
	for range cap(done) {
		go func() {
			for {
				select {
				case <-stop:
					done <- nil
					return
				default:
				}
				last, err := l.LastIndex()
				var e raft.Log
				if err == nil {
					err = l.GetLog(last, &e)
				}
				if err == nil && e.Index != last {
					err = fmt.Errorf("entry %d was read as %d", last, e.Index)
				}
				if err != nil && !errors.Is(err, raft.ErrLogNotFound) {
					done <- err
					return
				}
			}
		}()
	}
	for i := uint64(2); i < 250; i++ {
		Store(t, l, Entry(i, 1, 300))
		if i%50 == 0 {
			if err := l.DeleteRange(1, i-30); err != nil {
				t.Error(err)
			}
		}
	}
	close(stop)
	for range cap(done) {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if err := l.StoreLog(Entry(600, 1, 1)); err == nil {
		t.Errorf("append to a closed log: %v", err)
	}
}

// Benchmark measures appends of one entry, with the log trimmed now and then.
// The log has to be empty.
func Benchmark(b *testing.B, s Log) {
	index := uint64(1)
	for _, size := range []int{1 << 10, 64 << 10} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			b.SetBytes(int64(size))
			for b.Loop() {
				Store(b, s, Entry(index, 1, size))
				if index%4096 == 0 {
					if err := s.DeleteRange(1, index-1024); err != nil {
						b.Fatal(err)
					}
				}
				index++
			}
		})
	}
}
