package isolate

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netnstest"
)

const name = "isolatetest"

func TestMain(m *testing.M) {
	if os.Args[0] == name {
		os.Exit(hostile(os.Args[1]))
	}
	goleak.VerifyTestMain(m)
}

// attempt is what the program is to try, and what came of it.
type attempt struct {
	Spec  Spec
	What  string
	Paths []string
}

type outcome struct {
	Results map[string]string // by path or by what was tried: the error, "" for none
}

// hostile is the program: it enters, and tries.
func hostile(job string) int {
	conn, err := Parent()
	if err != nil {
		return 3
	}
	var a attempt
	if _, err := conn.Read(&a); err != nil {
		return 4
	}
	if err := Enter(a.Spec); err != nil {
		fmt.Fprintln(os.Stderr, "enter:", err)
		return 5
	}
	out := outcome{map[string]string{}}
	try := func(what string, err error) {
		out.Results[what] = ""
		if err != nil && err != unix.Errno(0) {
			out.Results[what] = err.Error()
		}
	}
	switch job {
	case "eat":
		var all [][]byte
		for {
			b := make([]byte, 1<<20)
			for i := range b {
				b[i] = byte(i)
			}
			all = append(all, b)
			_ = all
		}
	case "grow":
		signal.Ignore(unix.SIGXFSZ)
		try("small", os.WriteFile("/out/small", make([]byte, 1<<20), 0o600))
		try("large", os.WriteFile("/out/large", make([]byte, 1<<20+1), 0o600))
	case "sleep":
		_, _ = conn.Read(&a) // until the other side ends
		time.Sleep(time.Hour)
	case "files":
		for _, p := range a.Paths {
			b, err := os.ReadFile(p)
			if err == nil && strings.Contains(p, "/fd/") && string(b) != "secret" {
				err = errors.New("something else")
			}
			try(p, err)
		}
		try("write /out", os.WriteFile("/out/f", []byte("x"), 0o600))
		try("write /in", os.WriteFile("/in/f", []byte("x"), 0o600))
		try("write /", os.WriteFile("/f", []byte("x"), 0o600))
		try("mknod", unix.Mknod("/out/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
		_, err = os.Open("/out/null")
		try("device", err)
		list, _ := filepath.Glob("/*")
		out.Results["root"] = strings.Join(list, " ")
		list, _ = filepath.Glob("/proc/[0-9]*")
		out.Results["processes"] = strings.Join(list, " ")
		fds, _ := os.ReadDir("/proc/self/fd")
		for _, fd := range fds {
			to, _ := os.Readlink("/proc/self/fd/" + fd.Name())
			if to != "" && !strings.HasPrefix(to, "/cpu.") /* Go's runtime */ && !strings.HasPrefix(to, "anon_inode:") && !strings.HasPrefix(to, "socket:") && !strings.HasPrefix(to, "pipe:") && !strings.HasPrefix(to, "/proc/") {
				out.Results["descriptors"] += fd.Name() + "=" + to + " "
			}
		}
		status, _ := os.ReadFile("/proc/self/status")
		for line := range strings.Lines(string(status)) {
			if k, v, _ := strings.Cut(strings.TrimSpace(line), ":\t"); k == "CapEff" || k == "NoNewPrivs" || k == "Seccomp" {
				out.Results[k] = v
			}
		}
	case "calls":
		try("mount", unix.Mount("none", "/out", "tmpfs", 0, ""))
		try("remount", unix.Mount("", "/in", "", unix.MS_BIND|unix.MS_REMOUNT, ""))
		try("umount", unix.Unmount("/in", unix.MNT_DETACH))
		try("unshare", unix.Unshare(unix.CLONE_NEWUSER))
		try("exec", unix.Exec("/proc/self/exe", []string{"x"}, nil))
		_, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		try("unix socket", err)
		_, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		try("tcp socket", err)
		_, err = unix.IoctlGetInt(0, 0xC0045877) // FIFREEZE
		try("ioctl", err)
		_, err = unix.MemfdCreate("x", 0)
		try("memfd", err)
		_, _, errno := unix.Syscall(unix.SYS_OPEN_BY_HANDLE_AT, 0, 0, 0)
		try("open_by_handle_at", errno)
		_, _, errno = unix.RawSyscall(lastKnown+10, 0, 0, 0)
		try("unknown", errno)
		page := make([]byte, 2*os.Getpagesize())
		at := uintptr(unsafe.Pointer(&page[0])) &^ (uintptr(os.Getpagesize()) - 1)
		_, _, errno = unix.Syscall(unix.SYS_MADVISE, at+uintptr(os.Getpagesize()), 0, unix.MADV_HWPOISON) // of no bytes
		try("hwpoison", errno)
		_, _, errno = unix.Syscall(unix.SYS_MADVISE, at+uintptr(os.Getpagesize()), 0, softOffline)
		try("soft offline", errno)
		if _, _, errno = unix.Syscall(unix.SYS_MADVISE, at+uintptr(os.Getpagesize()), 0, unix.MADV_NORMAL); errno != 0 {
			return 7 // Go's runtime needs it
		}
		try("live on", unix.Prctl(unix.PR_SET_PDEATHSIG, 0, 0, 0, 0))
		_, _, errno = unix.Syscall(unix.SYS_IOPRIO_SET, 1, 0, 1<<13)
		try("ioprio_set", errno)
		_, err = (&exec.Cmd{Path: "/out/f"}).Output()
		try("start", err)
	}
	if err := conn.Write(out); err != nil {
		return 6
	}
	return 0
}

// newRunner runs this test's program.
func newRunner(t *testing.T, change func(*Config)) *Runner {
	t.Helper()
	netnstest.NeedRoot(t)
	cfg := Config{
		Program: func() (*os.File, error) { return os.Open("/proc/self/exe") },
		Name:    name, Cgroup: fmt.Sprintf("/clusterd-test-isolate-%d/images", os.Getpid()), Memory: 128 << 20, Logger: slog.New(slog.DiscardHandler),
	}
	if change != nil {
		change(&cfg)
	}
	r := New(cfg)
	t.Cleanup(func() {
		r.Close()
		mem, pids := groupDirs(cfg.Cgroup)
		for _, d := range []string{mem, pids} {
			if left, err := os.ReadDir(d); err == nil {
				for _, e := range left {
					if e.IsDir() {
						t.Errorf("a cgroup is left: %s", filepath.Join(d, e.Name()))
					}
				}
				_ = unix.Rmdir(d)
				_ = unix.Rmdir(filepath.Dir(d))
			}
		}
	})
	return r
}

// tried has the program try something.
func tried(t *testing.T, r *Runner, job string, a attempt) (map[string]string, error) {
	t.Helper()
	c, err := r.Start(job, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	a.Spec.Root, a.Spec.Memory = t.TempDir(), c.MemoryLimit()
	defer c.Conn.Close()
	if err := c.Conn.Write(a); err != nil {
		t.Fatal(err)
	}
	var out outcome
	_, rerr := c.Conn.Read(&out)
	if err := c.Wait(); err != nil {
		return nil, err
	}
	return out.Results, rerr
}

// TestRootFiles: the program sees what it is given, keys of the data directory and
// processes of the machine it does not, as root neither.
func TestRootFiles(t *testing.T) {
	r := newRunner(t, nil)
	data := t.TempDir()
	key := filepath.Join(data, "ca.key")
	for _, d := range []string{"in", "out"} {
		if err := os.Mkdir(filepath.Join(data, d), 0o777); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.WriteFile(key, []byte("secret"), 0o600), os.WriteFile(data+"/in/given", []byte("x"), 0o644)); err != nil {
		t.Fatal(err)
	}
	held, err := os.Open(key) // a descriptor of this process that must not come with it
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	open, err := unix.Dup(int(held.Fd())) // as what a shell leaves to clusterd
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(open)
	paths := []string{
		key, "/in/../../" + key, "/out/../" + key, fmt.Sprintf("/proc/%d/root%s", os.Getpid(), key), "/proc/1/root" + key, "/proc/self/root" + key,
		fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), held.Fd()), fmt.Sprintf("/proc/self/fd/%d", held.Fd()), fmt.Sprintf("/proc/self/fd/%d", open), "/etc/shadow", "/proc/sys/kernel/core_pattern", "/proc/kcore",
	}
	binds := []Bind{{From: data + "/in", To: "/in"}, {From: data + "/out", To: "/out", Write: true}}
	for what, s := range map[string]Spec{
		"as root": {Binds: binds, Proc: true, Capabilities: []int{unix.CAP_DAC_OVERRIDE, unix.CAP_MKNOD, unix.CAP_SYS_ADMIN}},
		"as user": {Binds: binds, User: 65534},
	} {
		t.Run(what, func(t *testing.T) {
			got, err := tried(t, r, "files", attempt{Spec: s, Paths: append([]string{"/in/given"}, paths...)})
			if err != nil {
				t.Fatal(err)
			}
			if got["/in/given"] != "" {
				t.Errorf("what it was given: %s", got["/in/given"])
			}
			for _, p := range append(paths, "write /in", "write /", "device") {
				if got[p] == "" {
					t.Errorf("%s succeeded", p)
				}
			}
			if s.User == 0 {
				caps := fmt.Sprintf("%016x", 1<<unix.CAP_DAC_OVERRIDE|1<<unix.CAP_MKNOD|1<<unix.CAP_SYS_ADMIN)
				want := map[string]string{"root": "/in /out /proc", "processes": "/proc/1", "CapEff": caps, "NoNewPrivs": "1", "Seccomp": "2", "write /out": "", "descriptors": "0=/dev/null 1=/dev/null "}
				for k, v := range want {
					if got[k] != v {
						t.Errorf("%s: %q, want %q", k, got[k], v)
					}
				}
			}
			t.Log(got)
		})
	}
}

// TestRootCalls: mounts, namespaces, other programs and sockets are out of reach, even of
// CAP_SYS_ADMIN.
func TestRootCalls(t *testing.T) {
	r := newRunner(t, nil)
	all := Spec{Binds: []Bind{{From: t.TempDir(), To: "/in"}, {From: t.TempDir(), To: "/out", Write: true}}, Proc: true, Capabilities: []int{unix.CAP_SYS_ADMIN, unix.CAP_DAC_OVERRIDE}}
	for _, network := range []bool{false, true} {
		all.Network = network
		got, err := tried(t, r, "calls", attempt{Spec: all})
		if err != nil {
			t.Fatal(err)
		}
		if len(got) < 16 {
			t.Fatalf("it tried only %v", got)
		}
		for _, what := range []string{"hwpoison", "soft offline", "live on", "ioprio_set"} {
			if got[what] != unix.EPERM.Error() {
				t.Errorf("%s: %q", what, got[what])
			}
		}
		for what, failed := range got {
			if what == "tcp socket" && network {
				if failed != "" {
					t.Errorf("%s: %s", what, failed)
				}
			} else if failed == "" {
				t.Errorf("%s succeeded", what)
			}
		}
	}
}

// TestRootMemory: a program that takes more memory than it may ends, and the error says
// so; with a cgroup, and where the cgroup has no limit by its own.
func TestRootMemory(t *testing.T) {
	for what, change := range map[string]func(*Config){
		"cgroup":  nil,
		"process": func(c *Config) { c.NoPageCache = true },
		"no cgroup": func(c *Config) {
			c.Cgroup = "/clusterd-test\x00" // no name of a file
		},
	} {
		t.Run(what, func(t *testing.T) {
			r := newRunner(t, change)
			_, err := tried(t, r, "eat", attempt{})
			var exit *ExitError
			if !errors.As(err, &exit) || !exit.Memory || !strings.Contains(err.Error(), "128 MiB") {
				t.Errorf("%v", err)
			}
			t.Logf("%+v", *exit)
		})
	}
}

// TestRootFileSize: no file gets larger than allowed.
func TestRootFileSize(t *testing.T) {
	r := newRunner(t, nil)
	got, err := tried(t, r, "grow", attempt{Spec: Spec{Binds: []Bind{{From: t.TempDir(), To: "/out", Write: true}}, FileSize: 1 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	if got["small"] != "" || !strings.Contains(got["large"], unix.EFBIG.Error()) {
		t.Error(got)
	}
}

// TestRootFirstToDie: the kernel ends the program before others, and it counts its
// threads.
func TestRootFirstToDie(t *testing.T) {
	r := newRunner(t, nil)
	c, err := r.Start("sleep", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Conn.Close()
	if err := c.Conn.Write(attempt{Spec: Spec{Root: t.TempDir()}}); err != nil {
		t.Fatal(err)
	}
	score := fmt.Sprintf("/proc/%d/oom_score_adj", c.Pid())
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if b, err := os.ReadFile(score); err == nil && string(b) == "1000\n" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("its oom_score_adj is not 1000")
		}
	}
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", c.Pid()))
	if len(threads) < 2 {
		t.Fatalf("threads: %v", threads)
	}
	for _, f := range threads {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // it has ended
		}
		_, rest, _ := strings.Cut(string(b), ") ")
		if got := strings.Fields(rest)[16]; got != "10" { // proc_pid_stat(5)
			t.Errorf("%s: nice %s", f, got)
		}
	}
	_, pids := groupDirs(r.cfg.Cgroup)
	groups, _ := filepath.Glob(filepath.Join(pids, "*", "pids.max"))
	if len(groups) != 1 {
		t.Fatalf("cgroups: %v", groups)
	}
	if b, _ := os.ReadFile(groups[0]); string(b) != "64\n" {
		t.Errorf("pids.max is %q", b)
	}
	c.Kill()
	if err := c.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Error(err)
	}
	if _, err := os.Stat(score); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it is still there: %v", err)
	}
}

// TestRootClose: nothing starts after Close, and no program is left in memory.
func TestRootClose(t *testing.T) {
	opened := 0
	r := newRunner(t, func(c *Config) {
		open := c.Program
		c.Program = func() (*os.File, error) { opened++; return open() }
	})
	for range 3 {
		if _, err := tried(t, r, "calls", attempt{}); err != nil {
			t.Fatal(err)
		}
	}
	if opened != 1 {
		t.Errorf("the program was opened %d times", opened)
	}
	r.Close()
	if _, err := r.Start("x", nil, nil); !errors.Is(err, ErrClosed) || r.program != nil {
		t.Errorf("%v %v", err, r.program)
	}
}

// TestExitErrorIsShort: what a hostile program says does not fill the log.
func TestExitErrorIsShort(t *testing.T) {
	h := &head{}
	for range 100 {
		if n, err := h.Write([]byte(strings.Repeat("x", 1000))); n != 1000 || err != nil {
			t.Fatal(n, err)
		}
	}
	if len(h.String()) != headSize {
		t.Errorf("%d bytes", len(h.String()))
	}
	if got := firstLine("\n a\nb"); got != "a" {
		t.Errorf("%q", got)
	}
}

// TestUnified: on cgroup v2 the controllers are handed down to the process's cgroup, which
// has all limits in one directory.
func TestUnified(t *testing.T) {
	defer func(before string) { mountPoint = before }(mountPoint)
	mountPoint = t.TempDir()
	if err := os.WriteFile(filepath.Join(mountPoint, "cgroup.controllers"), []byte("memory pids"), 0o644); err != nil {
		t.Fatal(err)
	}
	for memory, want := range map[int64]map[string]string{
		1 << 20: {"memory.max": "1048576", "memory.swap.max": "0", "pids.max": "64"},
		0:       {"memory.max": "", "pids.max": "64"},
	} {
		g, err := makeGroup(fmt.Sprintf("/clusterd/images/%d", memory), memory, 64)
		if err != nil {
			t.Fatal(err)
		}
		if err := g.add(7); err != nil || len(g.dirs) != 1 {
			t.Fatalf("%v %v", g.dirs, err)
		}
		want["cgroup.procs"] = "7"
		for file, text := range want {
			if b, _ := os.ReadFile(filepath.Join(g.dirs[0], file)); string(b) != text {
				t.Errorf("%s: %q, want %q", file, b, text)
			}
		}
		if killed, _ := g.deaths(); killed {
			t.Error("killed before it began")
		}
		if memory == 0 {
			continue
		}
		for text, want := range map[string][2]bool{
			"low 0\nmax 9\noom 3\noom_kill 1\n": {true, true},
			"low 0\nmax 9\noom 0\noom_kill 1\n": {true, false}, // the machine's lack
			"low 0\nmax 9\noom 0\noom_kill 0\n": {false, false},
		} {
			if err := os.WriteFile(filepath.Join(g.dirs[0], "memory.events"), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			if killed, own := g.deaths(); [2]bool{killed, own} != want {
				t.Errorf("%q: %v %v", text, killed, own)
			}
		}
	}
	for _, dir := range []string{"", "clusterd", "clusterd/images"} {
		if b, _ := os.ReadFile(filepath.Join(mountPoint, dir, "cgroup.subtree_control")); string(b) != "+memory +pids" {
			t.Errorf("/%s hands down %q", dir, b)
		}
	}
}

// TestRootCloseEnds: Close ends what runs.
func TestRootCloseEnds(t *testing.T) {
	r := newRunner(t, nil)
	c, err := r.Start("sleep", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Conn.Close()
	r.Close()
	var exit *ExitError
	if err := c.Wait(); !errors.As(err, &exit) || exit.Memory {
		t.Error(err)
	}
}
