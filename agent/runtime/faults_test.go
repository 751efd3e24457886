package runtime_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/runtime"
)

// hierarchies are the mounted cgroup hierarchies of the machine.
func hierarchies(t *testing.T) []string {
	t.Helper()
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		return []string{"/sys/fs/cgroup"}
	}
	all, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	if err != nil || len(all) == 0 {
		t.Fatal("no cgroups", err)
	}
	for i := range all {
		all[i] = filepath.Dir(all[i])
	}
	return all
}

// TestRootNoCgroups: where the machine's cgroups are not mounted podmon says so
// and what to do, instead of serving and failing each pod.
func TestRootNoCgroups(t *testing.T) {
	needRoot(t)
	cmd := exec.Command("unshare", "--mount", "sh", "-c", `umount -l /sys/fs/cgroup && exec "$0" --root "$1"`, podmonPath, t.TempDir())
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(string(out), "mount the machine's cgroups at /sys/fs/cgroup") {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestRootCgroupIsTakenAway: somebody moves a container's processes out of its
// cgroup and removes it. It goes on, is told rightly, ends and goes, and its
// pod can run the next.
func TestRootCgroupIsTakenAway(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	spec := n.spec("p", "c", "sleep")
	n.start(spec)
	n.hears(spec)
	pid := n.status("c").Pid
	for _, h := range hierarchies(t) {
		dir := filepath.Join(h, n.cgroup, "podp", "c")
		if err := os.WriteFile(filepath.Join(h, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
			t.Fatal(err)
		}
		if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
			t.Fatal(dir, err)
		}
	}
	if st := n.status("c"); st.State != api.StateRunning || st.Pid != pid {
		t.Errorf("%+v", st)
	}
	var out bytes.Buffer
	code, err := n.client.Exec(n.ctx, api.Exec{ContainerID: "c", Args: []string{"/bin/box", "echo", "here"}}, runtime.ExecIO{Stdout: &out})
	t.Logf("exec without a cgroup: %d %v %q", code, err, out.String()) // it may be refused, and must not hang
	if err := n.client.Signal(n.ctx, api.Signal{ID: "c", Signal: int(unix.SIGTERM)}); err != nil {
		t.Fatal(err)
	}
	if st := n.exited("c"); st.ExitCode != 0 || st.Lost || st.OOMKilled {
		t.Errorf("end: %+v", st)
	}
	if err := n.client.RemoveContainer(n.ctx, "c"); err != nil {
		t.Error(err)
	}
	if st := n.run(n.spec("p", "next", "exit", "3")); st.ExitCode != 3 {
		t.Errorf("the next: %+v", st)
	}
}

// TestRootDiskFull: with no room for its records podmon refuses what is new, in
// the file system's words, and keeps what runs; with room again all works.
func TestRootDiskFull(t *testing.T) {
	n := newNode(t)
	live := filepath.Join(n.dir, "podmon", "live")
	if err := unix.Mount("", live, "", unix.MS_REMOUNT|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "size=256k"); err != nil {
		t.Fatal(err)
	}
	n.sandbox("p")
	spec := n.spec("p", "runs", "sleep")
	n.start(spec)
	n.hears(spec)
	filler := filepath.Join(live, "filler")
	err := os.WriteFile(filler, bytes.Repeat([]byte("x"), 1<<20), 0o600)
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal("the disk is not full:", err)
	}
	_, err = n.client.CreateSandbox(n.ctx, api.Sandbox{ID: "q", PodUID: "uid-q", Namespace: "default", Name: "q", CgroupParent: n.cgroup + "/podq"})
	if err == nil || !strings.Contains(err.Error(), "no space left on device") {
		t.Errorf("a sandbox: %v", err)
	}
	if st := n.start(n.spec("p", "c", "true")); !strings.Contains(st.StartError, "no space left on device") {
		t.Errorf("a container: %+v", st)
	}
	if err := n.client.RemoveContainer(n.ctx, "c"); err != nil {
		t.Error(err)
	}
	if st := n.status("runs"); st.State != api.StateRunning {
		t.Errorf("%+v", st)
	}
	if err := n.client.Signal(n.ctx, api.Signal{ID: "runs", Signal: int(unix.SIGTERM)}); err != nil {
		t.Fatal(err)
	}
	if st := n.exited("runs"); st.ExitCode != 0 || st.Lost {
		t.Errorf("an end with no room to write it down: %+v", st)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	n.sandbox("q")
	if st := n.run(n.spec("q", "d", "exit", "6")); st.ExitCode != 6 {
		t.Errorf("with room again: %+v", st)
	}
}

// TestRootPodmonOutOfMemory: the kernel kills podmon for memory; it comes back
// with all that it had.
func TestRootPodmonOutOfMemory(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	spec := n.spec("p", "c", "sleep")
	n.start(spec)
	n.hears(spec)
	pid, old := n.status("c").Pid, n.podmonPid()
	limit := filepath.Join("/sys/fs/cgroup/memory", n.cgroup, "podmon", "memory.limit_in_bytes")
	usage := filepath.Join("/sys/fs/cgroup/memory", n.cgroup, "podmon", "memory.usage_in_bytes")
	none := "-1"
	if _, err := os.Stat(limit); errors.Is(err, fs.ErrNotExist) { // cgroup v2
		dir := filepath.Join("/sys/fs/cgroup", n.cgroup, "podmon")
		limit, usage, none = filepath.Join(dir, "memory.max"), filepath.Join(dir, "memory.current"), "max"
		if _, err := os.Stat(limit); err != nil {
			t.Skip("podmon's cgroup has no memory controller:", err)
		}
		_ = os.WriteFile(filepath.Join(dir, "memory.swap.max"), []byte("0"), 0) // else it swaps, where there is swap
	}
	write := func(v string) {
		t.Helper()
		if err := os.WriteFile(limit, []byte(v), 0); err != nil && !errors.Is(err, unix.EBUSY) {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(usage)
	if err != nil {
		t.Fatal(err)
	}
	used, _ := strconv.Atoi(strings.TrimSpace(string(b)))
	write(fmt.Sprint(used + 64<<10))
	// Requests that podmon has to hold in memory at once. The kernel may choose
	// the keeper first: then podmon becomes the keeper, and another is podmon.
	gone := func() bool { return !alive(old) || n.podmonPid() != old }
	eventually(t, "podmon's end", func() bool {
		if !gone() {
			ctx, cancel := context.WithTimeout(n.ctx, 5*time.Second)
			defer cancel()
			_ = n.client.Signal(ctx, api.Signal{ID: strings.Repeat("x", 4<<20), Signal: 1})
		}
		return gone()
	})
	write(none)
	eventually(t, "the next podmon", func() bool {
		ctx, cancel := context.WithTimeout(n.ctx, 5*time.Second)
		defer cancel()
		_, _, err := n.client.List(ctx)
		return err == nil && n.podmonPid() != old && alive(n.podmonPid())
	})
	if st := n.status("c"); st.State != api.StateRunning || st.Pid != pid {
		t.Errorf("%+v", st)
	}
	if err := n.client.Signal(n.ctx, api.Signal{ID: "c", Signal: int(unix.SIGTERM)}); err != nil {
		t.Fatal(err)
	}
	if st := n.exited("c"); st.ExitCode != 0 || st.Lost {
		t.Errorf("%+v", st)
	}
}
