package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/slack"
)

const (
	// quietFor is how long no collection was needed before memory is given back.
	quietFor = 20 * time.Second
	// spareAtLeast is how much has to be worth it: a return is a whole collection, of
	// some 50 ms of a processor.
	spareAtLeast = 8 << 20
	// unmapEvery is how often pages of the program's file are unmapped at rest, of which
	// those that are used come back: some milliseconds of a processor.
	unmapEvery = time.Minute
)

// keepMemory gives memory that a start or a burst of requests left behind back to
// the kernel, once it is over. Go keeps it until the heap has grown by as much,
// which at rest it never does: what little is needed then comes to the same in time,
// and is returned whenever it has. The store returns what is its own sooner. Pages of
// the program's file go too, at most half of which are used again at rest: a start and
// each collection use others.
func keepMemory(ctx context.Context) error {
	tick := slack.NewTicker(quietFor / 4)
	defer tick.Stop()
	var q quiet
	for {
		select {
		case now := <-tick.C:
			memory, program := q.due(now, readHeap())
			if memory {
				debug.FreeOSMemory()
			}
			if program {
				if err := unmapProgram(); err != nil {
					klog.FromContext(ctx).Info("pages of the program's file stay in memory", "err", err)
				}
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
	cycles  uint64    // at the last look
	since   time.Time // of the last collection that was needed, or return
	started bool      // memory was given back once
	unmap   time.Time // when pages of the program are unmapped next
}

// due says what is to be given back now, after quietFor without a collection: memory,
// if there is enough of it, where what a start left behind always is; pages of the
// program with it, and every unmapEvery.
func (q *quiet) due(now time.Time, h heap) (memory, program bool) {
	if h.cycles != q.cycles || q.since.IsZero() {
		q.cycles, q.since = h.cycles, now
		return false, false
	}
	if now.Sub(q.since) < quietFor {
		return false, false
	}
	if !q.started || h.spare >= spareAtLeast {
		q.since, q.started, memory = now, true, true
	}
	if memory || !now.Before(q.unmap) {
		q.unmap, program = now.Add(unmapEvery), true
	}
	return memory, program
}

// unmapProgram takes the pages of the program's file out of this process. They
// stay in the kernel's page cache, from where those that are needed come back at
// their next use; the others the kernel may drop without looking for users of
// them first.
func unmapProgram() error {
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return err
	}
	maps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		return err
	}
	var errs []error
	for _, m := range fileMappings(string(maps), exe) {
		// No memory of Go's: the pointer is the kernel's word.
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, m.from, m.to-m.from, unix.MADV_DONTNEED); errno != 0 {
			errs = append(errs, fmt.Errorf("madvise %x-%x: %w", m.from, m.to, errno))
		}
	}
	return errors.Join(errs...)
}

type mapping struct{ from, to uintptr }

// fileMappings are the mappings of a file in the text of /proc/PID/smaps that may be
// read from it again: no page of them can be written, and none was, by whom ever
// (relocations, a debugger).
func fileMappings(smaps, file string) (all []mapping) {
	var now mapping
	for line := range strings.Lines(smaps) {
		fields := strings.Fields(line)
		switch {
		case len(fields) == 0:
		case len(fields) >= 5 && strings.Contains(fields[0], "-"): // FROM-TO rwxp OFFSET DEVICE INODE PATH
			now = mapping{}
			_, path, _ := strings.Cut(line, "/")
			if "/"+strings.TrimSuffix(path, "\n") != file || strings.Contains(fields[1], "w") {
				continue
			}
			if _, err := fmt.Sscanf(fields[0], "%x-%x", &now.from, &now.to); err != nil {
				now = mapping{}
			}
		case fields[0] == "Anonymous:" && now.to != 0 && len(fields) > 1 && fields[1] == "0":
			all = append(all, now)
		}
	}
	return all
}
