package seglog

import (
	"errors"
	"flag"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/logtest"
)

var (
	crashSeeds = flag.Uint64("crash-seeds", 10000, "how many histories TestCrashes tries")
	crashSeed  = flag.Uint64("crash-seed", 0, "the only history TestCrashes tries; 0: as many as -crash-seeds says")
)

// TestTornAppendDoesNotComeBack: a mark stands at E. Of an append X, R only R
// reaches the disk. Y, as long as X, is then written where X would be. R was
// never in the log behind Y.
func TestTornAppendDoesNotComeBack(t *testing.T) {
	d := newCrashDisk(rand.New(rand.NewPCG(1, 1)))
	l := openCrashed(t, d)
	opts := crashOptions()
	store(t, l, entry(1, 1, 512-recordHeader-segmentHeader%512))
	if err := l.Mark(); err != nil {
		t.Fatal(err)
	}
	seg := l.segments[0]
	f := seg.f.(*crashHandle).f
	if err := seg.f.sync(); err != nil {
		t.Fatal(err)
	}
	before, end := append([]byte(nil), f.now...), seg.end
	// X fills its block and R is in the next one.
	x := entry(2, 1, int(padded(end/512*512+512-end))-recordHeader)
	y := entry(2, 1, len(x.Data))
	y.Data[0]++
	d.left = 1 // the write, and not the sync
	_ = l.StoreLogs([]*raft.Log{x, entry(3, 1, 100)})
	d.restart()
	copy(f.now, before[:end/512*512+512])
	f.durable, f.pending = append([]byte(nil), f.now...), nil

	l, err := openIn(d, "log", opts)
	if err != nil {
		t.Fatal(err)
	}
	if last, _ := l.LastIndex(); last != 1 {
		t.Fatalf("after the torn append the log ends at %d", last)
	}
	store(t, l, y)
	d.restart() // without a mark
	l = openCrashed(t, d)
	if diff := cmp.Diff([]*raft.Log{entry(1, 1, len(contents(t, l)[0].Data)), y}, contents(t, l)); diff != "" {
		t.Errorf("what was appended and what is there (-want +got):\n%s", diff)
	}
}

// TestForeignContinuation: the same without the help of truncation. A record
// that was written behind another one than it now stands behind is not taken.
func TestForeignContinuation(t *testing.T) {
	of := life{salt: 7, version: segmentVersion}
	header := appendHeader(nil, 1, of.salt)
	_, afterX := appendRecord(nil, of.salt, headerSum(header), segmentHeader, entry(1, 1, 100))
	b, _ := appendRecord(header, of.salt, headerSum(header), segmentHeader, entry(1, 2, 100)) // Y
	b, _ = appendRecord(b, of.salt, afterX, segmentHeader, entry(2, 2, 100))                  // R, behind X
	s := &segment{life: of, first: 1}
	if reason := s.scan(b); len(s.starts) != 1 {
		t.Errorf("%d entries were taken (%s)", len(s.starts), reason)
	}
}

// TestOpenSyncs: the process is killed between the write of an append and its
// sync. The next one reads the entry from the kernel's memory, and raft counts
// it: the power may then fail.
func TestOpenSyncs(t *testing.T) {
	for seed := range uint64(20) {
		d := newCrashDisk(rand.New(rand.NewPCG(seed, 2)))
		l := openCrashed(t, d)
		store(t, l, entry(1, 1, 100))
		d.left = 1 // the write
		if err := l.StoreLog(entry(2, 1, 100)); !errors.Is(err, errKilled) {
			t.Fatal(err)
		}
		d.restart()
		last, _ := openCrashed(t, d).LastIndex()
		d.powerCut()
		if got, _ := openCrashed(t, d).LastIndex(); got != last {
			t.Fatalf("seed %d: the log ended at %d when it was opened, after a power cut at %d", seed, last, got)
		}
	}
}

func crashOptions() Options {
	opts := small
	opts.SegmentBytes, opts.MaxSpares = 8<<10, 2
	return opts
}

func openCrashed(t *testing.T, d *crashDisk) *Log {
	t.Helper()
	l, err := openIn(d, "log", crashOptions())
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// TestCrashes does to a log what raft does, in many random histories. In each
// the process is killed, or the power is cut, in the middle of anything, twice
// at least, and while the log is being opened, too. Blocks of 512 or 4096 bytes
// reach the disk in any order. What was acknowledged is there, whatever is
// there had been appended behind what is before it, and what a log held when it
// was opened it still holds after the next crash.
func TestCrashes(t *testing.T) {
	if *crashSeed != 0 {
		crashHistory(t, *crashSeed)
		return
	}
	for seed := uint64(1); seed <= *crashSeeds && !t.Failed(); seed++ {
		crashHistory(t, seed)
	}
}

func crashHistory(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 3))
	d := newCrashDisk(rng)
	m := logtest.NewModel()
	l := openCrashed(t, d)
	for crashes := 0; crashes < 3; {
		switch {
		case rng.IntN(8) == 0:
			d.left = rng.IntN(6)
		case m.AfterMark() && rng.IntN(2) == 0:
			d.left = 1 // the write of an append, and not its sync
		}
		torn := m.AfterTorn()
		err := m.Step(rng, l)
		if err == nil && d.left < 0 && rng.IntN(12) > 0 && !(torn && rng.IntN(2) == 0) {
			continue
		}
		if err != nil && !errors.Is(err, errKilled) {
			t.Errorf("seed %d: %v", seed, err)
			return
		}
		crashes++
		for l = nil; l == nil; {
			if rng.IntN(2) == 0 {
				d.powerCut()
			} else {
				d.restart()
			}
			if rng.IntN(3) == 0 {
				d.left = rng.IntN(6) // the next one does not get far
			}
			var err error
			if l, err = openIn(d, "log", crashOptions()); err != nil && !errors.Is(err, errKilled) {
				t.Errorf("seed %d: after a crash: %v", seed, err)
				return
			}
			if l != nil && d.left == 0 {
				l = nil
			}
		}
		if err := m.Found(l); err != nil {
			t.Errorf("seed %d: after crash %d: %v", seed, crashes, err)
			return
		}
	}
}
