package runtime_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

// deadMount mounts a FUSE file system whose server never answers. answer ends
// it: whoever waits gets an error.
func deadMount(t *testing.T, dir string) (answer func()) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	dev, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skip("needs /dev/fuse:", err)
	}
	if err := unix.Mount("dead", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", dev)); err != nil {
		unix.Close(dev)
		t.Fatal(err)
	}
	closed := false
	answer = func() {
		if !closed {
			closed = true
			unix.Close(dev) // the kernel fails all that waits
		}
	}
	t.Cleanup(func() {
		answer()
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return answer
}

// TestRootStuckStart: a start that hangs on a mount is given up, its reason
// names the mount, and others start meanwhile.
func TestRootStuckStart(t *testing.T) {
	n := newNode(t, func(n *node) { n.startLimit = 12 * time.Second }) // the others, too, have to start within it
	dead := filepath.Join(n.dir, "dead")
	deadMount(t, dead)
	n.sandbox("stuck")
	n.sandbox("other")
	hangs := n.spec("stuck", "hangs", "true")
	hangs.Mounts = []api.Mount{{Source: dead + "/data", Destination: "/data"}}
	result := make(chan api.ContainerStatus, 1)
	go func() {
		st, err := n.client.StartContainer(n.ctx, hangs)
		if err != nil {
			t.Error(err)
		}
		result <- st
	}()
	if st := n.run(n.spec("other", "free", "exit", "4")); st.ExitCode != 4 {
		t.Errorf("beside it: %+v", st)
	}
	st := <-result
	if st.State != api.StateExited || !strings.Contains(st.StartError, "start took too long") ||
		!strings.Contains(st.StartError, "/data is "+dead+"/data, on a file system of type fuse") {
		t.Errorf("status %+v", st)
	}
	if err := n.client.RemoveContainer(n.ctx, "hangs"); err != nil {
		t.Error(err)
	}
	if st := n.run(n.spec("stuck", "next", "exit", "5")); st.ExitCode != 5 {
		t.Errorf("the next in its pod: %+v", st)
	}
}
