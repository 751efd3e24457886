package raftstore

import "testing"

func TestProposalsAreBounded(t *testing.T) {
	p := newProposals()
	raw := make([]byte, 100)
	for range 10 {
		p.add(proposal{raw: raw})
	}
	p.add(proposal{raw: make([]byte, 5000)})
	for i, want := range []int{3, 5, 2, 1, 0} {
		max := 1000
		if i == 0 {
			max = 3
		}
		if got := len(p.take(max, 599)); got != want {
			t.Errorf("take %d: %d commands, want %d", i, got, want)
		}
	}
}

// TestGrowthIsSnapshotted: a store that only grows takes snapshots, and not more
// often than its state doubles.
func TestGrowthIsSnapshotted(t *testing.T) {
	const least = 64 << 20
	var log, state, snapped int64
	snapshots := 0
	for range 4 << 10 { // a mebibyte of new objects each
		log, state = log+1<<20, state+1<<20
		if log >= enoughLog(least, snapped, "n1") {
			log, snapped = 0, state
			snapshots++
		}
	}
	if snapshots < 4 || snapshots > 7 {
		t.Errorf("%d snapshots while 4 GiB were written", snapshots)
	}
}
