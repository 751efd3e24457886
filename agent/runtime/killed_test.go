package runtime_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

// killPoints are the places of podmon's code where it is killed, in the order
// in which a pod's life comes past them.
var killPoints = []string{
	"sandbox: begun", "sandbox: pause started", "sandbox: pause ready", "sandbox: on record", "sandbox: kept",
	"container: begun", "container: created", "container: init waits", "container: cgroups mounted", "container: program runs", "container: on record",
	"container: ended", "container: cgroup removed", "container: end on record",
	"sandbox: cgroups removed",
}

// TestKillPoints: the table names every point there is in podmon's code.
func TestKillPoints(t *testing.T) {
	files, err := filepath.Glob("../podmon/*.go")
	if err != nil {
		t.Fatal(err)
	}
	var have []string
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`\bpoint\("([^"]+)"\)`).FindAllSubmatch(b, -1) {
			have = append(have, string(m[1]))
		}
	}
	want := slices.Sorted(slices.Values(killPoints))
	slices.Sort(have)
	if !slices.Equal(have, want) {
		t.Errorf("points in podmon's code: %q\nin the table: %q", have, want)
	}
}

// killable makes a podmon that is killed once at the place that the returned
// function names.
func killable(t *testing.T) (*node, func(point string)) {
	n := newNode(t)
	file := filepath.Join(n.dir, "kill-at") // see point in agent/podmon
	return n, func(point string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(point), 0o600); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if _, err := os.Stat(file); err == nil {
				t.Errorf("podmon never came to %q", point)
			}
		})
	}
}

// TestRootPodmonKilledAt: wherever in a pod's life podmon is killed, its
// successor lists all that is left, can remove it, and the pod can be made
// again under the same names; no mount is left either (end looks). (A pause that was started and on no record once
// outlived every podmon.)
func TestRootPodmonKilledAt(t *testing.T) {
	needRoot(t)
	for _, point := range killPoints {
		t.Run(strings.ReplaceAll(point, ": ", " "), func(t *testing.T) {
			n, killAt := killable(t)
			killAt(point)
			sb := api.Sandbox{ID: "p", PodUID: "uid-p", Namespace: "default", Name: "p", CgroupParent: n.cgroup + "/podp"}
			if _, err := n.client.CreateSandbox(n.ctx, sb); err != nil {
				if err := n.client.RemoveSandbox(n.ctx, "p"); err != nil {
					t.Fatal(err)
				}
				if _, err := n.client.CreateSandbox(n.ctx, sb); err != nil {
					t.Fatal("sandbox is not made again:", err)
				}
			}
			spec := n.spec("p", "c", "sleep")
			if st, err := n.client.StartContainer(n.ctx, spec); err != nil {
				// What has become of it is in the list, or nothing has.
				if st = n.status("c"); st.State != api.StateRunning {
					if err := n.client.RemoveContainer(n.ctx, "c"); err != nil {
						t.Fatal(err)
					}
					n.start(spec)
				}
			}
			pid := n.status("c").Pid
			if err := n.client.Signal(n.ctx, api.Signal{ID: "c", Signal: int(syscall.SIGKILL)}); err != nil {
				t.Fatal(err)
			}
			if st := n.exited("c"); st.ExitCode != 137 || st.Lost {
				t.Errorf("end: %+v", st)
			}
			eventually(t, "end of the first process", func() bool { return !alive(pid) })
			err := n.client.RemoveSandbox(n.ctx, "p") // asks a second podmon when the first is killed
			if err != nil {
				t.Fatal(err)
			}
			sandboxes, containers, err := n.client.List(n.ctx)
			if err != nil || len(sandboxes)+len(containers) > 0 {
				t.Errorf("left on record: %v %v %v", sandboxes, containers, err)
			}
			var left []string
			eventually(t, "end of all processes", func() bool {
				left = n.processes()
				return len(left) <= 2 // podmon and its keeper
			})
			if t.Failed() {
				t.Log(left)
			}
		})
	}
}

// TestRootLostRecord: a record that cannot be read takes its processes with
// it.
func TestRootLostRecord(t *testing.T) {
	n := newNode(t)
	pause := n.sandbox("p").Pid
	n.start(n.spec("p", "c", "sleep"))
	pid := n.status("c").Pid
	old := n.podmonPid()
	if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "podmon's end", func() bool { return !alive(old) })
	for _, f := range []string{"live/sandboxes/p/sandbox.json", "live/containers/c/container.json"} {
		if err := os.WriteFile(filepath.Join(n.dir, "podmon", f), []byte(`{"Version":1,"Sta`), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	sandboxes, containers, err := n.client.List(n.ctx)
	if err != nil || len(sandboxes)+len(containers) > 0 {
		t.Errorf("on record: %v %v %v", sandboxes, containers, err)
	}
	eventually(t, "end of what is on no record", func() bool { return !alive(pause) && !alive(pid) })
	n.sandbox("p") // the names are free
	if st := n.run(n.spec("p", "c", "true")); st.ExitCode != 0 || st.StartError != "" {
		t.Errorf("%+v", st)
	}
}

// processes lists what runs in the node's cgroups, but the maker of pauses,
// which comes and goes with podmon.
func (n *node) processes() []string {
	n.t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		n.t.Fatal(err)
	}
	var out []string
	for _, p := range all {
		b, err := os.ReadFile(p)
		if err != nil || !strings.Contains(string(b), n.cgroup) {
			continue
		}
		dir := filepath.Dir(p)
		if pid, _ := strconv.Atoi(filepath.Base(dir)); alive(pid) { // one that waits to be reaped holds nothing
			stat, _ := os.ReadFile(filepath.Join(dir, "stat"))
			if strings.Contains(string(stat), "(pause-maker)") {
				continue
			}
			out = append(out, string(stat))
		}
	}
	return out
}
