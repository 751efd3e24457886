package podmon

import (
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestNoRecordsOnDisk: a podmon that cannot keep its records in memory does not
// serve, and has written none.
func TestNoRecordsOnDisk(t *testing.T) {
	dir := t.TempDir()
	failed := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and ends with the goroutine: it may mount nothing any more
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		if err := unix.Capset(&header, &data[0]); err != nil {
			failed <- nil
			t.Error(err)
			return
		}
		s, err := New(Config{Dir: dir, Logger: slog.New(slog.DiscardHandler)})
		if err == nil {
			s.close()
		}
		failed <- err
	}()
	if err := <-failed; err == nil || !strings.Contains(err.Error(), "cannot mount a tmpfs for the state of containers") || !strings.Contains(err.Error(), "mount tmpfs") {
		t.Errorf("%v, want a refusal to keep records on disk", err)
	}
	if left, err := os.ReadDir(filepath.Join(dir, liveDir)); err != nil || len(left) > 0 {
		t.Errorf("on disk: %v, %v", left, err)
	}
}
