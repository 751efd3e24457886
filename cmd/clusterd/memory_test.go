package main

import (
	"testing"
	"time"
)

// TestQuiet: memory is given back once when collections have ceased, and again after
// the next burst of them.
func TestQuiet(t *testing.T) {
	const much = spareAtLeast
	var q quiet
	began := time.Now()
	for _, tt := range []struct {
		at     int // seconds
		cycles uint64
		spare  uint64
		due    bool
	}{
		{0, 5, much, false}, {5, 7, much, false}, {20, 8, much, false}, // a start
		{35, 8, much, false}, {40, 8, much, true}, {45, 8, much, false}, {100, 8, much, false},
		{130, 9, much, false}, {150, 9, much - 1, false}, {155, 9, much, false}, // one at rest, that left little
		{160, 20, much, false}, {180, 20, much, true}, {185, 20, much, false},
	} {
		if got := q.due(began.Add(time.Duration(tt.at)*time.Second), heap{tt.cycles, tt.spare}); got != tt.due {
			t.Errorf("after %d s: %t", tt.at, got)
		}
	}
	if h := readHeap(); h.spare == 0 {
		t.Errorf("the runtime says %+v", h)
	}
}
