package runtime_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/runtime"
)

// otherPodmon makes a program that does what podmon does and is another one, by
// its content.
func (n *node) otherPodmon() string {
	n.t.Helper()
	b, err := os.ReadFile(podmonPath)
	if err != nil {
		n.t.Fatal(err)
	}
	path := filepath.Join(n.dir, "other-podmon")
	if err := os.WriteFile(path, append(b, "another build"...), 0o755); err != nil {
		n.t.Fatal(err)
	}
	return path
}

// newerClusterd connects as a clusterd does that carries this podmon.
func (n *node) newerClusterd(program string, timeout time.Duration) runtime.Upgrade {
	n.t.Helper()
	cfg := n.config()
	cfg.PodmonPath, cfg.UpgradeTimeout = program, timeout
	c, err := runtime.Start(n.ctx, cfg)
	if err != nil {
		n.t.Fatal(err, n.ownLog())
	}
	defer c.Close()
	return c.Upgraded()
}

// runs fails unless podmon and its keeper are the program.
func (n *node) runs(program string) {
	n.t.Helper()
	want, err := os.ReadFile(program)
	if err != nil {
		n.t.Fatal(err)
	}
	for _, pid := range []int{n.keeperPid(), n.podmonPid()} {
		got, err := os.ReadFile(fmt.Sprintf("/proc/%d/exe", pid))
		if err != nil || !bytes.Equal(got, want) {
			n.t.Errorf("process %d is another program: %v", pid, err)
		}
	}
}

// echoes writes into a container and waits for its answer.
func (n *node) echoes(spec api.Container, text string) {
	n.t.Helper()
	ctx, cancel := context.WithCancel(n.ctx)
	defer cancel()
	in, inW := io.Pipe()
	defer inW.Close()
	done := make(chan error, 1)
	go func() {
		done <- n.client.Attach(ctx, spec.ID, runtime.ExecIO{Stdin: in, Stdout: io.Discard}, spec.TTY)
	}()
	if _, err := io.WriteString(inW, text+"\n"); err != nil {
		n.t.Error(err)
	}
	eventually(n.t, "echo of "+spec.ID, func() bool { return strings.Contains(n.output(spec), text) })
	cancel()
	<-done
}

// TestRootPodmonIsUpgraded: a clusterd with another podmon replaces the running
// one and its keeper. Containers keep their processes, output, exit codes,
// terminals and inputs; executions under way are waited for; and the same way
// back.
func TestRootPodmonIsUpgraded(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	early := n.spec("p", "early", "tick")
	n.start(early)
	killAndWait(t, n.podmonPid()) // from here on the container is the keeper's child
	eventually(t, "the next podmon", func() bool { return alive(n.podmonPid()) && n.status("early").State == api.StateRunning })
	ticks, tty, input := n.spec("p", "ticks", "tick"), n.spec("p", "tty", "cat"), n.spec("p", "input", "cat")
	tty.TTY, tty.Stdin = true, true
	input.Stdin, input.StdinOnce = true, true
	all := []api.Container{early, ticks, tty, input}
	for _, spec := range all[1:] {
		n.start(spec)
	}
	before := n.spec("p", "before", "exit", "5")
	n.run(before)
	pids := map[string]int{}
	for _, spec := range all {
		pids[spec.ID] = n.status(spec.ID).Pid
	}
	for _, spec := range []api.Container{early, ticks} {
		eventually(t, "readiness of "+spec.ID, func() bool { return strings.Contains(n.output(spec), "ready") })
	}
	pause := n.pausePid("p")

	// An execution that ends while it is waited for.
	execIn, execInW := io.Pipe()
	defer execInW.Close()
	var execOut bytes.Buffer
	type result struct {
		code int
		err  error
	}
	execDone := make(chan result, 1)
	go func() {
		code, err := n.client.Exec(n.ctx, api.Exec{ContainerID: "ticks", Args: []string{"/bin/box", "cat"}}, runtime.ExecIO{Stdin: execIn, Stdout: &execOut})
		execDone <- result{code, err}
	}()
	if _, err := io.WriteString(execInW, "waited for\n"); err != nil { // is read once the process runs
		t.Fatal(err)
	}
	old, keeper := n.podmonPid(), n.keeperPid()
	other := n.otherPodmon()
	upgraded := make(chan runtime.Upgrade, 1)
	go func() { upgraded <- n.newerClusterd(other, time.Minute) }()
	eventually(t, "podmon's word that it is being replaced", func() bool {
		_, err := n.client.StartContainer(n.ctx, ticks) // exists: nothing is started
		var refused *api.Error
		return errors.As(err, &refused) && refused.Code == api.CodeBusy
	})
	execInW.Close()
	if r := <-execDone; r.code != 0 || r.err != nil || execOut.String() != "waited for\n" {
		t.Errorf("execution that was waited for: %d %v %q", r.code, r.err, execOut.String())
	}
	if u := <-upgraded; u.Err != nil || !u.Needed() || u.From == u.To {
		t.Fatalf("upgrade: %+v%s", u, n.ownLog())
	}
	if n.podmonPid() == old || n.keeperPid() != keeper {
		t.Errorf("podmon %d → %d, keeper %d → %d", old, n.podmonPid(), keeper, n.keeperPid())
	}
	n.runs(other)

	unharmed := func() {
		t.Helper()
		for _, spec := range all {
			if st := n.status(spec.ID); st.State != api.StateRunning || st.Pid != pids[spec.ID] {
				t.Errorf("%s: %+v", spec.ID, st)
			}
		}
		if st := n.status("before"); st.ExitCode != 5 || st.Lost {
			t.Errorf("ended before: %+v", st)
		}
		if now := n.pausePid("p"); now != pause {
			t.Errorf("pause %d → %d", pause, now)
		}
		var out bytes.Buffer
		code, err := n.client.Exec(n.ctx, api.Exec{ContainerID: "early", Args: []string{"/bin/box", "echo", "here"}}, runtime.ExecIO{Stdout: &out})
		if code != 0 || err != nil || out.String() != "here\n" {
			t.Errorf("exec: %d %v %q", code, err, out.String())
		}
	}
	unharmed()
	n.echoes(tty, "the other program hears")
	if again := n.newerClusterd(other, 0); again.Needed() {
		t.Errorf("the same program once more: %+v", again)
	}

	// Back, with no timeout: who is cut off is told.
	execErr, attachErr := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := n.client.Exec(n.ctx, api.Exec{ContainerID: "ticks", Args: []string{"/bin/box", "sleep"}}, runtime.ExecIO{})
		execErr <- err
	}()
	eventually(t, "the exec", func() bool { return len(n.processes()) == 8 }) // keeper, podmon, pause, four containers, exec
	attached, attachedW := io.Pipe()
	go func() {
		attachErr <- n.client.Attach(n.ctx, "input", runtime.ExecIO{Stdin: attached, Stdout: io.Discard}, false)
	}()
	if _, err := io.WriteString(attachedW, "attached\n"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the attachment", func() bool { return strings.Contains(n.output(input), "attached") })
	if u := n.newerClusterd(podmonPath, time.Millisecond); u.Err != nil || !u.Needed() {
		t.Fatalf("downgrade: %+v%s", u, n.ownLog())
	}
	n.runs(podmonPath)
	for what, err := range map[string]error{"exec": <-execErr, "attach": <-attachErr} {
		var told *api.Error
		if !errors.As(err, &told) || told.Code != api.CodeReplaced {
			t.Errorf("%s that was cut off: %v", what, err)
		}
	}
	attachedW.Close()
	eventually(t, "end of the exec", func() bool { return len(n.processes()) == 7 })
	unharmed()
	n.echoes(tty, "and the first again")
	n.echoes(input, "so does the input, which no client has ended")

	for _, spec := range []api.Container{early, ticks} {
		if err := syscall.Kill(pids[spec.ID], syscall.SIGUSR1); err != nil {
			t.Fatal(err)
		}
		eventually(t, "output of "+spec.ID, func() bool { return strings.Contains(n.output(spec), "tick 0") })
		if err := n.client.Signal(n.ctx, api.Signal{ID: spec.ID, Signal: int(syscall.SIGTERM)}); err != nil {
			t.Fatal(err)
		}
		if st := n.exited(spec.ID); st.ExitCode != 7 || st.Lost {
			t.Errorf("end of %s: %+v", spec.ID, st)
		}
		eventually(t, "reaping of "+spec.ID, func() bool { return !exists(fmt.Sprintf("/proc/%d", pids[spec.ID])) })
	}
	if st := n.run(n.spec("p", "new", "exit", "3")); st.ExitCode != 3 {
		t.Errorf("a new container: %+v", st)
	}
}

// TestRootUpgradeRefused: what cannot go on from the running podmon is not let
// to, and the running one goes on.
func TestRootUpgradeRefused(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	n.start(n.spec("p", "c", "sleep"))
	n.run(n.spec("p", "ended", "true"))
	pid, podmon, keeper := n.status("c").Pid, n.podmonPid(), n.keeperPid()
	refused := func(program, why string) {
		t.Helper()
		u := n.newerClusterd(program, 0)
		var e *api.Error
		if !u.Needed() || !errors.As(u.Err, &e) || e.Code != api.CodeIncompatible || !strings.Contains(e.Message, why) {
			t.Errorf("upgrade: %+v, want an error that says %q", u, why)
		}
		if n.podmonPid() != podmon || n.keeperPid() != keeper || n.status("c").Pid != pid {
			t.Error("something was replaced")
		}
		n.runs(podmonPath)
	}
	other := n.otherPodmon()
	record := filepath.Join(n.dir, "podmon/live/containers/ended/container.json")
	was, err := os.ReadFile(record)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(record, bytes.Replace(was, []byte(`"Version":1`), []byte(`"Version":99`), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	refused(other, "has version 99, this podmon knows up to 1")
	if err := os.WriteFile(record, was, 0o600); err != nil {
		t.Fatal(err)
	}
	refused(filepath.Join(filepath.Dir(podmonPath), "box"), "cannot go on from this one")
	if st := n.run(n.spec("p", "next", "exit", "3")); st.ExitCode != 3 {
		t.Errorf("after the refusals: %+v", st)
	}
	if u := n.newerClusterd(other, 0); u.Err != nil {
		t.Errorf("with nothing in the way: %+v%s", u, n.ownLog())
	}
	n.runs(other)
	if st := n.status("c"); st.State != api.StateRunning || st.Pid != pid {
		t.Errorf("%+v", st)
	}
}

// pausePid is the pause of a sandbox.
func (n *node) pausePid(id string) int {
	n.t.Helper()
	sandboxes, _, err := n.client.List(n.ctx)
	if err != nil {
		n.t.Fatal(err)
	}
	for _, sb := range sandboxes {
		if sb.Sandbox.ID == id {
			return sb.Pid
		}
	}
	return 0
}
