package autosnapshot

import (
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netnstest"
)

// TestRootFullDisk: a real one, of 100 KiB.
func TestRootFullDisk(t *testing.T) {
	netnstest.NeedRoot(t)
	k := newKit(t)
	if err := os.Mkdir(k.folder, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("snapshots", k.folder, "tmpfs", 0, "size=100k"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(k.folder, 0); err != nil {
			t.Error(err)
		}
	}()
	if _, err := k.taker("n1", "@every 1h").take(t.Context(), time.Now()); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("%v", err)
	}
	if got := k.files(); len(got) > 0 {
		t.Errorf("left: %v", got)
	}
}
