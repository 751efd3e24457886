package seglog

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/logtest"
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

// These are logtest's, for which tests of files need names that are short.
var (
	entry    = logtest.Entry
	entries  = logtest.Entries
	contents = logtest.Contents
	store    = logtest.Store
)

func TestSuite(t *testing.T) {
	logtest.Suite(t, func(t testing.TB, dir string) logtest.Log { return open(t, dir, small) }, tempDir, 120)
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
	left, sum := appendRecord(nil, seg.life.salt, seg.link(), seg.end, entry(4, 1, 100))
	left, _ = appendRecord(left, seg.life.salt, sum, seg.end, entry(5, 1, 100))
	if _, err := whole.WriteAt(left, seg.end); err != nil {
		t.Fatal(err)
	}
	readOnly, err := os.Open(seg.path())
	if err != nil {
		t.Fatal(err)
	}
	seg.f = osFile{readOnly}
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

// TestGolden holds the bytes of each version. The newest is what is written,
// the older ones are read, and never written to.
func TestGolden(t *testing.T) {
	header := appendHeader(nil, 7, 0x01020304)
	e := &raft.Log{Index: 7, Term: 3, Type: raft.LogCommand, Data: []byte("data"), Extensions: []byte("x"), AppendedAt: time.Unix(0, 5)}
	b, sum := appendRecord(header, 0x01020304, headerSum(header), segmentHeader, e)
	b = appendMark(b, 0x01020304, sum, int64(len(b)), 8)
	if path := filepath.Join("testdata", "segment-v2"); *update {
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
	} else if want := golden(t, path); !bytes.Equal(b, want) {
		t.Errorf("%s differs from what is written now: %x", path, b)
	}
	for version := 1; version <= segmentVersion; version++ {
		want := golden(t, filepath.Join("testdata", fmt.Sprintf("segment-v%d", version)))
		dir := tempDir(t)
		path := filepath.Join(dir, fmt.Sprintf(segmentName, 7))
		if err := os.WriteFile(path, want, 0o600); err != nil {
			t.Fatal(err)
		}
		l := open(t, dir, small)
		if diff := cmp.Diff([]*raft.Log{e}, contents(t, l)); diff != "" {
			t.Error(diff)
		}
		if version == segmentVersion {
			continue
		}
		store(t, l, entry(8, 3, 10))
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(golden(t, path), want) {
			t.Errorf("a segment of version %d was written to", version)
		}
		l = open(t, dir, small)
		if diff := cmp.Diff([]*raft.Log{e, entry(8, 3, 10)}, contents(t, l)); diff != "" {
			t.Error(diff)
		}
		// An old segment that is emptied makes room for a new one of its name.
		if err := l.DeleteRange(7, 8); err != nil {
			t.Fatal(err)
		}
		store(t, l, entry(7, 4, 10))
		crash(l)
		if diff := cmp.Diff([]*raft.Log{entry(7, 4, 10)}, contents(t, open(t, dir, small))); diff != "" {
			t.Error(diff)
		}
	}
}

// TestOldSegmentEmptied: a segment of an older version whose entries were all
// cut off by a conflict.
func TestOldSegmentEmptied(t *testing.T) {
	dir := tempDir(t)
	v1 := golden(t, filepath.Join("testdata", "segment-v1"))
	if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf(segmentName, 7)), v1[:segmentHeader], 0o600); err != nil {
		t.Fatal(err)
	}
	l := open(t, dir, small)
	store(t, l, entry(7, 4, 10))
	crash(l)
	if diff := cmp.Diff([]*raft.Log{entry(7, 4, 10)}, contents(t, open(t, dir, small))); diff != "" {
		t.Error(diff)
	}
}

var update = flag.Bool("update", false, "rewrite the newest golden file")

func golden(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// FuzzOpen: whatever a file holds, opening it ends in an error or in a log that
// can be read and continued.
func FuzzOpen(f *testing.F) {
	b := appendHeader(nil, 1, 9)
	sum := headerSum(b)
	for _, e := range entries(1, 3, 1, 20) {
		b, sum = appendRecord(b, 9, sum, segmentHeader, e)
	}
	f.Add(b)
	f.Add(golden(f, filepath.Join("testdata", "segment-v1")))
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
	logtest.Benchmark(b, open(b, b.TempDir(), Options{}))
}
