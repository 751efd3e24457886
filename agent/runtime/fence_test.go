package runtime_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

// bootClock is now, by the clock of deadlines.
func bootClock(t *testing.T) int64 {
	t.Helper()
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		t.Fatal(err)
	}
	return ts.Nano()
}

// fence makes a request that must succeed.
func (n *node) fence(f api.Fence) api.FenceStatus {
	n.t.Helper()
	st, err := n.client.Fence(n.ctx, f)
	if err != nil {
		n.t.Fatal(err, n.ownLog())
	}
	return st
}

func isFenced(err error) bool {
	var e *api.Error
	return errors.As(err, &e) && e.Code == api.CodeFenced
}

// volume mounts something in a pod's directory.
func (n *node) volume(pod string) (dir, mount string) {
	n.t.Helper()
	dir = filepath.Join(n.dir, "pods", pod)
	mount = filepath.Join(dir, "volumes", "data")
	if err := os.MkdirAll(mount, 0o755); err != nil {
		n.t.Fatal(err)
	}
	if err := unix.Mount("data", mount, "tmpfs", 0, ""); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = unix.Unmount(mount, unix.MNT_DETACH) })
	return dir, mount
}

func mounted(path string) bool {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	return err != nil || strings.Contains(string(mounts), " "+path+" ")
}

// TestRootFence: podmon ends the pods of the list when their deadline passes,
// with no client there, not earlier and no other pod, and starts nothing in
// them again.
func TestRootFence(t *testing.T) {
	n := newNode(t)
	dir, mount := n.volume("p")
	pods := []api.FencedPod{{UID: "uid-p", Dirs: []string{dir}}}
	if _, err := n.client.Fence(n.ctx, api.Fence{Add: pods}); !isFenced(err) {
		t.Errorf("a pod without a deadline: %v", err)
	}
	if _, err := n.client.Fence(n.ctx, api.Fence{Deadline: bootClock(t) - 1, Add: pods}); !isFenced(err) {
		t.Errorf("a pod after the deadline: %v", err)
	}
	if _, err := n.client.Fence(n.ctx, api.Fence{Add: []api.FencedPod{{UID: "u", Dirs: []string{"x"}}}}); err == nil || isFenced(err) {
		t.Errorf("a folder that is no absolute path: %v", err)
	}
	if st := n.fence(api.Fence{}); st.Deadline != 0 || len(st.Pods) != 0 {
		t.Errorf("what was refused is on the list: %+v", st)
	}

	n.fence(api.Fence{Deadline: bootClock(t) + int64(time.Hour), Add: pods})
	n.sandbox("p")
	n.sandbox("q")
	first, second, other := n.start(n.spec("p", "c1", "sleep")), n.start(n.spec("p", "c2", "tick")), n.start(n.spec("q", "c3", "sleep"))
	deadline := bootClock(t) + int64(1500*time.Millisecond)
	n.fence(api.Fence{Deadline: deadline})
	n.client.Close() // clusterd is dead
	for alive(first.Pid) || alive(second.Pid) {
		if bootClock(t) > deadline+int64(30*time.Second) {
			t.Fatal("the pod runs on", n.ownLog())
		}
		<-time.After(time.Millisecond)
	}
	t.Logf("dead %s after the deadline", time.Duration(bootClock(t)-deadline))
	if bootClock(t) < deadline {
		t.Error("it was ended before its deadline")
	}
	eventually(t, "its volume is unmounted", func() bool { return !mounted(mount) })

	n.client = n.connect()
	eventually(t, "podmon says that it has ended", func() bool {
		st := n.fence(api.Fence{})
		return len(st.Pods) == 1 && st.Pods[0] == api.FencedPodStatus{UID: "uid-p", Fenced: true, Ended: true}
	})
	if st := n.status("c1"); st.State != api.StateExited || st.Signal != int(syscall.SIGKILL) {
		t.Errorf("its container is %+v", st)
	}
	if !alive(other.Pid) {
		t.Error("a pod that is not on the list was ended")
	}
	n.fence(api.Fence{Deadline: bootClock(t) + int64(time.Hour)})
	if _, err := n.client.StartContainer(n.ctx, n.spec("p", "c4", "sleep")); !isFenced(err) {
		t.Errorf("a start in it once the node is back: %v", err)
	}
	if err := n.client.RemoveSandbox(n.ctx, "p"); err != nil {
		t.Fatal(err)
	}
	if _, err := n.client.CreateSandbox(n.ctx, api.Sandbox{ID: "p2", PodUID: "uid-p", CgroupParent: n.cgroup + "/podp"}); !isFenced(err) {
		t.Errorf("another sandbox of it: %v", err)
	}
	if st := n.fence(api.Fence{Drop: []string{"uid-p"}}); len(st.Pods) != 0 {
		t.Errorf("dropped, and on the list: %+v", st)
	}
}

// TestRootFenceIsMoved: a pod lives as long as its deadline is moved on, and a
// deadline that has passed ends it at once.
func TestRootFenceIsMoved(t *testing.T) {
	n := newNode(t)
	n.fence(api.Fence{Deadline: bootClock(t) + int64(time.Hour), Add: []api.FencedPod{{UID: "uid-p"}}})
	n.sandbox("p")
	c := n.start(n.spec("p", "c", "sleep"))
	events, err := n.client.Events(n.ctx)
	if err != nil {
		t.Fatal(err)
	}
	deadline := bootClock(t) + int64(10*time.Second) // time for the next two
	n.fence(api.Fence{Deadline: deadline})
	n.fence(api.Fence{Deadline: deadline + int64(time.Hour)})
	eventually(t, "the first deadline passes", func() bool { return bootClock(t) > deadline+int64(200*time.Millisecond) })
	if !alive(c.Pid) || n.fence(api.Fence{}).Pods[0].Fenced {
		t.Fatal("it was ended at a deadline that had been moved")
	}
	n.fence(api.Fence{Deadline: 1})
	for e := range events {
		if e.Kind == api.EventFenced && e.ID == "uid-p" {
			break
		}
	}
	eventually(t, "its end", func() bool { return !alive(c.Pid) && n.fence(api.Fence{}).Pods[0].Ended })
}

// TestRootFenceOutlivesPodmon: the next podmon holds a deadline that was given to
// one that was killed.
func TestRootFenceOutlivesPodmon(t *testing.T) {
	n := newNode(t)
	dir, mount := n.volume("p")
	n.fence(api.Fence{Deadline: bootClock(t) + int64(time.Hour), Add: []api.FencedPod{{UID: "uid-p", Dirs: []string{dir}}}})
	n.sandbox("p")
	c := n.start(n.spec("p", "c", "sleep"))
	deadline := bootClock(t) + int64(3*time.Second)
	n.fence(api.Fence{Deadline: deadline})
	n.client.Close()
	if err := syscall.Kill(n.podmonPid(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "its end", func() bool { return !alive(c.Pid) && !mounted(mount) })
	if bootClock(t) < deadline {
		t.Error("it was ended before its deadline")
	}
	n.client = n.connect()
	eventually(t, "podmon says so", func() bool {
		st := n.fence(api.Fence{})
		return st.Deadline == deadline && len(st.Pods) == 1 && st.Pods[0].Ended
	})
}
