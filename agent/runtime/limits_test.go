package runtime_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

func TestRootOutOfMemory(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	spec := n.spec("p", "hog", "hog")
	spec.Resources.MemoryLimit = 32 << 20
	st := n.run(spec)
	if !st.OOMKilled || st.ExitCode != 137 || st.Signal != 9 {
		t.Fatalf("status: %+v", st)
	}

	// A child is over the limit: the container ends with it, unless it chose
	// to live on.
	spec = n.spec("p", "breed", "breed")
	spec.Resources.MemoryLimit = 32 << 20
	if st := n.run(spec); !st.OOMKilled || st.ExitCode != 137 {
		t.Errorf("as a whole: %+v", st)
	}
	spec = n.spec("p", "alone", "breed")
	spec.Resources.MemoryLimit = 32 << 20
	spec.OOMSingleProcess = true
	n.start(spec)
	eventually(t, "the child's end", func() bool { return strings.Contains(n.output(spec), "child: signal: killed") })
	if st := n.status("alone"); st.State != api.StateRunning {
		t.Errorf("one process: %+v", st)
	}
}

func TestRootLimits(t *testing.T) {
	n := newNode(t)
	n.sandbox("p", func(s *api.Sandbox) { s.PodResources = api.Resources{MemoryLimit: 128 << 20, PidsLimit: 50} })
	spec := n.spec("p", "c", "sleep")
	spec.Resources = api.Resources{CPUShares: 512, CPUQuota: 50000, CPUPeriod: 100000, MemoryLimit: 64 << 20, PidsLimit: 20}
	spec.Rlimits = []api.Rlimit{{Type: "RLIMIT_CORE", Soft: 1000, Hard: 2000}}
	spec.OOMScoreAdj = 500
	st := n.start(spec)
	cg := cgroupReader{t, n.cgroup + "/podp"}
	cg.want("", "memory.limit_in_bytes", "memory.max", 128<<20)
	cg.want("", "pids.max", "pids.max", 50)
	cg.want("c", "memory.limit_in_bytes", "memory.max", 64<<20)
	cg.want("c", "pids.max", "pids.max", 20)
	cg.want("c", "cpu.shares", "", 512)
	cg.want("c", "cpu.cfs_quota_us", "", 50000)
	limits, _ := os.ReadFile(fmt.Sprintf("/proc/%d/limits", st.Pid))
	if !strings.Contains(string(limits), "Max core file size        1000                 2000") {
		t.Errorf("limits: %s", limits)
	}
	score, _ := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", st.Pid))
	if string(score) != "500\n" {
		t.Errorf("oom score: %s", score)
	}
	for id, r := range map[string]api.Resources{"c": {MemoryLimit: 96 << 20, CPUQuota: 20000}, "p": {MemoryLimit: 256 << 20}} {
		if err := n.client.Update(n.ctx, api.Update{ID: id, Resources: r}); err != nil {
			t.Fatal(err)
		}
	}
	cg.want("c", "memory.limit_in_bytes", "memory.max", 96<<20)
	cg.want("c", "cpu.cfs_quota_us", "", 20000)
	cg.want("c", "pids.max", "pids.max", 20)
	cg.want("", "memory.limit_in_bytes", "memory.max", 256<<20)
	if got := n.status("c").Container.Resources; got.MemoryLimit != 96<<20 || got.PidsLimit != 20 {
		t.Errorf("resources after update: %+v", got)
	}
}

// cgroupReader reads limits of either cgroup version.
type cgroupReader struct {
	t    *testing.T
	base string
}

func (c cgroupReader) want(sub, v1, v2 string, want int) {
	c.t.Helper()
	var path string
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		if v2 == "" {
			return
		}
		path = filepath.Join("/sys/fs/cgroup", c.base, sub, v2)
	} else {
		controller, _, _ := strings.Cut(v1, ".")
		path = filepath.Join("/sys/fs/cgroup", controller, c.base, sub, v1)
	}
	b, err := os.ReadFile(path)
	if got := strings.TrimSpace(string(b)); err != nil || got != strconv.Itoa(want) {
		c.t.Errorf("%s is %q (%v), want %d", path, got, err, want)
	}
}

// TestRootCgroupTree: a container sees its own cgroup as the root of every
// hierarchy the machine has, and may not write there.
func TestRootCgroupTree(t *testing.T) {
	n := newNode(t)
	n.sandbox("p")
	files := []string{"/sys/fs/cgroup/memory/memory.limit_in_bytes"}
	hosts, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.clone_children") // version 1 alone has it
	if err != nil {
		t.Fatal(err)
	}
	if len(hosts) == 0 {
		files = []string{"/sys/fs/cgroup/memory.max"}
	}
	for _, privileged := range []bool{false, true} {
		spec := n.spec("p", fmt.Sprintf("limited-%t", privileged), "cat", files[0], "/proc/self/mountinfo")
		spec.Resources.MemoryLimit = 64 << 20
		spec.Privileged = privileged
		if st := n.run(spec); st.ExitCode != 0 {
			t.Fatalf("status: %+v", st)
		}
		lines := n.log(spec)
		if len(lines) == 0 || lines[0].text != strconv.Itoa(64<<20) {
			t.Errorf("privileged %t: the container sees another limit than its own: %v", privileged, lines)
		}
		seen := map[string]bool{}
		for _, l := range lines[1:] {
			f := strings.Fields(l.text)
			if len(f) < 6 || !strings.HasPrefix(f[4], "/sys/fs/cgroup") {
				continue
			}
			if writable := strings.HasPrefix(f[5], "rw"); writable != privileged {
				t.Errorf("privileged %t: %s is mounted %s", privileged, f[4], f[5])
			}
			if f[3] != "/" {
				t.Errorf("privileged %t: %s begins at %s, not at the container's own cgroup", privileged, f[4], f[3])
			}
			seen[f[4]] = true
		}
		for _, h := range hosts {
			if !seen[filepath.Dir(h)] {
				t.Errorf("privileged %t: %s is not mounted", privileged, filepath.Dir(h))
			}
		}
	}
}
