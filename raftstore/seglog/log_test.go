package seglog

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
)

// small makes segments that a test fills quickly.
var small = Options{SegmentBytes: 4 << 10, Logger: slog.New(slog.DiscardHandler)}

// tempDir is in memory where there is such a place: what is tested is which
// bytes are written, and a busy disk takes its time for each sync.
func tempDir(t testing.TB) string {
	dir, err := os.MkdirTemp("/dev/shm", "seglog-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func open(t testing.TB, dir string, opts Options) *Log {
	t.Helper()
	l, err := Open(dir, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func entry(index, term uint64, size int) *raft.Log {
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(index) + byte(term)*3 + byte(i)
	}
	return &raft.Log{Index: index, Term: term, Type: raft.LogCommand, Data: data, AppendedAt: time.Unix(1700000000, int64(index))}
}

func entries(from, to, term uint64, size int) (es []*raft.Log) {
	for i := from; i <= to; i++ {
		es = append(es, entry(i, term, size))
	}
	return es
}

// contents is all that a store holds.
func contents(t testing.TB, s raft.LogStore) (es []*raft.Log) {
	t.Helper()
	first := firstOf(t, s)
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

func firstOf(t testing.TB, s raft.LogStore) uint64 {
	t.Helper()
	first, err := s.FirstIndex()
	if err != nil {
		t.Fatal(err)
	}
	return first
}

func store(t testing.TB, s raft.LogStore, es ...*raft.Log) {
	t.Helper()
	if err := s.StoreLogs(es); err != nil {
		t.Fatal(err)
	}
}

type closer interface {
	raft.LogStore
	Close() error
}

// stores are the log stores that one suite proves.
var stores = map[string]func(testing.TB, string) closer{
	"segments": func(t testing.TB, dir string) closer { return open(t, dir, small) },
	"bolt": func(t testing.TB, dir string) closer {
		s, err := raftboltdb.NewBoltStore(filepath.Join(dir, "raft.db"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		return s
	},
}

// TestAgainstModel does to a store what raft does, at random, and compares it
// with a slice after every step.
func TestAgainstModel(t *testing.T) {
	for name, openStore := range stores {
		t.Run(name, func(t *testing.T) {
			steps := 120
			if name == "bolt" {
				steps = 40 // it is the slower one
			}
			rng := rand.New(rand.NewPCG(1, 2))
			dir := tempDir(t)
			s := openStore(t, dir)
			var model []*raft.Log
			next, term := uint64(1), uint64(1)
			for step := range steps {
				op := rng.IntN(10)
				switch {
				case op < 6:
					es := entries(next, next+uint64(rng.IntN(8)), term, rng.IntN(700))
					if rng.IntN(3) == 0 {
						es[0].Extensions = []byte("ext")
						es[0].AppendedAt = time.Time{}
						es[0].Type = raft.LogConfiguration
					}
					store(t, s, es...)
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
					if err := s.DeleteRange(firstOf(t, s), model[at].Index); err != nil {
						t.Fatal(err)
					}
					model = model[at+1:]
				case op == 8 && len(model) > 0 && rng.IntN(3) == 0: // a snapshot was installed
					if err := s.DeleteRange(firstOf(t, s), next-1); err != nil {
						t.Fatal(err)
					}
					model, next = nil, next+uint64(rng.IntN(1000))
				case op == 9:
					if err := s.Close(); err != nil {
						t.Fatal(err)
					}
					s = openStore(t, dir)
				}
				got := contents(t, s)
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
		})
	}
}

func TestGapBeginsAnew(t *testing.T) {
	dir := tempDir(t)
	l := open(t, dir, small)
	store(t, l, entries(1, 10, 1, 10)...)
	store(t, l, entries(500, 501, 2, 10)...)
	if diff := cmp.Diff(entries(500, 501, 2, 10), contents(t, l)); diff != "" {
		t.Fatal(diff)
	}
	if err := l.StoreLog(entry(501, 3, 10)); err == nil {
		t.Fatal("an entry was stored twice")
	}
	if err := l.StoreLogs([]*raft.Log{entry(502, 2, 1), entry(504, 2, 1)}); err == nil {
		t.Fatal("a gap inside an append was stored")
	}
	if err := l.DeleteRange(1, 1000); err != nil {
		t.Fatal(err)
	}
	if got := contents(t, l); got != nil {
		t.Fatalf("after deleting everything: %v", got)
	}
}

func TestMiddleCannotBeDeleted(t *testing.T) {
	l := open(t, tempDir(t), small)
	store(t, l, entries(1, 10, 1, 10)...)
	if err := l.DeleteRange(3, 5); err == nil {
		t.Fatal("a hole was made")
	}
	if got := contents(t, l); len(got) != 10 {
		t.Fatalf("%d entries are left", len(got))
	}
}

func TestEntryLargerThanSegment(t *testing.T) {
	dir := tempDir(t)
	l := open(t, dir, small)
	want := []*raft.Log{entry(1, 1, 10), entry(2, 1, 3<<20), entry(3, 1, 10)}
	for _, e := range want {
		store(t, l, e)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for i, got := range contents(t, open(t, dir, small)) {
		if got.Index != want[i].Index || !bytes.Equal(got.Data, want[i].Data) {
			t.Errorf("entry %d is not what was stored", want[i].Index)
		}
	}
}

// TestRoomIsUsedAgain keeps a window of entries in a log for many turns.
func TestRoomIsUsedAgain(t *testing.T) {
	dir := tempDir(t)
	opts := small
	opts.SegmentBytes = 64 << 10
	l := open(t, dir, opts)
	var most int64
	for i := uint64(20); i <= 3000; i += 20 {
		store(t, l, entries(i-19, i, 1, 1000)...)
		if i%100 == 0 && i > 200 {
			if err := l.DeleteRange(1, i-200); err != nil {
				t.Fatal(err)
			}
			most = max(most, l.Size())
		}
	}
	// 300 KB of entries, in segments of 64 KiB, and the spare ones.
	if limit := int64(10 * opts.SegmentBytes); most > limit {
		t.Errorf("the log took %d bytes, more than %d", most, limit)
	}
	if len(l.spares) == 0 {
		t.Error("no segment was spared")
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l = open(t, dir, opts)
	if last, _ := l.LastIndex(); last != 3000 {
		t.Errorf("the log ends at %d", last)
	}
}

// newest returns the path of the newest segment.
func newest(t testing.TB, dir string) string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*.seg"))
	if err != nil || len(names) == 0 {
		t.Fatalf("segments: %v, %v", names, err)
	}
	return names[len(names)-1]
}

// crash leaves the log as a dead process would: nothing is marked.
func crash(l *Log) {
	l.write.Lock()
	defer l.write.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	_ = l.closeFiles()
}

// TestTornAppend leaves any part of the last append's sectors unwritten, as a
// power failure may, over fresh room and over what an earlier life left there.
func TestTornAppend(t *testing.T) {
	for _, leftovers := range []bool{false, true} {
		t.Run(fmt.Sprintf("leftovers=%v", leftovers), func(t *testing.T) {
			dir := tempDir(t)
			opts := small
			opts.SegmentBytes = 64 << 10
			l := open(t, dir, opts)
			first := uint64(1)
			if leftovers {
				store(t, l, entries(1, 60, 1, 700)...)
				if err := l.DeleteRange(1, 60); err != nil {
					t.Fatal(err)
				}
				first = 61
			}
			store(t, l, entries(first, first+4, 1, 300)...)
			before, err := os.ReadFile(newest(t, dir))
			if err != nil {
				t.Fatal(err)
			}
			from := l.segments[0].end
			store(t, l, entries(first+5, first+9, 1, 900)...)
			to := l.segments[0].end
			crash(l)
			path := newest(t, dir)
			after, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			rng := rand.New(rand.NewPCG(3, 4))
			const sector = 512
			for try := range 60 {
				mixed := bytes.Clone(after)
				lost := 0
				for at := from / sector * sector; at < to; at += sector {
					if rng.IntN(4) == 0 || (try%2 == 0 && at > from+sector) {
						n := copy(mixed[at:min(at+sector, int64(len(mixed)))], before[min(at, int64(len(before))):])
						clear(mixed[at+int64(n) : min(at+sector, int64(len(mixed)))])
						lost++
					}
				}
				if err := os.WriteFile(path, mixed, 0o600); err != nil {
					t.Fatal(err)
				}
				l := open(t, dir, opts)
				last, _ := l.LastIndex()
				if last < first+4 || (lost == 0 && last != first+9) {
					t.Fatalf("try %d: the log ends at %d, synced was up to %d", try, last, first+4)
				}
				// Going on must not bring back what was cut off.
				store(t, l, entry(last+1, 2, 300))
				crash(l)
				l = open(t, dir, opts)
				want := append(append(entries(first, first+4, 1, 300), entries(first+5, last, 1, 900)...), entry(last+1, 2, 300))
				if diff := cmp.Diff(want, contents(t, l)); diff != "" {
					t.Fatalf("try %d (-want +got):\n%s", try, diff)
				}
				crash(l)
			}
		})
	}
}

// TestFlippedBit flips any bit of what was synced: it is found when the log is
// opened, and when the entry is read, and named.
func TestFlippedBit(t *testing.T) {
	dir := tempDir(t)
	l := open(t, dir, small)
	var want []*raft.Log
	for i := uint64(1); i <= 30; i++ {
		e := entry(i, 1, 150+int(i)*7)
		store(t, l, e)
		want = append(want, e)
	}
	if len(l.segments) < 3 {
		t.Fatalf("%d segments", len(l.segments))
	}
	type span struct {
		path     string
		from, to int64
	}
	var spans []span
	for _, s := range l.segments {
		spans = append(spans, span{s.path(), 0, s.end})
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(5, 6))
	for range 200 {
		sp := spans[rng.IntN(len(spans))]
		at := sp.from + rng.Int64N(sp.to-sp.from)
		flip := func() {
			f, err := os.OpenFile(sp.path, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = f.Close() }()
			var b [1]byte
			if _, err := f.ReadAt(b[:], at); err != nil {
				t.Fatal(err)
			}
			b[0] ^= 1 << (at % 8)
			if _, err := f.WriteAt(b[:], at); err != nil {
				t.Fatal(err)
			}
		}
		flip()
		l, err := Open(dir, small)
		var corrupt *CorruptError
		if !errors.As(err, &corrupt) {
			if err == nil {
				crash(l)
			}
			t.Fatalf("byte %d of %s was flipped: %v", at, sp.path, err)
		}
		if corrupt.File != sp.path || corrupt.Offset > at || at-corrupt.Offset > 450 {
			t.Errorf("byte %d of %s was flipped: %v", at, sp.path, err)
		}
		flip()
		// The same while the log is open.
		if l, err = Open(dir, small); err != nil {
			t.Fatal(err)
		}
		if at >= segmentHeader {
			flip()
			bad := 0
			for i := uint64(1); i <= 30; i++ {
				var e raft.Log
				if err := l.GetLog(i, &e); errors.As(err, &corrupt) {
					bad++
				} else if diff := cmp.Diff(want[i-1], &e); err != nil || diff != "" {
					t.Fatalf("entry %d: %v\n%s", i, err, diff)
				}
			}
			if bad != 1 {
				t.Errorf("byte %d of %s was flipped: %d entries were refused", at, sp.path, bad)
			}
			flip()
		}
		crash(l)
	}
}

// TestMissingSegment: a hole between the segments is damage, too.
func TestMissingSegment(t *testing.T) {
	dir := tempDir(t)
	l := open(t, dir, small)
	for i := uint64(1); i <= 30; i++ {
		store(t, l, entry(i, 1, 500))
	}
	path := l.segments[1].path()
	crash(l)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	var corrupt *CorruptError
	if _, err := Open(dir, small); !errors.As(err, &corrupt) {
		t.Fatalf("without %s: %v", path, err)
	}
}

// TestFailedAppend: what an append that failed may have left on disk is not
// found later, and the log goes on.
func TestFailedAppend(t *testing.T) {
	dir := tempDir(t)
	l := open(t, dir, small)
	store(t, l, entries(1, 3, 1, 100)...)
	seg := l.segments[0]
	whole := seg.f
	// Its bytes reach the file, the sync does not: a file opened for reading
	// refuses to be written.
	if _, err := whole.WriteAt(appendRecord(appendRecord(nil, seg.salt, seg.end, entry(4, 1, 100)), seg.salt, seg.end, entry(5, 1, 100)), seg.end); err != nil {
		t.Fatal(err)
	}
	readOnly, err := os.Open(seg.path())
	if err != nil {
		t.Fatal(err)
	}
	seg.f = readOnly
	if err := l.StoreLogs(entries(4, 5, 1, 100)); err == nil {
		t.Fatal("the append did not fail")
	}
	if last, _ := l.LastIndex(); last != 3 {
		t.Fatalf("after a failed append the log ends at %d", last)
	}
	if err := l.StoreLog(entry(4, 2, 100)); err == nil {
		t.Fatal("the log could not be cleaned and went on")
	}
	seg.f = whole
	_ = readOnly.Close()
	store(t, l, entry(4, 2, 100))
	crash(l)
	want := append(entries(1, 3, 1, 100), entry(4, 2, 100))
	if diff := cmp.Diff(want, contents(t, open(t, dir, small))); diff != "" {
		t.Fatal(diff)
	}
}

// TestReadersAndWriter is for the race detector: raft reads the log from a
// goroutine for each follower while it appends and trims.
func TestReadersAndWriter(t *testing.T) {
	l := open(t, tempDir(t), small)
	store(t, l, entry(1, 1, 100))
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
		store(t, l, entry(i, 1, 300))
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
	if err := l.StoreLog(entry(600, 1, 1)); !errors.Is(err, ErrClosed) {
		t.Errorf("append to a closed log: %v", err)
	}
}

// TestGolden holds the bytes of version 1.
func TestGolden(t *testing.T) {
	b := appendHeader(nil, 7, 0x01020304)
	e := &raft.Log{Index: 7, Term: 3, Type: raft.LogCommand, Data: []byte("data"), Extensions: []byte("x"), AppendedAt: time.Unix(0, 5)}
	b = appendRecord(b, 0x01020304, segmentHeader, e)
	b = appendMark(b, 0x01020304, int64(len(b)), 8)
	path := filepath.Join("testdata", "segment-v1")
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b, want) {
		t.Errorf("%s differs from what is written now: %x", path, b)
	}
	dir := tempDir(t)
	if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf(segmentName, 7)), want, 0o600); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]*raft.Log{e}, contents(t, open(t, dir, small))); diff != "" {
		t.Error(diff)
	}
}

// FuzzOpen: whatever a file holds, opening it ends in an error or in a log that
// can be read and continued.
func FuzzOpen(f *testing.F) {
	b := appendHeader(nil, 1, 9)
	for _, e := range entries(1, 3, 1, 20) {
		b = appendRecord(b, 9, segmentHeader, e)
	}
	f.Add(b)
	f.Add(append(b, make([]byte, 100)...))
	f.Add(b[:len(b)-3])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := tempDir(t)
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf(segmentName, 1)), data, 0o600); err != nil {
			t.Fatal(err)
		}
		l, err := Open(dir, small)
		if err != nil {
			return
		}
		contents(t, l)
		last, _ := l.LastIndex()
		term := uint64(1)
		if last > 0 {
			var e raft.Log
			if err := l.GetLog(last, &e); err != nil {
				t.Fatal(err)
			}
			term = e.Term
		}
		if last > 1<<60 {
			return
		}
		store(t, l, entry(last+1, term, 10))
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if got, _ := open(t, dir, small).LastIndex(); got != last+1 {
			t.Fatalf("ends at %d, not %d", got, last+1)
		}
	})
}

func BenchmarkStoreLog(b *testing.B) {
	for _, size := range []int{1 << 10, 64 << 10} {
		for _, name := range []string{"segments", "bolt"} {
			b.Run(fmt.Sprintf("%s/%d", name, size), func(b *testing.B) {
				var s raft.LogStore
				if name == "bolt" {
					s = stores[name](b, b.TempDir())
				} else {
					s = open(b, b.TempDir(), Options{})
				}
				e := entry(1, 1, size)
				b.SetBytes(int64(size))
				for b.Loop() {
					store(b, s, e)
					if e.Index%4096 == 0 {
						if err := s.DeleteRange(1, e.Index-1024); err != nil {
							b.Fatal(err)
						}
					}
					e.Index++
				}
			})
		}
	}
}
