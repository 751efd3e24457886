package raftstore

import (
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

const (
	// keyOverhead is about what a key takes beside its own bytes and its value's.
	keyOverhead = 256
	// roomLeast and roomMost bound what a snapshot that says how much it holds can
	// make us ask for. It is address space, and none of it is used by asking.
	roomLeast, roomMost = 64 << 20, 16 << 30
)

// roomFor is how much memory a keyspace takes, with what is garbage while it is
// put together.
func roomFor(d mvcc.Digest) int {
	if d.Keys < 0 || d.Bytes < 0 || d.HistoryBytes < 0 || max(d.Keys, d.Bytes, d.HistoryBytes) > roomMost {
		return 0 // it will not add up
	}
	n := d.Bytes + d.HistoryBytes + d.Keys*keyOverhead
	if n += n / 4; n < roomLeast {
		return 0
	}
	return int(min(n, roomMost))
}

// makeRoom has the heap grow by n bytes of large pages. A start touches as much
// memory as the state takes for the first time, which in pages of 4 KiB costs more
// than all that is done with it. Go does not ask for large ones. What is known of
// the address space of a slice holds when the slice is gone and smaller objects
// take its place; so one is made, and freed before anything is in it.
func makeRoom(n int) {
	if n <= 0 {
		return
	}
	b := make([]byte, n)
	// A kernel without large pages refuses: then it is as it was.
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	runtime.KeepAlive(b)
	runtime.GC() // b is not used any more
}
