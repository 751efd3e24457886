package main

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// quietFor is how long no collection was needed before memory is given back.
	quietFor = 20 * time.Second
	// spareAtLeast is how much has to be worth it: a return is a whole collection.
	spareAtLeast = 16 << 20
)

// keepMemory gives memory that a start or a burst of requests left behind back to
// the kernel, once it is over. Go keeps it until the heap has grown by as much,
// which at rest it never does. The store returns what is its own sooner.
func keepMemory(ctx context.Context) error {
	tick := time.NewTicker(quietFor / 4)
	defer tick.Stop()
	var q quiet
	for {
		select {
		case now := <-tick.C:
			if q.due(now, readHeap()) {
				debug.FreeOSMemory()
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// heap is what Go's runtime says of it.
type heap struct {
	cycles uint64 // of collections that were needed, not asked for
	spare  uint64 // bytes that were not live at the last one, or are free
}

func readHeap() heap {
	s := []metrics.Sample{{Name: "/gc/cycles/automatic:gc-cycles"}, {Name: "/memory/classes/heap/free:bytes"}, {Name: "/memory/classes/heap/objects:bytes"}, {Name: "/gc/heap/live:bytes"}}
	metrics.Read(s)
	h := heap{cycles: s[0].Value.Uint64(), spare: s[1].Value.Uint64()}
	if objects, live := s[2].Value.Uint64(), s[3].Value.Uint64(); objects > live {
		h.spare += objects - live
	}
	return h
}

// quiet notices when collections have come to an end for a while. The zero value
// has seen none.
type quiet struct {
	cycles   uint64 // at the last look
	since    time.Time
	returned bool // since then
}

// due says whether memory is to be given back now: once after each quietFor without
// a collection, if there is enough of it.
func (q *quiet) due(now time.Time, h heap) bool {
	if h.cycles != q.cycles || q.since.IsZero() {
		q.cycles, q.since, q.returned = h.cycles, now, false
		return false
	}
	if q.returned || now.Sub(q.since) < quietFor {
		return false
	}
	q.returned = true
	return h.spare >= spareAtLeast
}
