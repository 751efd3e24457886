package runtime_test

import (
	"bytes"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/runtime"
)

// TestRootClientGoesAway: what happens while no client is connected is found by
// the next.
func TestRootClientGoesAway(t *testing.T) {
	n := newNode(t)
	n.sandbox("p", func(s *api.Sandbox) { s.Labels = map[string]string{"note": "kept"} })
	spec := n.spec("p", "c", "tick")
	n.start(spec)
	eventually(t, "readiness", func() bool { return strings.Contains(n.output(spec), "ready") })
	pid := n.status("c").Pid
	podmon := n.podmonPid()
	n.client.Close()
	for _, sig := range []syscall.Signal{syscall.SIGUSR1, syscall.SIGTERM} {
		if err := syscall.Kill(pid, sig); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "its end", func() bool { return !alive(pid) })
	n.client = n.connect()
	if n.podmonPid() != podmon {
		t.Error("a second podmon was started")
	}
	if st := n.exited("c"); st.ExitCode != 7 || st.Lost {
		t.Errorf("status: %+v", st)
	}
	sandboxes, _, err := n.client.List(n.ctx)
	if err != nil || len(sandboxes) != 1 || sandboxes[0].Sandbox.Labels["note"] != "kept" {
		t.Errorf("sandboxes: %+v %v", sandboxes, err)
	}
}

// TestRootPodmonIsKilled: containers go on, nothing they write in between is
// lost, and the next podmon takes them over.
func TestRootPodmonIsKilled(t *testing.T) {
	n := newNode(t)
	sb := n.sandbox("p")
	spec := n.spec("p", "c", "tick")
	n.start(spec)
	ended := n.spec("p", "ended", "sleep")
	n.start(ended)
	exitedBefore := n.spec("p", "before", "exit", "5")
	n.run(exitedBefore)
	eventually(t, "readiness", func() bool { return strings.Contains(n.output(spec), "ready") })
	pid, endedPid := n.status("c").Pid, n.status("ended").Pid
	events, err := n.client.Events(n.ctx)
	if err != nil {
		t.Fatal(err)
	}
	old := n.podmonPid()
	if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for range events { // closed when the connection breaks
	}
	eventually(t, "podmon's end", func() bool { return !alive(old) })
	for range 2 {
		if err := syscall.Kill(pid, syscall.SIGUSR1); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Kill(endedPid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "its end", func() bool { return !alive(endedPid) })

	// The next call starts the next podmon.
	if st := n.status("c"); st.State != api.StateRunning || st.Pid != pid {
		t.Fatalf("status after adoption: %+v", st)
	}
	if n.podmonPid() == old {
		t.Fatal("no new podmon")
	}
	if st := n.exited("ended"); !st.Lost || st.ExitCode != 255 {
		t.Errorf("ended unseen: %+v", st)
	}
	if st := n.status("before"); st.ExitCode != 5 || st.Lost {
		t.Errorf("ended before: %+v", st)
	}
	sandboxes, _, err := n.client.List(n.ctx)
	if err != nil || len(sandboxes) != 1 || sandboxes[0].State != api.StateRunning || sandboxes[0].Pid != sb.Pid {
		t.Errorf("sandboxes: %+v %v", sandboxes, err)
	}
	// Signals may merge, so at least one tick came while nobody listened.
	eventually(t, "output of the time in between", func() bool { return strings.Contains(n.output(spec), "tick 0") })
	var out bytes.Buffer
	code, err := n.client.Exec(n.ctx, api.Exec{ContainerID: "c", Args: []string{"/bin/box", "echo", "still here"}}, runtime.ExecIO{Stdout: &out})
	if code != 0 || err != nil || out.String() != "still here\n" {
		t.Errorf("exec in an adopted container: %d %v %q", code, err, out.String())
	}
	if st := n.run(n.spec("p", "new", "true")); st.ExitCode != 0 || st.StartError != "" {
		t.Errorf("new container in an adopted sandbox: %+v", st)
	}
	if err := n.client.Signal(n.ctx, api.Signal{ID: "c", Signal: int(syscall.SIGTERM)}); err != nil {
		t.Fatal(err)
	}
	// Whose parent podmon is not, tells its exit code since Linux 6.15
	// (PIDFD_GET_INFO); before, the code is lost, and said to be.
	if st := n.exited("c"); (st.ExitCode != 7 || st.Lost) && (kernelSince(6, 15) || st.ExitCode != 255 || !st.Lost) {
		t.Errorf("end of an adopted container: %+v", st)
	}
}

// kernelSince tells whether the kernel is of this version or newer.
func kernelSince(major, minor int) bool {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return false
	}
	var a, b int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &a, &b); err != nil {
		return false
	}
	return a > major || a == major && b >= minor
}

// TestRootPodmonStops: SIGTERM ends podmon, not its containers.
func TestRootPodmonStops(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	spec := n.spec("p", "c", "sleep")
	n.start(spec)
	old := n.podmonPid()
	pid := n.status("c").Pid
	if err := syscall.Kill(old, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	eventually(t, "podmon's end", func() bool { return !alive(old) })
	if !alive(pid) {
		t.Fatal("container ended with podmon")
	}
	if st := n.status("c"); st.State != api.StateRunning || st.Pid != pid {
		t.Errorf("after restart: %+v", st)
	}
}
