package runtime_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/runtime"
)

func TestRootLifecycle(t *testing.T) {
	n := newNode(t)
	sb := n.sandbox("p1")
	if sb.State != api.StateRunning || sb.Pid == 0 {
		t.Fatalf("sandbox: %+v", sb)
	}
	spec := n.spec("p1", "c1", "echo", "hello")
	st := n.run(spec)
	if st.ExitCode != 0 || st.StartError != "" {
		t.Fatalf("status: %+v", st)
	}
	if got := n.output(spec); got != "hello\n" {
		t.Fatalf("output: %q", got)
	}
	// Who only looks sees the same.
	held, ended, err := runtime.Look(n.ctx, filepath.Join(n.dir, "podmon"))
	if err != nil || len(held) != 1 || held[0].Pid != sb.Pid || len(ended) != 1 || ended[0].Container.ID != "c1" {
		t.Fatalf("looked at from beside: %+v, %+v, %v", held, ended, err)
	}
	if _, _, err := runtime.Look(n.ctx, t.TempDir()); !errors.Is(err, runtime.ErrNoPodmon) {
		t.Fatalf("a folder without podmon: %v", err)
	}
	if err := n.client.RemoveContainer(n.ctx, "c1"); err != nil {
		t.Fatal(err)
	}
	if err := n.client.RemoveSandbox(n.ctx, "p1"); err != nil {
		t.Fatal(err)
	}
	sandboxes, containers, err := n.client.List(n.ctx)
	if err != nil || len(sandboxes)+len(containers) > 0 {
		t.Fatalf("left: %v %v %v", sandboxes, containers, err)
	}
}

// TestRootMovesAreFavored: podmon has told the kernel that processes are moved
// between cgroups often, by a hierarchy that is mounted nowhere.
func TestRootMovesAreFavored(t *testing.T) {
	_, err := os.Stat("/sys/fs/cgroup/cgroup.controllers")
	unified := err == nil // cgroup v2 alone: nothing is done there
	// The kernel takes its time to let go of the hierarchy of a podmon that has
	// ended, that of another test's for one: until then a new podmon goes
	// without.
	var groups []byte
	for deadline := time.Now().Add(time.Minute); ; {
		newNode(t)
		if groups, err = os.ReadFile("/proc/self/cgroup"); err != nil {
			t.Fatal(err)
		}
		has := strings.Contains(string(groups), ":name=clusterd:/\n")
		if has != unified {
			break
		}
		if unified || time.Now().After(deadline) {
			t.Fatalf("podmon's hierarchy is there: %v, in:\n%s", has, groups)
		}
		<-time.After(time.Second)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), "name=clusterd") {
		t.Errorf("the hierarchy is mounted:\n%s", mounts)
	}
}
