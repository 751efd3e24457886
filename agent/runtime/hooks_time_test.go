package runtime_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

// TestRootPoststartReads: what a program writes is read while its poststart hook runs,
// which else waits for one whose output is full. It waits here for the last line.
func TestRootPoststartReads(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	spec := n.spec("p", "c", "count", "20000") // more than a pipe holds
	spec.Hooks = []api.Hook{n.hook(api.HookPoststart, "await", spec.LogPath, "line 19999", filepath.Join(n.dir, "seen"))}
	if st := n.run(spec); st.ExitCode != 0 || st.StartError != "" {
		t.Errorf("%+v", st)
	}
	spec = n.spec("p", "fails", "echo", "why")
	spec.Hooks = []api.Hook{
		n.hook(api.HookPoststart, "await", spec.LogPath, "why", filepath.Join(n.dir, "seen")), n.hook(api.HookPoststart, "exit", "3"),
	}
	if st := n.start(spec); st.State != api.StateExited || !strings.Contains(st.StartError, "poststart hook") {
		t.Errorf("%+v", st)
	}
	if out := n.output(spec); out != "why\n" {
		t.Errorf("of a start that a hook has failed the log has %q", out)
	}
}

// TestRootPoststartOwns: the exit code of a program that ends at once is not lost
// while its poststart hook runs for longer than an orphan is left unreaped.
func TestRootPoststartOwns(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	spec := n.spec("p", "c", "exit", "7")
	spec.Hooks = []api.Hook{n.hook(api.HookPoststart, "nap", "13")}
	if st := n.run(spec); st.ExitCode != 7 || st.Lost || st.StartError != "" {
		t.Errorf("%+v", st)
	}
}

// TestRootHooksTogether: the hooks of a start end within the start's limit, however
// many there are, and say so; the start that is given up for it leaves nothing.
func TestRootHooksTogether(t *testing.T) {
	n := newNode(t, func(n *node) { n.startLimit = 12 * time.Second })
	n.sandbox("p")
	for _, when := range []string{api.HookCreateRuntime, api.HookPoststart} {
		spec := n.spec("p", "c-"+when, "sleep")
		// Each would be within a limit of its own.
		spec.Hooks = []api.Hook{n.hook(when, "nap", "5"), n.hook(when, "nap", "5"), n.hook(when, "nap", "5")}
		st, err := n.client.StartContainer(n.ctx, spec)
		if err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		if st.State != api.StateExited || !strings.Contains(st.StartError, when) || !strings.Contains(st.StartError, "3.0s") && !strings.Contains(st.StartError, "more than 3s") {
			t.Errorf("%s: %+v", when, st)
		}
		if err := n.client.RemoveContainer(n.ctx, spec.ID); err != nil {
			t.Error(err)
		}
	}
}

// TestRootPoststopBesideServing: a podmon that has to clean up behind a start that its
// predecessor did not end serves meanwhile.
func TestRootPoststopBesideServing(t *testing.T) {
	n, killAt := killable(t)
	n.sandbox("p")
	killAt("container: created")
	spec := n.spec("p", "c", "sleep")
	word, ended := filepath.Join(n.dir, "word"), filepath.Join(n.dir, "ended")
	spec.Hooks = []api.Hook{n.hook(api.HookPoststop, "await", word, "go", ended)}
	if st, err := n.client.StartContainer(n.ctx, spec); err == nil {
		t.Fatalf("podmon was not killed: %+v", st)
	}
	if st := n.status("c"); st.State != api.StateExited || !strings.Contains(st.StartError, "podmon ended") {
		t.Errorf("%+v", st)
	}
	if err := os.WriteFile(word, []byte("go"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := n.client.RemoveContainer(n.ctx, "c"); err != nil { // waits for its hooks
		t.Fatal(err)
	}
	if !exists(ended) {
		t.Error("podmon served only when the hook was over")
	}
}
