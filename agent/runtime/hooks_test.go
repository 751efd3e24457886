package runtime_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

// hookState is what a hook was given.
type hookState struct {
	ID, Status, Bundle string
	Pid                int
	env                string
}

// kept are the states that hooks wrote into a file.
func (n *node) kept(path string) []hookState {
	n.t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		n.t.Fatal(err)
	}
	var out []hookState
	for line := range strings.Lines(string(b)) {
		end := strings.LastIndexByte(line, '}') + 1
		var s hookState
		if err := json.Unmarshal([]byte(line[:end]), &s); err != nil {
			n.t.Fatalf("%s: %v", line, err)
		}
		s.env = strings.TrimSpace(line[end:])
		out = append(out, s)
	}
	return out
}

// hook runs the test program of the node at a moment.
func (n *node) hook(when string, args ...string) api.Hook {
	return api.Hook{When: when, Path: filepath.Join(n.box, "bin/box"), Args: append([]string{"box"}, args...)}
}

// TestRootHooks: each runs at its moment, where that is, with the container's state.
func TestRootHooks(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	said := func(when string) string { return filepath.Join(n.dir, when) }
	if err := os.Mkdir(filepath.Join(n.box, "scratch"), 0o755); err != nil {
		t.Fatal(err)
	}
	spec := n.spec("p", "c", "sleep")
	spec.Mounts = []api.Mount{{Type: "tmpfs", Source: "tmpfs", Destination: "/scratch"}}
	spec.UID, spec.GID = 1000, 1000
	for _, when := range []string{api.HookPoststop, api.HookPoststart, api.HookCreateRuntime, api.HookPrestart} {
		h := n.hook(when, "keep", said(when))
		h.Env = []string{"WHEN=" + when}
		spec.Hooks = append(spec.Hooks, h)
	}
	spec.Hooks = append(spec.Hooks,
		n.hook(api.HookCreateContainer, "write", filepath.Join(n.box, "scratch/made"), "by createContainer"),
		api.Hook{When: api.HookStartContainer, Path: "/bin/box", Args: []string{"box", "write", "/tmp/started", "by startContainer"}},
	)
	if err := os.Chmod(filepath.Join(n.box, "tmp"), 0o1777); err != nil {
		t.Fatal(err)
	}
	st := n.start(spec)
	if st.State != api.StateRunning {
		t.Fatalf("%+v%s", st, n.ownLog())
	}
	bundle := ""
	for when, status := range map[string]string{api.HookPrestart: "creating", api.HookCreateRuntime: "creating", api.HookPoststart: "running"} {
		got := n.kept(said(when))
		if len(got) != 1 || got[0].ID != "c" || got[0].Pid != st.Pid || got[0].Status != status || got[0].env != "WHEN="+when {
			t.Errorf("%s was given %+v, want status %s of process %d", when, got, status, st.Pid)
			continue
		}
		bundle = got[0].Bundle
	}
	b, err := os.ReadFile(filepath.Join(bundle, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	var described struct {
		Root    struct{ Path string }
		Process struct{ Args []string }
		Mounts  []struct{ Destination string }
	}
	if err := json.Unmarshal(b, &described); err != nil || described.Root.Path != n.box || !slices.Equal(described.Process.Args, spec.Args) || len(described.Mounts) != 1 {
		t.Errorf("%v, %s", err, b)
	}

	// The mount namespace is the container's: the node's directory stays empty.
	if left, err := os.ReadDir(filepath.Join(n.box, "scratch")); err != nil || len(left) > 0 {
		t.Errorf("createContainer wrote into the node's folder: %v, %v", left, err)
	}
	root := filepath.Join("/proc", strconv.Itoa(st.Pid), "root")
	for path, want := range map[string]string{"scratch/made": "by createContainer", "tmp/started": "by startContainer"} {
		if b, err := os.ReadFile(filepath.Join(root, path)); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v", path, b, err)
		}
	}
	var owner unix.Stat_t
	if err := unix.Stat(filepath.Join(root, "tmp/started"), &owner); err != nil || owner.Uid != 1000 {
		t.Errorf("startContainer ran as user %d, %v", owner.Uid, err)
	}

	// Another podmon knows what to run at the end.
	if err := syscall.Kill(n.podmonPid(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	n.client.Close()
	n.client = n.connect()
	if exists(said(api.HookPoststop)) {
		t.Error("poststop has run already")
	}
	if err := n.client.Signal(n.ctx, api.Signal{ID: "c", Signal: int(unix.SIGKILL)}); err != nil {
		t.Fatal(err)
	}
	n.exited("c")
	if got := n.kept(said(api.HookPoststop)); len(got) == 0 || got[0].Status != "stopped" || got[0].ID != "c" || got[0].Pid != 0 {
		t.Errorf("poststop was given %+v", got)
	}
}

// TestRootHooksFail: a hook that fails, hangs or is not there fails the start with
// its own words, nothing of the container stays, and what cleans up runs.
func TestRootHooksFail(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	for name, tc := range map[string]struct {
		hook api.Hook
		want []string
	}{
		"createRuntime":   {n.hook(api.HookCreateRuntime, "cat", "/none"), []string{"createRuntime hook", "/none: no such file or directory"}},
		"createContainer": {n.hook(api.HookCreateContainer, "cat", "/none"), []string{"createContainer hook", "/none: no such file or directory"}},
		"poststart":       {n.hook(api.HookPoststart, "cat", "/none"), []string{"poststart hook", "/none: no such file or directory"}},
		"absent":          {api.Hook{When: api.HookPoststart, Path: "/none/hook"}, []string{"poststart hook /none/hook", "no such file or directory"}},
		"hangs":           {api.Hook{When: api.HookPoststart, Path: filepath.Join(n.box, "bin/box"), Args: []string{"box", "sleep"}, TimeoutSeconds: 5}, []string{"poststart hook", "more than 5s", "ready"}}, // time to say "ready"
		"hangs-early":     {api.Hook{When: api.HookCreateRuntime, Path: filepath.Join(n.box, "bin/box"), Args: []string{"box", "sleep"}, TimeoutSeconds: 1}, []string{"createRuntime hook", "ran past specified timeout of 1.0s"}},
	} {
		t.Run(name, func(t *testing.T) {
			n := *n
			n.t = t
			spec := n.spec("p", "c-"+name, "sleep")
			cleaned := filepath.Join(n.dir, "cleaned-"+name)
			spec.Hooks = []api.Hook{n.hook(api.HookPoststop, "exit", "1"), tc.hook, n.hook(api.HookPoststop, "keep", cleaned)}
			st := n.start(spec)
			if st.State != api.StateExited || st.ExitCode != 128 {
				t.Errorf("%+v", st)
			}
			for _, w := range tc.want {
				if !strings.Contains(st.StartError, w) {
					t.Errorf("start error %q has no %q", st.StartError, w)
				}
			}
			if got := n.kept(cleaned); len(got) != 1 || got[0].Status != "stopped" {
				t.Errorf("poststop was given %+v", got)
			}
			if err := n.client.RemoveContainer(n.ctx, spec.ID); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestRootHooksRefused: a request that no hook could be made of.
func TestRootHooksRefused(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	got := map[string]string{}
	for name, h := range map[string]api.Hook{
		"moment":  {When: "preStop", Path: "/bin/true"},
		"path":    {When: api.HookPoststop, Path: "true"},
		"timeout": {When: api.HookPoststop, Path: "/bin/true", TimeoutSeconds: -1},
	} {
		spec := n.spec("p", "c", "true")
		spec.Hooks = []api.Hook{h}
		_, err := n.client.StartContainer(n.ctx, spec)
		if err == nil {
			t.Fatalf("%s was accepted", name)
		}
		got[name] = err.Error()
	}
	want := map[string]string{
		"moment":  `container c: hook 0, /bin/true: no such moment as "preStop"`,
		"path":    `container c: poststop hook "true" is not an absolute path`,
		"timeout": "container c: poststop hook /bin/true has a timeout of -1 s: 1 or more, or none",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
