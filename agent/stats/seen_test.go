package stats

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestRememberedFilesAreBounded: a pod's files with several names take a part of the
// node's memory that is not the pod's to choose.
func TestRememberedFilesAreBounded(t *testing.T) {
	u := usage{seen: map[inode]bool{}}
	for i := range uint64(maxSeen + 1000) {
		st := unix.Statx_t{Mode: unix.S_IFREG, Nlink: 2, Ino: i, Blocks: 1}
		u.count(&st)
		u.count(&st)
	}
	if len(u.seen) != maxSeen {
		t.Errorf("%d are remembered", len(u.seen))
	}
	if want := int64(maxSeen + 2*1000); u.Inodes != want {
		t.Errorf("%d inodes, want %d", u.Inodes, want)
	}
}
