package boltlog

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/logtest"
	"github.com/clusterd/clusterd/raftstore/seglog"
)

var (
	crashSeeds = flag.Uint64("crash-seeds", 150, "how many histories TestCrashes tries")
	crashSeed  = flag.Uint64("crash-seed", 0, "the only history TestCrashes tries; 0: as many as -crash-seeds says")
)

// tempDir is in memory where there is such a place: what is tested is which
// bytes are written, and a busy disk takes its time for each sync.
func tempDir(t testing.TB) string {
	dir, err := os.MkdirTemp("/dev/shm", "boltlog-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// openSmall opens with a file that grows in small steps.
func openSmall(dir string) (*Log, error) { return open(dir, 0, 0, settle) }

func opened(t testing.TB, dir string) *Log {
	t.Helper()
	l, err := openSmall(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// crash leaves the log as a dead process would.
func crash(l *Log) {
	l.write.Lock()
	defer l.write.Unlock()
	_ = l.abandon()
}

func TestSuite(t *testing.T) {
	logtest.Suite(t, func(t testing.TB, dir string) logtest.Log { return opened(t, dir) }, tempDir, 60)
}

func TestManyAreDropped(t *testing.T) {
	for _, fromEnd := range []bool{false, true} {
		dir := tempDir(t)
		l := opened(t, dir)
		logtest.Store(t, l, logtest.Entries(1, 3*dropAtOnce, 1, 10)...)
		lo, hi, left := uint64(1), uint64(3*dropAtOnce-5), 5
		if fromEnd {
			lo, hi, left = 6, 3*dropAtOnce, 5
		}
		if err := l.DeleteRange(lo, hi); err != nil {
			t.Fatal(err)
		}
		crash(l)
		if got := logtest.Contents(t, opened(t, dir)); len(got) != left {
			t.Errorf("%d entries are left", len(got))
		}
	}
}

var errKilled = errors.New("the process was killed")

// TestCrashes is seglog's test of that name. bolt writes a transaction's pages,
// syncs, writes the page that makes them valid, syncs: a power cut leaves, of
// the first, any blocks of 512 or 4096 bytes, or all of them and of the second
// any blocks; or all of it. What changed in the file says which blocks.
func TestCrashes(t *testing.T) {
	if *crashSeed != 0 {
		crashHistory(t, tempDir(t), *crashSeed)
		return
	}
	for seed := uint64(1); seed <= *crashSeeds && !t.Failed(); seed++ {
		crashHistory(t, tempDir(t), seed)
	}
}

func crashHistory(t *testing.T, dir string, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 4))
	block := []int{512, 4096}[rng.IntN(2)]
	path := filepath.Join(dir, FileName)
	m := logtest.NewModel()
	l, err := openSmall(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if l != nil {
			crash(l)
		}
	}()
	for crashes := 0; crashes < 3; {
		if rng.IntN(6) > 0 {
			if err := m.Step(rng, l); err != nil {
				t.Errorf("seed %d: %v", seed, err)
				return
			}
			continue
		}
		crashes++
		// The process is killed in a transaction: its first or its second one.
		var before, now []byte
		survives := rng.IntN(2)
		l.around = func(transaction func() error) error {
			if now != nil {
				return errKilled
			}
			before = read(t, path)
			err := transaction()
			if survives--; survives < 0 && err == nil {
				now, err = read(t, path), errKilled
			}
			return err
		}
		if err := m.Step(rng, l); err != nil && !errors.Is(err, errKilled) {
			t.Errorf("seed %d: %v", seed, err)
			return
		}
		crash(l)
		if now == nil { // it did not get that far
			now = read(t, path)
			before = now
		}
		image := powerCut(rng, block, before, now)
		if err := os.WriteFile(path, image, 0o600); err != nil {
			t.Fatal(err)
		}
		if l, err = openSmall(dir); err != nil {
			t.Errorf("seed %d: after a crash: %v", seed, err)
			return
		}
		if rng.IntN(3) == 0 { // opening it is a transaction, too
			before, now = image, read(t, path)
			crash(l)
			image = powerCut(rng, block, before, now)
			if err := os.WriteFile(path, image, 0o600); err != nil {
				t.Fatal(err)
			}
			if l, err = openSmall(dir); err != nil {
				t.Errorf("seed %d: after a crash while it was opened: %v", seed, err)
				return
			}
		}
		if err := m.Found(l); err != nil {
			t.Errorf("seed %d: after crash %d: %v", seed, crashes, err)
			return
		}
	}
}

// powerCut is what a power cut in a transaction leaves of the file.
func powerCut(rng *rand.Rand, block int, before, now []byte) []byte {
	switch rng.IntN(4) {
	case 0:
		image := mix(rng, block, before, now, min(2*PageSize, len(now)), len(now))
		copy(image[:min(2*PageSize, len(image))], before)
		return image
	case 1:
		return mix(rng, block, before, now, 0, min(2*PageSize, len(now)))
	}
	return now
}

// mix takes the blocks from lo to hi from either file; the others from now.
func mix(rng *rand.Rand, block int, before, now []byte, lo, hi int) []byte {
	out := bytes.Clone(now)
	all := rng.IntN(3) == 0
	for at := lo; at < hi; at += block {
		if all || rng.IntN(2) == 0 {
			end := min(at+block, hi)
			n := 0
			if at < len(before) {
				n = copy(out[at:end], before[at:])
			}
			clear(out[at+n : end])
		}
	}
	return out
}

func read(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestOpenSyncs: the process is killed before the last sync of an append. The
// next one reads the entry from the kernel's memory, and raft counts it: the
// power may then fail.
func TestOpenSyncs(t *testing.T) {
	dir := tempDir(t)
	path := filepath.Join(dir, FileName)
	l := opened(t, dir)
	logtest.Store(t, l, logtest.Entry(1, 1, 100))
	onDisk := read(t, path)
	logtest.Store(t, l, logtest.Entry(2, 1, 100))
	crash(l)
	l, err := open(dir, 0, 0, func(path string) error {
		onDisk = read(t, path)
		return settle(path)
	})
	if err != nil {
		t.Fatal(err)
	}
	last, _ := l.LastIndex()
	crash(l)
	if err := os.WriteFile(path, onDisk, 0o600); err != nil {
		t.Fatal(err)
	}
	if got, _ := opened(t, dir).LastIndex(); got != last {
		t.Errorf("the log ended at %d when it was opened, after a power cut at %d", last, got)
	}
}

// TestFlippedBit flips any bit of the file, and cuts it off anywhere: opening it
// ends, with the log as it was, or with an error that says that the file is
// damaged. Never with a panic, with other entries, or with fewer.
func TestFlippedBit(t *testing.T) {
	dir := tempDir(t)
	path := filepath.Join(dir, FileName)
	l := opened(t, dir)
	want := logtest.Entries(1, 30, 1, 500)
	for _, e := range want[:20] {
		logtest.Store(t, l, e)
	}
	logtest.Store(t, l, want[20:]...)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	whole := read(t, path)
	rng := rand.New(rand.NewPCG(7, 8))
	found := 0
	check := func(what string, b []byte) {
		t.Helper()
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		l, err := openSmall(dir)
		if c := new(seglog.CorruptError); errors.As(err, &c) {
			if found++; c.File != path {
				t.Errorf("%s: %v", what, err)
			}
			return
		}
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		defer crash(l)
		// cmp takes a minute for all of them under the race detector.
		if got := logtest.Contents(t, l); !reflect.DeepEqual(want, got) {
			t.Fatalf("%s (-want +got):\n%s", what, cmp.Diff(want, got))
		}
	}
	for i := range 200 {
		at := rng.IntN(len(whole))
		if i%2 == 0 {
			at = rng.IntN(6 * PageSize) // where bolt's own pages are
		}
		bad := bytes.Clone(whole)
		bad[at] ^= 1 << rng.IntN(8)
		check(fmt.Sprintf("a flipped bit at %d", at), bad)
	}
	for range 100 {
		at := rng.IntN(len(whole))
		check(fmt.Sprintf("cut off at %d", at), whole[:at])
	}
	if found == 0 {
		t.Error("no damage was found")
	}
}

// TestDamageWhileOpen: an entry whose bytes change under an open log is refused.
func TestDamageWhileOpen(t *testing.T) {
	dir := tempDir(t)
	l := opened(t, dir)
	es := logtest.Entries(1, 3, 1, 9000)
	copy(es[1].Data, "this is the second one")
	logtest.Store(t, l, es...)
	path := filepath.Join(dir, FileName)
	b := read(t, path)
	at := bytes.Index(b, []byte("this is the second one"))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if _, err := f.WriteAt([]byte{b[at+5000] ^ 4}, int64(at+5000)); err != nil {
		t.Fatal(err)
	}
	var e raft.Log
	if err := l.GetLog(2, &e); !errors.As(err, new(*seglog.CorruptError)) {
		t.Errorf("a damaged entry was read: %v", err)
	}
	if err := l.GetLog(1, &e); err != nil {
		t.Error(err)
	}
}

func TestOpenedTwice(t *testing.T) {
	dir := tempDir(t)
	opened(t, dir)
	if _, err := openSmall(dir); err == nil {
		t.Error("opened twice")
	}
}

func BenchmarkStoreLog(b *testing.B) {
	l, err := Open(b.TempDir(), 0)
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	logtest.Benchmark(b, l)
}
