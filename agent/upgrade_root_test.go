package agent_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/agent/runtime"
)

// TestRootUpgradeKeepsPods: an agent of another clusterd, which carries another
// podmon, takes over: the pods do not notice, and the node tells of it.
func TestRootUpgradeKeepsPods(t *testing.T) {
	m := newMachine(t)
	m.create(newPod("a", app("web")))
	before := m.ready("a").Status.ContainerStatuses[0]
	pids := m.pids()
	m.stop()
	m.runtime.Close()

	b, err := os.ReadFile(filepath.Join(programs, "podmon"))
	if err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(m.dir, "other-podmon")
	if err := os.WriteFile(other, append(b, "another build"...), 0o755); err != nil {
		t.Fatal(err)
	}
	cfg := m.runtimeConfig()
	cfg.PodmonPath = other
	if m.runtime, err = runtime.Start(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	if u := m.runtime.Upgraded(); !u.Needed() || u.Err != nil {
		t.Fatalf("upgrade: %+v", u)
	}
	m.start()
	p := m.ready("a")
	if c := p.Status.ContainerStatuses[0]; c.ContainerID != before.ContainerID || c.RestartCount != 0 {
		t.Errorf("the container was replaced: %+v", c)
	}
	if now := m.pids(); len(now) != 1 || now[0] != pids[0] {
		t.Errorf("pids %v, before %v", now, pids)
	}
	if got := strings.TrimSpace(m.fetch(p, "/")); got != "a" {
		t.Errorf("it answers %q", got)
	}
	m.eventually("the node's event", func() bool {
		list, err := m.api.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return false
		}
		for _, e := range list.Items {
			if e.Reason == "RuntimeUpgraded" && e.InvolvedObject.Kind == "Node" && e.InvolvedObject.Name == "n1" {
				return true
			}
		}
		return false
	})
	m.create(newPod("b", app("web")))
	m.ready("b")
}
