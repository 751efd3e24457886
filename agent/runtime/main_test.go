package runtime_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/runtime"
	"go.uber.org/goleak"
)

// podmonPath is podmon as TestMain built it.
var podmonPath string

func TestMain(m *testing.M) {
	if os.Getenv("CLUSTERD_ROOT") == "" {
		goleak.VerifyTestMain(m)
		return
	}
	if dir := os.Getenv("CLUSTERD_TEST_PROGRAMS"); dir != "" { // built before, for a machine without Go
		podmonPath = filepath.Join(dir, "podmon")
		goleak.VerifyTestMain(m)
		return
	}
	dir, err := os.MkdirTemp("", "podmon-test")
	if err != nil {
		panic(err)
	}
	podmonPath = filepath.Join(dir, "podmon")
	if err := buildPrograms(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.RemoveAll(dir)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		os.RemoveAll(dir)
		os.Exit(code)
	}))
}

func buildPrograms(dir string) error {
	build := func(cgo string, args ...string) error {
		cmd := exec.Command("go", append([]string{"build"}, args...)...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED="+cgo)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("go build %s: %w\n%s", strings.Join(args, " "), err, out)
		}
		return nil
	}
	// With the tag faultpoints podmon can be told where to be killed.
	podmon := []string{"-tags", "seccomp netgo osusergo runc_nocriu faultpoints",
		"-ldflags", "-s -w -linkmode external -extldflags -static",
		"-o", podmonPath, "../../cmd/podmon"}
	if os.Getenv("CLUSTERD_DEBUG_RACE") != "" { // looks for races in podmon too, slowly
		podmon = []string{"-race", "-tags", "seccomp runc_nocriu faultpoints", "-o", podmonPath, "../../cmd/podmon"}
	}
	if err := build("1", podmon...); err != nil {
		return err
	}
	return build("0", "-ldflags", "-s -w", "-o", filepath.Join(dir, "box"), "./testdata/box")
}

func needRoot(t testing.TB) {
	t.Helper()
	if os.Getenv("CLUSTERD_ROOT") == "" {
		t.Skip("needs root and containers: CLUSTERD_ROOT=1 go test ./agent/runtime -run Root")
	}
	if os.Geteuid() != 0 {
		t.Fatal("CLUSTERD_ROOT is set, but this is not root")
	}
}

// node is one podmon with a directory and a cgroup of its own.
type node struct {
	t      testing.TB
	dir    string
	podmon string // the program

	startLimit time.Duration
	cgroup     string
	box        string // root file system with one program under many names
	client     *runtime.Client
	ctx        context.Context
}

func newNode(t testing.TB, change ...func(*node)) *node {
	t.Helper()
	needRoot(t)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute) // all of a test, on a busy machine
	t.Cleanup(cancel)
	n := &node{
		t: t, dir: t.TempDir(), podmon: podmonPath, ctx: ctx,
		cgroup: fmt.Sprintf("/podmontest-%d-%d", os.Getpid(), time.Now().UnixNano()),
	}
	n.box = n.rootfs("box")
	for _, c := range change {
		c(n)
	}
	n.client = n.connect()
	t.Cleanup(n.end)
	return n
}

func (n *node) config() runtime.Config {
	return runtime.Config{
		Dir: n.dir + "/podmon", PodmonPath: n.podmon, CgroupRoot: n.cgroup, StartLimit: n.startLimit, Logger: slog.New(slog.DiscardHandler),
	}
}

func (n *node) connect() *runtime.Client {
	n.t.Helper()
	c, err := runtime.Start(n.ctx, n.config())
	if err != nil {
		n.t.Fatal(err, n.ownLog())
	}
	return c
}

func (n *node) ownLog() string {
	b, _ := os.ReadFile(n.dir + "/podmon/podmon.log")
	return "\npodmon.log:\n" + string(b)
}

// rootfs makes a directory that holds the test program.
func (n *node) rootfs(name string) string {
	n.t.Helper()
	root := filepath.Join(n.dir, name)
	for _, d := range []string{"bin", "proc", "sys", "dev", "etc", "tmp"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			n.t.Fatal(err)
		}
	}
	b, err := os.ReadFile(filepath.Join(filepath.Dir(podmonPath), "box"))
	if err == nil {
		err = os.WriteFile(filepath.Join(root, "bin/box"), b, 0o755)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(root, "bin/noformat"), []byte("no program"), 0o755)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(root, "bin/noexec"), []byte("no program"), 0o644)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return root
}

// end shuts podmon down and checks that nothing stays.
func (n *node) end() {
	n.t.Helper()
	if n.t.Failed() {
		n.t.Log(n.ownLog())
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := n.client.Shutdown(ctx, true); err != nil {
		n.t.Errorf("shutdown: %v%s", err, n.ownLog())
	}
	n.client.Close()
	pid := n.podmonPid()
	if strings.Contains(n.ownLog(), "DATA RACE") || strings.Contains(n.ownLog(), "panic:") {
		n.t.Error(n.ownLog())
	}
	eventually(n.t, "podmon's end", func() bool { return pid == 0 || !alive(pid) })
	n.checkNothingLeft()
}

func (n *node) podmonPid() int {
	b, err := os.ReadFile(n.dir + "/podmon/podmon.pid")
	if err != nil {
		return 0
	}
	var pid int
	fmt.Sscan(string(b), &pid)
	return pid
}

func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	i := strings.LastIndexByte(string(b), ')')
	return i >= 0 && len(b) > i+2 && b[i+2] != 'Z' && b[i+2] != 'X'
}

// checkNothingLeft looks for mounts, cgroups and processes of this node.
func (n *node) checkNothingLeft() {
	n.t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		n.t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, n.dir+"/") {
			n.t.Errorf("left mounted: %s", line)
		}
	}
	for _, c := range []string{"", "memory", "pids", "cpu", "cpuset", "devices", "freezer", "blkio", "cpuacct", "systemd", "unified"} {
		if base := filepath.Join("/sys/fs/cgroup", c, n.cgroup); exists(base) {
			below, _ := filepath.Glob(base + "/*/cgroup.procs")
			n.t.Errorf("left cgroup: %s %v", base, below)
		}
	}
	for _, sub := range []string{"live", "empty"} {
		if left, _ := os.ReadDir(n.dir + "/podmon/" + sub); len(left) > 0 {
			n.t.Errorf("left in %s: %v", sub, left)
		}
	}
	procs, _ := filepath.Glob("/proc/[0-9]*/cgroup")
	for _, p := range procs {
		if b, err := os.ReadFile(p); err == nil && strings.Contains(string(b), n.cgroup) {
			if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(p))); err == nil && alive(pid) {
				stat, _ := os.ReadFile(filepath.Join(filepath.Dir(p), "stat"))
				n.t.Errorf("left process: %s", stat)
			}
		}
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// eventually waits for a condition to hold.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !holds(); {
		if time.Now().After(deadline) {
			t.Fatalf("%s did not come in two minutes", what)
		}
		<-time.After(5 * time.Millisecond)
	}
}

// sandbox makes a pod on the host's network.
func (n *node) sandbox(id string, change ...func(*api.Sandbox)) api.SandboxStatus {
	n.t.Helper()
	sb := api.Sandbox{ID: id, PodUID: "uid-" + id, Namespace: "default", Name: id, CgroupParent: n.cgroup + "/pod" + id}
	for _, c := range change {
		c(&sb)
	}
	st, err := n.client.CreateSandbox(n.ctx, sb)
	if err != nil {
		n.t.Fatal(err, n.ownLog())
	}
	return st
}

// spec is a container that runs the test program.
func (n *node) spec(sandbox, id string, args ...string) api.Container {
	return api.Container{
		ID: id, SandboxID: sandbox, Name: id, Rootfs: n.box,
		Args: append([]string{"/bin/box"}, args...), Env: []string{"PATH=/bin"},
		NoNewPrivileges: true, Capabilities: api.DefaultCapabilities(),
		MaskedPaths: api.DefaultMaskedPaths(), ReadonlyPaths: api.DefaultReadonlyPaths(),
		LogPath: filepath.Join(n.dir, "logs", id+".log"),
	}
}

func (n *node) start(spec api.Container) api.ContainerStatus {
	n.t.Helper()
	st, err := n.client.StartContainer(n.ctx, spec)
	if err != nil {
		n.t.Fatal(err, n.ownLog())
	}
	return st
}

// hears waits until the program is ready for its stop signal: the kernel drops a
// signal to the first process of a pid namespace that has no handler yet.
func (n *node) hears(spec api.Container) {
	n.t.Helper()
	eventually(n.t, "readiness of "+spec.ID, func() bool { return exists(spec.LogPath) && strings.Contains(n.output(spec), "ready") })
}

// run starts a container and waits for its end.
func (n *node) run(spec api.Container) api.ContainerStatus {
	n.t.Helper()
	if st := n.start(spec); st.State == api.StateExited {
		return st
	}
	return n.exited(spec.ID)
}

func (n *node) exited(id string) api.ContainerStatus {
	n.t.Helper()
	var st api.ContainerStatus
	eventually(n.t, "end of "+id, func() bool {
		st = n.status(id)
		return st.State == api.StateExited
	})
	return st
}

func (n *node) status(id string) api.ContainerStatus {
	n.t.Helper()
	_, cs, err := n.client.List(n.ctx)
	if err != nil {
		n.t.Fatal(err)
	}
	for _, c := range cs {
		if c.Container.ID == id {
			return c
		}
	}
	return api.ContainerStatus{}
}

// logLine is one line of a container's log.
type logLine struct{ stream, tag, text string }

func (n *node) log(spec api.Container) []logLine {
	n.t.Helper()
	b, err := os.ReadFile(spec.LogPath)
	if err != nil {
		n.t.Fatal(err)
	}
	var out []logLine
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), " ", 4)
		if len(f) != 4 {
			n.t.Fatalf("log line %q", line)
		}
		if _, err := time.Parse(time.RFC3339Nano, f[0]); err != nil {
			n.t.Fatalf("log line %q: %v", line, err)
		}
		out = append(out, logLine{f[1], f[2], f[3]})
	}
	return out
}

// output is what a container wrote to both streams.
func (n *node) output(spec api.Container) string {
	n.t.Helper()
	var b strings.Builder
	for _, l := range n.log(spec) {
		b.WriteString(l.text)
		if l.tag == "F" {
			b.WriteByte('\n')
		}
	}
	return b.String()
}
