package runtime_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/runtime"
	"github.com/clusterd/clusterd/features"
)

func TestRootHowContainersEnd(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	full := n.rootfs("full")
	for name, tc := range map[string]struct {
		change func(*api.Container)
		code   int
		signal int
		error  string // what StartError says
		output string // what the log says
	}{
		"true":      {change: func(c *api.Container) { c.Args = []string{"box", "true"} }},
		"exit-3":    {change: func(c *api.Container) { c.Args = []string{"/bin/box", "exit", "3"} }, code: 3},
		"not-found": {change: func(c *api.Container) { c.Args = []string{"foo"} }, code: 128, error: `exec: "foo": executable file not found in $PATH`},
		"no-such-path": {change: func(c *api.Container) { c.Args = []string{"/no/foo"} }, code: 128,
			error: `exec: "/no/foo": stat /no/foo: no such file or directory`},
		"not-executable": {change: func(c *api.Container) { c.Args = []string{"/bin/noexec"} }, code: 128,
			error: `exec: "/bin/noexec": permission denied`},
		// The kernel refuses it only when it is executed: the user finds it in the log.
		"no-program": {change: func(c *api.Container) { c.Args = []string{"/bin/noformat"} }, code: 255, output: "exec format error"},
		"cwd":        {change: func(c *api.Container) { c.Cwd = "/tmp"; c.Args = []string{"box", "pwd"} }, output: "/tmp <nil>"},
		"cwd-is-file": {change: func(c *api.Container) { c.Cwd = "/bin/box" }, code: 128,
			error: `mkdir /bin/box: not a directory`},
		"cwd-read-only": {change: func(c *api.Container) { c.Cwd = "/sys/none" }, code: 128, error: "mkdir /sys/none"},
		"no-rootfs":     {change: func(c *api.Container) { c.Rootfs = n.dir + "/none" }, code: 128, error: "no such file or directory"},
		"mount-source-missing": {change: func(c *api.Container) {
			c.Mounts = []api.Mount{{Source: n.dir + "/none", Destination: "/etc/x"}}
		}, code: 128, error: n.dir + "/none"},
		"user": {change: func(c *api.Container) {
			c.UID, c.GID, c.ExtraGIDs = 1000, 1000, []uint32{5, 7}
			c.Args = []string{"box", "id"}
		}, output: "1000 1000 [5 7]"},
		"env":            {change: func(c *api.Container) { c.Env = append(c.Env, "A=b c"); c.Args = []string{"box", "env"} }, output: "A=b c"},
		"writes-root":    {change: func(c *api.Container) { c.Rootfs = full; c.Args = []string{"box", "write", "/x", "y"} }},
		"read-only-root": {change: func(c *api.Container) { c.ReadonlyRootfs = true; c.Args = []string{"box", "write", "/y", "y"} }, code: 1, output: "read-only file system"},
		"masked":         {change: func(c *api.Container) { c.Args = []string{"box", "cat", "/proc/interrupts"} }, output: ""},
		"sys-read-only":  {change: func(c *api.Container) { c.Args = []string{"box", "write", "/proc/sys/kernel/pid_max", "1000"} }, code: 1, output: "read-only file system"},
		"no-mount":       {change: func(c *api.Container) { c.Args = []string{"box", "mount"} }, code: 1, output: "operation not permitted"},
		"no-unshare":     {change: func(c *api.Container) { c.Args = []string{"box", "unshare"} }, code: 1, output: "operation not permitted"},
		"privileged-mount": {change: func(c *api.Container) {
			c.Privileged, c.NoNewPrivileges = true, false
			c.Args = []string{"box", "mount"}
		}},
		"shm": {change: func(c *api.Container) { c.Args = []string{"box", "write", "/dev/shm/x", "y"} }},
	} {
		t.Run(name, func(t *testing.T) {
			n := *n
			n.t = t
			spec := n.spec("p", "c-"+name, "true")
			tc.change(&spec)
			st := n.run(spec)
			if st.ExitCode != tc.code || st.Signal != tc.signal || st.Lost {
				t.Errorf("ended with %d, signal %d, lost %v; want %d, signal %d", st.ExitCode, st.Signal, st.Lost, tc.code, tc.signal)
			}
			if (tc.error == "") != (st.StartError == "") || !strings.Contains(st.StartError, tc.error) {
				t.Errorf("start error: %q, want %q", st.StartError, tc.error)
			}
			if st.StartError == "" && !strings.Contains(n.output(spec), tc.output) {
				t.Errorf("output: %q, want %q", n.output(spec), tc.output)
			}
			if st.StartedAt == 0 || st.FinishedAt < st.StartedAt {
				t.Errorf("times: started %d, finished %d", st.StartedAt, st.FinishedAt)
			}
			if err := n.client.RemoveContainer(n.ctx, spec.ID); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestRootRefusedRequests(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	n.start(n.spec("p", "c", "sleep"))
	start := func(change func(*api.Container)) error {
		spec := n.spec("p", "new", "true")
		change(&spec)
		_, err := n.client.StartContainer(n.ctx, spec)
		return err
	}
	create := func(change func(*api.Sandbox)) error {
		sb := api.Sandbox{ID: "new", CgroupParent: n.cgroup + "/podnew"}
		change(&sb)
		_, err := n.client.CreateSandbox(n.ctx, sb)
		return err
	}
	for name, tc := range map[string]struct {
		err  error
		code string
	}{
		"container exists":     {start(func(c *api.Container) { c.ID = "c" }), api.CodeExists},
		"no such sandbox":      {start(func(c *api.Container) { c.SandboxID = "none" }), api.CodeNotFound},
		"id climbs":            {start(func(c *api.Container) { c.ID = "../x" }), api.CodeInvalid},
		"no command":           {start(func(c *api.Container) { c.Args = nil }), api.CodeInvalid},
		"relative root":        {start(func(c *api.Container) { c.Rootfs = "x" }), api.CodeInvalid},
		"relative mount":       {start(func(c *api.Container) { c.Mounts = []api.Mount{{Source: "/", Destination: "x"}} }), api.CodeInvalid},
		"unknown capability":   {start(func(c *api.Container) { c.Capabilities = []string{"CAP_NONE"} }), api.CodeInvalid},
		"no such profile":      {start(func(c *api.Container) { c.Seccomp = "/none.json" }), api.CodeInvalid},
		"sandbox exists":       {create(func(s *api.Sandbox) { s.ID = "p" }), api.CodeExists},
		"cgroup climbs":        {create(func(s *api.Sandbox) { s.CgroupParent = "/a/../../b" }), api.CodeInvalid},
		"root cgroup":          {create(func(s *api.Sandbox) { s.CgroupParent = "/" }), api.CodeInvalid},
		"node's sysctl":        {create(func(s *api.Sandbox) { s.Sysctls = map[string]string{"kernel.pid_max": "9"} }), api.CodeInvalid},
		"host network sysctl":  {create(func(s *api.Sandbox) { s.Sysctls = map[string]string{"net.ipv4.ip_forward": "0"} }), api.CodeInvalid},
		"sysctl climbs":        {create(func(s *api.Sandbox) { s.Sysctls = map[string]string{"net/../kernel/pid_max": "9"} }), api.CodeInvalid},
		"no such netns":        {create(func(s *api.Sandbox) { s.NetNS = "/none" }), api.CodeInternal},
		"netns is a file":      {create(func(s *api.Sandbox) { s.NetNS = "/etc/passwd" }), api.CodeInternal},
		"remove running":       {n.client.RemoveContainer(n.ctx, "c"), api.CodeBusy},
		"shutdown busy":        {n.client.Shutdown(n.ctx, false), api.CodeBusy},
		"signal nobody":        {n.client.Signal(n.ctx, api.Signal{ID: "none", Signal: 15}), api.CodeNotFound},
		"signal none":          {n.client.Signal(n.ctx, api.Signal{ID: "c", Signal: 0}), api.CodeInvalid},
		"resize no terminal":   {n.client.Resize(n.ctx, api.Resize{ID: "c", Width: 1, Height: 1}), api.CodeInvalid},
		"remove none is fine":  {n.client.RemoveContainer(n.ctx, "none"), ""},
		"remove none is fine2": {n.client.RemoveSandbox(n.ctx, "none"), ""},
	} {
		var e *api.Error
		if tc.code == "" && tc.err == nil {
			continue
		}
		if !errors.As(tc.err, &e) || e.Code != tc.code {
			t.Errorf("%s: got %v, want code %q", name, tc.err, tc.code)
		}
	}
}

func TestRootLogsAreComplete(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	const lines = 20000
	spec := n.spec("p", "many", "count", strconv.Itoa(lines))
	n.run(spec)
	got := n.log(spec)
	if len(got) != lines {
		t.Fatalf("%d lines, want %d", len(got), lines)
	}
	for i, l := range got {
		if want := (logLine{"stdout", "F", "line " + strconv.Itoa(i)}); l != want {
			t.Fatalf("line %d: %v", i, l)
		}
	}
	long := n.spec("p", "long", "repeat", "40000")
	n.run(long)
	var tags, text string
	for _, l := range n.log(long) {
		tags += l.tag
		text += l.text
	}
	if tags != "PPF" || text != strings.Repeat("x", 40000) {
		t.Errorf("a long line came as %s with %d letters", tags, len(text))
	}
	unfinished := n.spec("p", "unfinished", "print", "no newline")
	n.run(unfinished)
	if got := n.log(unfinished); len(got) != 1 || got[0] != (logLine{"stdout", "P", "no newline"}) {
		t.Errorf("unfinished line: %v", got)
	}
	stderr := n.spec("p", "stderr", "echoerr", "wrong")
	n.run(stderr)
	if got := n.log(stderr); len(got) != 1 || got[0] != (logLine{"stderr", "F", "wrong"}) {
		t.Errorf("stderr: %v", got)
	}
	rotated := n.spec("p", "rotated", "count", "100000") // about 6 MiB of log
	rotated.LogMaxBytes, rotated.LogMaxFiles = 1<<20, 3
	n.run(rotated)
	files, _ := filepath.Glob(rotated.LogPath + "*")
	if len(files) != 3 {
		t.Errorf("files of a rotated log: %v", files)
	}
	for _, f := range files {
		if st, err := os.Stat(f); err != nil || st.Size() > 1<<20 {
			t.Errorf("rotated log %s: %v %v", f, st.Size(), err)
		}
	}
}

func TestRootNamespaces(t *testing.T) {
	n := newNode(t)
	// A process in a network namespace of its own stands in for a pinned one.
	holder := exec.Command(filepath.Join(n.box, "bin/box"), "sleep")
	holder.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	defer holder.Wait()
	defer holder.Process.Kill()
	netns := fmt.Sprintf("/proc/%d/ns/net", holder.Process.Pid)
	sb := n.sandbox("p", func(s *api.Sandbox) {
		s.NetNS, s.Hostname, s.SharePID = netns, "web-0", true
		s.Sysctls = map[string]string{"net.ipv4.ip_unprivileged_port_start": "80", "kernel.shm_rmid_forced": "1"}
	})
	link := func(pid int, ns string) string {
		l, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, ns))
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	st := n.start(n.spec("p", "c", "sleep"))
	if link(st.Pid, "net") != link(holder.Process.Pid, "net") {
		t.Error("container is not in the pod's network namespace")
	}
	for _, ns := range []string{"net", "ipc", "uts", "pid"} {
		if link(st.Pid, ns) != link(sb.Pid, ns) {
			t.Errorf("container does not share %s with the pause", ns)
		}
		if ns != "net" && link(st.Pid, ns) == link(os.Getpid(), ns) {
			t.Errorf("container shares %s with the host", ns)
		}
	}
	for file, want := range map[string]string{
		"/proc/sys/net/ipv4/ip_unprivileged_port_start": "80\n",
		"/proc/sys/kernel/shm_rmid_forced":              "1\n",
		"/proc/sys/kernel/hostname":                     "web-0\n",
	} {
		spec := n.spec("p", "cat-"+filepath.Base(file), "cat", file)
		n.run(spec)
		if got := n.output(spec); got != want {
			t.Errorf("%s: %q, want %q", file, got, want)
		}
	}
	// What the pause shows to a container that shares its pid namespace: nothing.
	spec := n.spec("p", "peek", "ls", "/proc/1/root")
	spec.Privileged = true
	n.run(spec)
	if got := n.output(spec); got != "\n" {
		t.Errorf("behind the pause's root: %q", got)
	}
	// An orphan of a container in a shared pid namespace ends with it, and the
	// pause reaps it: a zombie would still have a status to read.
	features.Shows(t, 267)
	orphan := n.spec("p", "orphan", "orphan")
	n.run(orphan)
	out := strings.Fields(n.output(orphan))
	if len(out) < 2 {
		t.Fatalf("orphan's output: %q", n.output(orphan))
	}
	tries := 0
	eventually(t, "the orphan's end, and its reaping", func() bool { // a moment after its container's end
		tries++
		return n.run(n.spec("p", fmt.Sprint("gone-", tries), "cat", "/proc/"+out[1]+"/status")).ExitCode != 0
	})
	// Shared memory is the pod's: one writes, another reads.
	n.run(n.spec("p", "shm-w", "write", "/dev/shm/x", "shared"))
	r := n.spec("p", "shm-r", "cat", "/dev/shm/x")
	n.run(r)
	if got := n.output(r); got != "shared" {
		t.Errorf("shared memory: %q", got)
	}
}

// TestRootPauseReaps: in a shared pid namespace the pause becomes the parent of
// processes that lost theirs, and leaves no zombies.
func TestRootPauseReaps(t *testing.T) {
	features.Shows(t, 267)
	n := newNode(t)
	pause := n.sandbox("p", func(s *api.Sandbox) { s.SharePID = true }).Pid
	n.start(n.spec("p", "c", "sleep"))
	children := func() []int {
		var out []int
		stats, err := filepath.Glob("/proc/[0-9]*/stat")
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range stats {
			b, _ := os.ReadFile(name) // it may be gone
			var pid, parent int
			var state rune
			_, rest, _ := strings.Cut(string(b), ") ") // behind the program's name
			if k, _ := fmt.Sscanf(string(b), "%d", &pid); k == 0 {
				continue
			}
			if k, _ := fmt.Sscanf(rest, "%c %d", &state, &parent); k == 2 && parent == pause {
				out = append(out, pid) // zombies too
			}
		}
		return out
	}
	eventually(t, "a pause without children at the start", func() bool { return len(children()) == 0 })
	if code, err := n.client.Exec(n.ctx, api.Exec{ContainerID: "c", Args: []string{"/bin/box", "orphan"}}, runtime.ExecIO{}); code != 0 || err != nil {
		t.Fatalf("exec: %d, %v", code, err)
	}
	eventually(t, "an orphan's change of parent", func() bool { return len(children()) == 1 })
	if err := syscall.Kill(children()[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the orphan's end", func() bool { return len(children()) == 0 })
}

func TestRootHostNamespaces(t *testing.T) {
	n := newNode(t)
	n.sandbox("p", func(s *api.Sandbox) { s.HostIPC, s.HostPID = true, true })
	st := n.start(n.spec("p", "c", "sleep"))
	for _, ns := range []string{"net", "ipc", "uts", "pid"} {
		got, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", st.Pid, ns))
		want, _ := os.Readlink("/proc/self/ns/" + ns)
		if err != nil || got != want {
			t.Errorf("%s: %s, want the host's %s (%v)", ns, got, want, err)
		}
	}
	orphan := n.spec("p", "orphan", "orphan")
	n.run(orphan)
	var pid int
	fmt.Sscanf(n.output(orphan), "left %d", &pid)
	if pid == 0 {
		t.Fatalf("the orphan does not tell its process: %q", n.output(orphan))
	}
	eventually(t, "the orphan's end", func() bool { return !alive(pid) })
}

func TestRootSignals(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	spec := n.spec("p", "term", "sleep")
	n.start(spec)
	eventually(t, "readiness", func() bool { return strings.Contains(n.output(spec), "ready") })
	if err := n.client.Signal(n.ctx, api.Signal{ID: "term", Signal: int(syscall.SIGTERM)}); err != nil {
		t.Fatal(err)
	}
	if st := n.exited("term"); st.ExitCode != 0 || n.output(spec) != "ready\nbye\n" {
		t.Errorf("after TERM: %+v, %q", st, n.output(spec))
	}
	n.start(n.spec("p", "kill", "sleep"))
	if err := n.client.Signal(n.ctx, api.Signal{ID: "kill", Signal: int(syscall.SIGKILL)}); err != nil {
		t.Fatal(err)
	}
	if st := n.exited("kill"); st.ExitCode != 137 || st.Signal != 9 || st.OOMKilled {
		t.Errorf("after KILL: %+v", st)
	}
	n.start(n.spec("p", "all", "sleep"))
	if err := n.client.Signal(n.ctx, api.Signal{ID: "all", Signal: int(syscall.SIGKILL), All: true}); err != nil {
		t.Fatal(err)
	}
	if st := n.exited("all"); st.ExitCode != 137 {
		t.Errorf("after KILL to all: %+v", st)
	}
	var e *api.Error
	if err := n.client.Signal(n.ctx, api.Signal{ID: "all", Signal: 15}); !errors.As(err, &e) || e.Code != api.CodeNotRunning {
		t.Errorf("signal after the end: %v", err)
	}
	// A pause that is killed is an event, and no further container starts.
	events, err := n.client.Events(n.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.client.Signal(n.ctx, api.Signal{ID: "p", Signal: int(syscall.SIGKILL)}); err != nil {
		t.Fatal(err)
	}
	for ev := range events {
		if ev.Kind != "sandboxExited" {
			continue // of the last container, whose end was seen in the list already
		}
		if ev.ID != "p" || ev.Sandbox == nil || ev.Sandbox.State != api.StateExited {
			t.Errorf("event: %+v", ev)
		}
		break
	}
	if _, err := n.client.StartContainer(n.ctx, n.spec("p", "late", "true")); !errors.As(err, &e) || e.Code != api.CodeNotRunning {
		t.Errorf("start in a dead sandbox: %v", err)
	}
}

func TestRootManyAtOnce(t *testing.T) {
	n := newNode(t)
	descriptors := func() int {
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", n.podmonPid()))
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	n.sandbox("warm")
	n.run(n.spec("warm", "warmc", "true"))
	if err := n.client.RemoveSandbox(n.ctx, "warm"); err != nil {
		t.Fatal(err)
	}
	before := descriptors()
	const pods = 50
	var wg sync.WaitGroup
	errs := make(chan error, 3*pods)
	for i := range pods {
		wg.Go(func() {
			id := "p" + strconv.Itoa(i)
			_, err := n.client.CreateSandbox(n.ctx, api.Sandbox{ID: id, Name: id, CgroupParent: n.cgroup + "/pod" + id})
			if err != nil {
				errs <- err
				return
			}
			spec := n.spec(id, "c"+strconv.Itoa(i), "sleep")
			st, err := n.client.StartContainer(n.ctx, spec)
			if err == nil && st.StartError != "" {
				err = errors.New(st.StartError)
			}
			if err != nil {
				errs <- fmt.Errorf("pod %d: %w", i, err)
			}
		})
	}
	wg.Wait()
	for range len(errs) {
		t.Error(<-errs)
	}
	sandboxes, containers, err := n.client.List(n.ctx)
	if err != nil || len(sandboxes) != pods || len(containers) != pods {
		t.Fatalf("%d sandboxes, %d containers, %v", len(sandboxes), len(containers), err)
	}
	for i := range pods {
		wg.Go(func() {
			if err := n.client.RemoveSandbox(n.ctx, "p"+strconv.Itoa(i)); err != nil {
				errs <- err
			}
		})
	}
	wg.Wait()
	for range len(errs) {
		t.Error(<-errs)
	}
	if sandboxes, containers, _ := n.client.List(n.ctx); len(sandboxes)+len(containers) > 0 {
		t.Errorf("left: %d sandboxes, %d containers", len(sandboxes), len(containers))
	}
	// A few may be in flight (this call's), or wait for the garbage collector.
	eventually(t, "podmon to close its descriptors", func() bool { return descriptors() <= before+5 })
}
