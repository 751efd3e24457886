package runtime_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/runtime"
	"github.com/clusterd/clusterd/netsetup/netns"
)

// pod users: the ids of the host that the test's pods have.
const firstUser, userCount = 1 << 20, 1 << 16

// userPod makes a pod with a user namespace.
func (n *node) userPod(id string, change ...func(*api.Sandbox)) api.SandboxStatus {
	n.t.Helper()
	// The root file system's whole path has to be open to the pod's root.
	for dir := n.dir; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			n.t.Fatal(err)
		}
	}
	spaces, err := netns.Open(filepath.Join(n.dir, "netns"))
	if err != nil {
		n.t.Fatal(err)
	}
	path, err := spaces.CreateOwned(id, firstUser, userCount)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		if err := spaces.Delete(id); err != nil {
			n.t.Error(err)
		}
	})
	in := func(s *api.Sandbox) { s.NetNS, s.Users = path, &api.IDRange{First: firstUser, Count: userCount} }
	return n.sandbox(id, append([]func(*api.Sandbox){in}, change...)...)
}

func TestRootUserNamespace(t *testing.T) {
	n := newNode(t)
	for _, shared := range []bool{false, true} {
		id := fmt.Sprint("pod", shared)
		n.userPod(id, func(s *api.Sandbox) {
			s.SharePID, s.Hostname = shared, "inside"
			s.Sysctls = map[string]string{"net.ipv4.ip_unprivileged_port_start": "7", "kernel.shm_rmid_forced": "1"}
		})
		spec := n.spec(id, "maps"+id, "cat", "/proc/self/uid_map", "/proc/self/gid_map", "/proc/sys/net/ipv4/ip_unprivileged_port_start", "/proc/sys/kernel/shm_rmid_forced", "/proc/sys/kernel/hostname")
		if st := n.run(spec); st.ExitCode != 0 {
			t.Fatal(st, n.output(spec), n.ownLog())
		}
		got := strings.Join(strings.Fields(n.output(spec)), " ")
		want := fmt.Sprintf("0 %d %d 0 %[1]d %d 7 1 inside", firstUser, userCount)
		if got != want {
			t.Errorf("shared %v: %q, want %q", shared, got, want)
		}
		// Its outputs are its user's, to be opened again by name.
		spec = n.spec(id, "out"+id, "write", "/dev/stdout", "by name\n")
		spec.UID = 7
		if st := n.run(spec); st.ExitCode != 0 || n.output(spec) != "by name\n" {
			t.Errorf("shared %v: /dev/stdout: %+v %q", shared, st, n.output(spec))
		}
		spec = n.spec(id, "big"+id, "true")
		spec.GID = userCount
		if _, err := n.client.StartContainer(n.ctx, spec); err == nil && n.status(spec.ID).StartError == "" {
			t.Error("a group of another's ids was taken")
		}
	}
	// A volume shows the owners it has on disk; the shared memory is the pod's.
	vol := filepath.Join(n.dir, "vol")
	if err := os.Mkdir(vol, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(vol, 7, 8); err != nil {
		t.Fatal(err)
	}
	spec := n.spec("podtrue", "c", "sleep")
	spec.UID, spec.Mounts = 7, []api.Mount{{Source: vol, Destination: "/tmp"}}
	n.start(spec)
	do := func(args ...string) string {
		t.Helper()
		var out, errs bytes.Buffer
		code, err := n.client.Exec(n.ctx, api.Exec{ContainerID: "c", Args: append([]string{"/bin/box"}, args...)}, runtime.ExecIO{Stdout: &out, Stderr: &errs})
		if code != 0 || err != nil {
			t.Errorf("%v: %d %v %s", args, code, err, &errs)
		}
		return out.String()
	}
	do("write", "/tmp/mine", "x")
	do("write", "/dev/shm/mine", "x")
	if got := do("write", "/dev/stdout", "again"); got != "again" {
		t.Errorf("an execution's /dev/stdout: %q", got)
	}
	for file, want := range map[string]uint32{
		vol + "/mine": 7,
		n.dir + "/podmon/live/sandboxes/podtrue/shm/mine": firstUser + 7,
		n.dir + "/podmon/live/sandboxes/podtrue/shm":      firstUser,
	} {
		var st syscall.Stat_t
		if err := syscall.Stat(file, &st); err != nil || st.Uid != want {
			t.Errorf("%s belongs to %d, want %d (%v)", file, st.Uid, want, err)
		}
	}
	out := &terminalScript{}
	if code, err := n.client.Exec(n.ctx, api.Exec{ContainerID: "c", TTY: true, Args: []string{"/bin/box", "id"}}, runtime.ExecIO{Stdout: out}); code != 0 || err != nil || !strings.HasPrefix(out.String(), "7 0 ") {
		t.Errorf("with a terminal: %d %v %q", code, err, out)
	}
	// The next podmon executes in it as well, and starts more.
	killAndWait(t, n.podmonPid())
	n.client.Close()
	n.client = n.connect()
	if got := strings.Fields(do("cat", "/proc/self/uid_map")); len(got) != 3 || got[1] != fmt.Sprint(firstUser) {
		t.Errorf("after podmon's end: %v", got)
	}
	spec = n.spec("podtrue", "later", "id")
	if st := n.run(spec); st.ExitCode != 0 || n.output(spec) != "0 0 []\n" {
		t.Errorf("after podmon's end: %+v %q", st, n.output(spec))
	}
}

// TestRootUserNamespaceRefused: what cannot be a pod's user namespace is told.
func TestRootUserNamespaceRefused(t *testing.T) {
	n := newNode(t)
	spaces, err := netns.Open(filepath.Join(n.dir, "netns"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = spaces.Delete("hosts"); _ = spaces.Delete("other") })
	hosts, err1 := spaces.Create("hosts")
	other, err2 := spaces.CreateOwned("other", firstUser+1, userCount)
	if err1 != nil || err2 != nil {
		t.Fatal(err1, err2)
	}
	for _, tt := range []struct {
		name, netns, want string
	}{
		{"a network namespace of the host's", hosts, "user namespace"},
		{"a user namespace with other ids", other, "uid_map"},
		{"the host's network", "", "host's network"},
	} {
		_, err := n.client.CreateSandbox(n.ctx, api.Sandbox{
			ID: "p", PodUID: "u", Namespace: "default", Name: "p", CgroupParent: n.cgroup + "/podp",
			NetNS: tt.netns, Users: &api.IDRange{First: firstUser, Count: userCount},
		})
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
}
