package runtime_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
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
	if st := n.exited("ended"); st.Lost || st.ExitCode != 137 {
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
	if st := n.exited("c"); st.ExitCode != 7 || st.Lost {
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

// keeperPid finds podmon's parent.
func (n *node) keeperPid() int {
	n.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n.podmonPid()))
	if err != nil {
		n.t.Fatal(err)
	}
	var ppid int
	var state string
	if _, err := fmt.Sscan(string(b[bytes.LastIndexByte(b, ')')+1:]), &state, &ppid); err != nil {
		n.t.Fatal(err)
	}
	comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", ppid))
	if string(comm) != "podmon-keeper\n" {
		n.t.Fatalf("podmon's parent is %q", comm)
	}
	return ppid
}

// killAndWait kills a process that is not ours and waits for its end.
func killAndWait(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "its end", func() bool { return !alive(pid) })
}

// withoutPodmon freezes the keeper, kills podmon, and calls what happens while there is
// no podmon.
func (n *node) withoutPodmon(happens func()) {
	n.t.Helper()
	keeper, old := n.keeperPid(), n.podmonPid()
	if err := syscall.Kill(keeper, syscall.SIGSTOP); err != nil {
		n.t.Fatal(err)
	}
	if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
		n.t.Fatal(err)
	}
	// A stopped parent does not reap: it stays a zombie.
	eventually(n.t, "podmon's end", func() bool { return !alive(old) })
	happens()
	if err := syscall.Kill(keeper, syscall.SIGCONT); err != nil {
		n.t.Fatal(err)
	}
	eventually(n.t, "the next podmon", func() bool { return n.podmonPid() != old && alive(n.podmonPid()) })
}

// TestRootNothingIsLostWithoutPodmon: exit codes, output, a terminal and an
// input outlive podmon, also what ends or is written while there is none.
func TestRootNothingIsLostWithoutPodmon(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	prompt := n.spec("p", "prompt", "prompt", "half a ", "line\n")
	ends, killed, runs := n.spec("p", "ends", "lastword", "9"), n.spec("p", "killed", "sleep"), n.spec("p", "runs", "tick")
	tty := n.spec("p", "tty", "cat")
	tty.TTY, tty.Stdin = true, true
	input := n.spec("p", "input", "cat")
	input.Stdin = true
	pid := map[string]int{}
	for _, s := range []api.Container{ends, killed, runs, tty, input, prompt} {
		pid[s.ID] = n.start(s).Pid
	}
	for _, s := range []api.Container{ends, killed, runs} {
		eventually(t, "readiness of "+s.ID, func() bool { return strings.Contains(n.output(s), "ready") })
	}
	eventually(t, "half a line", func() bool { return exists(n.dir + "/podmon/live/containers/prompt/stdout.line") })
	leaves := func(id string, sig syscall.Signal) {
		t.Helper()
		if err := syscall.Kill(pid[id], sig); err != nil {
			t.Fatal(err)
		}
		eventually(t, "end of "+id, func() bool { return !alive(pid[id]) })
	}
	n.withoutPodmon(func() {
		leaves("ends", syscall.SIGTERM)
		leaves("killed", syscall.SIGKILL)
		if err := syscall.Kill(pid["runs"], syscall.SIGUSR1); err != nil {
			t.Fatal(err)
		}
	})
	if st := n.exited("ends"); st.ExitCode != 9 || st.Lost {
		t.Errorf("ended while there was no podmon: %+v", st)
	}
	if out := n.output(ends); !strings.Contains(out, "last word\n") {
		t.Errorf("its output: %q", out)
	}
	if st := n.exited("killed"); st.ExitCode != 137 || st.Signal != 9 || st.Lost {
		t.Errorf("killed while there was no podmon: %+v", st)
	}
	eventually(t, "output of the time in between", func() bool { return strings.Contains(n.output(runs), "tick 0") })
	if err := n.client.Signal(n.ctx, api.Signal{ID: "prompt", Signal: int(syscall.SIGTERM)}); err != nil {
		t.Fatal(err)
	}
	n.exited("prompt")
	if out := n.output(prompt); out != "half a line\n" {
		t.Errorf("a line begun before and ended after: %q", out)
	}
	for _, s := range []api.Container{tty, input} {
		if st := n.status(s.ID); st.State != api.StateRunning || st.Pid != pid[s.ID] {
			t.Errorf("%s: %+v", s.ID, st)
		}
		var out bytes.Buffer
		ctx, cancel := context.WithCancel(n.ctx)
		in, inW := io.Pipe()
		done := make(chan error, 1)
		go func() {
			done <- n.client.Attach(ctx, s.ID, runtime.ExecIO{Stdin: in, Stdout: &out}, s.TTY)
		}()
		if _, err := io.WriteString(inW, "still heard\n"); err != nil {
			t.Error(err)
		}
		eventually(t, "echo of "+s.ID, func() bool { return strings.Contains(n.output(s), "still heard") })
		cancel()
		<-done
		inW.Close()
	}
	// Zombies that were kept are reaped when their end is on record.
	for _, id := range []string{"ends", "killed"} {
		eventually(t, "reaping of "+id, func() bool { return !exists(fmt.Sprintf("/proc/%d", pid[id])) })
	}
}

// TestRootKeeperIsKilled: podmon becomes the keeper, and nothing is lost then,
// nor when podmon is killed afterwards.
func TestRootKeeperIsKilled(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	runs := n.spec("p", "runs", "tick")
	n.start(runs)
	tty := n.spec("p", "tty", "cat")
	tty.TTY, tty.Stdin = true, true
	ttyPid := n.start(tty).Pid
	eventually(t, "readiness", func() bool { return strings.Contains(n.output(runs), "ready") })
	pid := n.status("runs").Pid
	for range 3 {
		keeper, old := n.keeperPid(), n.podmonPid()
		killAndWait(t, keeper)
		eventually(t, "the next podmon", func() bool { return n.podmonPid() != old && alive(n.podmonPid()) })
		if now := n.keeperPid(); now != old {
			t.Errorf("the keeper is %d, not the former podmon %d", now, old)
		}
		if st := n.status("runs"); st.State != api.StateRunning || st.Pid != pid {
			t.Errorf("%+v", st)
		}
		now := n.podmonPid()
		killAndWait(t, now)
		eventually(t, "the podmon after that", func() bool { return n.podmonPid() != now && alive(n.podmonPid()) })
	}
	if st := n.status("tty"); st.State != api.StateRunning || st.Pid != ttyPid {
		t.Errorf("terminal: %+v", st)
	}
	n.withoutPodmon(func() {
		if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		eventually(t, "its end", func() bool { return !alive(pid) })
	})
	if st := n.exited("runs"); st.ExitCode != 7 || st.Lost {
		t.Errorf("end: %+v", st)
	}
}

// TestRootKeeperAndPodmonAreKilled, both at once: containers go on, and only
// what ends before the next podmon comes has lost its exit code.
func TestRootKeeperAndPodmonAreKilled(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	spec := n.spec("p", "c", "tick")
	n.start(spec)
	n.start(n.spec("p", "ended", "sleep"))
	eventually(t, "readiness", func() bool { return strings.Contains(n.output(spec), "ready") })
	pid, endedPid := n.status("c").Pid, n.status("ended").Pid
	keeper, podmon := n.keeperPid(), n.podmonPid()
	if err := syscall.Kill(keeper, syscall.SIGSTOP); err != nil { // else it starts another podmon
		t.Fatal(err)
	}
	killAndWait(t, podmon)
	killAndWait(t, keeper)
	killAndWait(t, endedPid)
	eventually(t, "its reaping by whoever inherits it", func() bool { return !exists(fmt.Sprintf("/proc/%d", endedPid)) })
	if err := syscall.Kill(pid, syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	if st := n.status("c"); st.State != api.StateRunning || st.Pid != pid {
		t.Fatalf("status after adoption: %+v", st)
	}
	if st := n.exited("ended"); !st.Lost || st.ExitCode != 255 {
		t.Errorf("ended unseen: %+v", st)
	}
	eventually(t, "output of the time in between", func() bool { return strings.Contains(n.output(spec), "tick 0") })
	if err := n.client.Signal(n.ctx, api.Signal{ID: "c", Signal: int(syscall.SIGTERM)}); err != nil {
		t.Fatal(err)
	}
	// Who is not its parent learns the exit code since Linux 6.15
	// (PIDFD_GET_INFO); before, the code is lost, and said to be.
	if st := n.exited("c"); (st.ExitCode != 7 || st.Lost) && (kernelSince(6, 15) || st.ExitCode != 255 || !st.Lost) {
		t.Errorf("end of an adopted container: %+v", st)
	}
}

// TestRootExecEndsWithPodmon: its client has lost it.
func TestRootExecEndsWithPodmon(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	n.start(n.spec("p", "c", "sleep"))
	done := make(chan error, 1)
	go func() {
		_, err := n.client.Exec(n.ctx, api.Exec{ContainerID: "c", Args: []string{"/bin/box", "sleep"}}, runtime.ExecIO{})
		done <- err
	}()
	count := func() int { return len(n.processes()) }
	eventually(t, "the exec", func() bool { return count() == 5 }) // keeper, podmon, pause, container, exec
	killAndWait(t, n.podmonPid())
	if err := <-done; err == nil {
		t.Error("the exec has ended well")
	}
	eventually(t, "its end", func() bool { return count() == 4 })
}
