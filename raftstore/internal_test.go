package raftstore

import (
	"math"
	"testing"
	"time"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// What a snapshot says of itself may be anything.
func TestRoomFor(t *testing.T) {
	const mib = 1 << 20
	for _, tt := range []struct {
		d    mvcc.Digest
		want int
	}{
		{mvcc.Digest{}, 0},
		{mvcc.Digest{Keys: 100, Bytes: 1 * mib}, 0},
		{mvcc.Digest{Keys: 4096, Bytes: 79 * mib}, 100 * mib},
		{mvcc.Digest{Bytes: 80 * mib, HistoryBytes: 80 * mib}, 200 * mib},
		{mvcc.Digest{Bytes: 15 << 30, HistoryBytes: 15 << 30, Keys: 1}, roomMost},
		{mvcc.Digest{Bytes: math.MaxInt64, HistoryBytes: math.MaxInt64}, 0},
		{mvcc.Digest{Bytes: -1, HistoryBytes: 1 << 30}, 0},
		{mvcc.Digest{Keys: math.MaxInt64}, 0},
	} {
		if got := roomFor(tt.d); got != tt.want {
			t.Errorf("%+v: %d bytes, want %d", tt.d, got, tt.want)
		}
	}
	makeRoom(0)
	makeRoom(roomLeast)
}

func TestProposalsAreBounded(t *testing.T) {
	p := newProposals(time.Hour)
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
		if log >= enoughLog(least, snapped, snapped, "n1") { // nothing can be compressed
			log, snapped = 0, state
			snapshots++
		}
	}
	if snapshots < 4 || snapshots > 7 {
		t.Errorf("%d snapshots while 4 GiB were written", snapshots)
	}
}

// What can be compressed is snapshotted more often, but not for every bit of
// log: reading and compressing all of the state takes its time.
func TestEnoughLog(t *testing.T) {
	const mib = 1 << 20
	for _, tt := range []struct{ state, onDisk, min, max int64 }{
		{0, 0, 64, 78},
		{150, 30, 64, 78},
		{900, 180, 300, 366},
		{900, 900, 900, 1098},
	} {
		for _, id := range []string{"n0", "n1", "n2", "n3", "n4"} {
			if got := enoughLog(64*mib, tt.state*mib, tt.onDisk*mib, id) / mib; got < tt.min || got > tt.max {
				t.Errorf("%d MiB of state, %d on disk, %s: %d MiB", tt.state, tt.onDisk, id, got)
			}
		}
	}
}

// Memory is given back once after many writes, not while they last and not for
// the heartbeats that follow.
func TestBurst(t *testing.T) {
	var b burst
	applied, over := int64(0), []int(nil)
	for tick := range 60 {
		switch {
		case tick < 10:
			applied += 20 << 20
		case tick == 40:
			applied += burstBytes
		default:
			applied += 10 << 10
		}
		if b.over(applied) {
			over = append(over, tick)
		}
	}
	if len(over) != 2 || over[0] != 10+settledAfter-1 || over[1] != 41+settledAfter-1 {
		t.Errorf("over at %v", over)
	}
}
