package agent_test

import (
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/cpuset"

	"github.com/clusterd/clusterd/agent/cpu"
	"github.com/clusterd/clusterd/features"
)

// TestRootPinned: the kernel keeps a Guaranteed container on its processor from
// its first instruction on, and the others off it, also over a restart.
func TestRootPinned(t *testing.T) {
	features.Shows(t, 240)
	m := newMachine(t)
	topology, err := cpu.Discover("/sys")
	if err != nil {
		t.Fatal(err)
	}
	ids := topology.All().List()
	if len(ids) < 2 {
		t.Skip("this machine has one processor: nobody can have one for himself")
	}
	restart := func() {
		t.Helper()
		m.stop()
		if m.cpus, err = cpu.New(cpu.Config{Topology: topology, Reserved: cpuset.New(ids[0]), File: filepath.Join(m.dir, "cpus.json")}); err != nil {
			t.Fatal(err)
		}
		m.start()
	}
	restart()
	m.create(newPod("shared", app("web")))
	shared := m.ready("shared")
	allowed := func(p *v1.Pod) string {
		t.Helper()
		for line := range strings.Lines(m.fetch(p, "/file?name=/proc/self/status")) {
			if v, ok := strings.CutPrefix(line, "Cpus_allowed_list:"); ok {
				return strings.TrimSpace(v)
			}
		}
		t.Fatalf("%s tells no processors", p.Name)
		return ""
	}
	if got := allowed(shared); got != topology.All().String() {
		t.Errorf("shared, alone: %s", got)
	}
	one := app("web")
	one.Resources.Limits = v1.ResourceList{v1.ResourceCPU: resource.MustParse("1"), v1.ResourceMemory: resource.MustParse("64Mi")}
	m.create(newPod("own", one))
	own := m.ready("own")
	mine, _ := m.cpus.Of("uid-own", "web")
	rest := topology.All().Difference(mine).String()
	for range 2 { // the second time after a restart
		if got := allowed(own); mine.Size() != 1 || got != mine.String() {
			t.Errorf("own: on %s, has %s", got, mine)
		}
		if got := allowed(shared); got != rest {
			t.Errorf("shared: on %s, want %s", got, rest)
		}
		restart()
	}
	m.delete("own", 1)
	m.eventually("the processors to be shared again", func() bool { return allowed(shared) == topology.All().String() })
}
