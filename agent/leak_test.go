package agent_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	goruntime "runtime"
	"runtime/debug"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"
)

var (
	leakPods   = flag.Int("leak-pods", 10, "pods of each round of TestRootNothingLeaks")
	leakRounds = flag.Int("leak-rounds", 2, "rounds of TestRootNothingLeaks")
	leakHeap   = flag.String("leak-heap", "", "a folder for heap profiles after its first and last round; compare them with pprof -base")
)

// TestRootNothingLeaks: pods are made and deleted, again and again, and after
// each round there is of everything as much as after the first. The long form
// is `make leaks`: 110 pods, 50 times.
func TestRootNothingLeaks(t *testing.T) {
	m := newMachine(t)
	m.timeout = 5 * time.Minute // for all the pods of a round
	// Nor are events kept: there are thousands, and no server that lets them go.
	m.api.PrependReactor("create", "events", func(a k8stesting.Action) (bool, kruntime.Object, error) {
		return true, a.(k8stesting.CreateAction).GetObject(), nil
	})
	round := func(n int) {
		t.Helper()
		for i := range *leakPods {
			p := newPod(fmt.Sprintf("leak-%d-%d", n, i), app("a", "serve", "8080"))
			p.Spec.Volumes = []v1.Volume{
				{Name: "disk", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}},
				{Name: "memory", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{Medium: v1.StorageMediumMemory}}},
			}
			p.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "disk", MountPath: "/disk", SubPath: "sub"}, {Name: "memory", MountPath: "/memory"}}
			if i%2 == 1 {
				p.Spec.HostUsers = ptr.To(false)
			}
			m.create(p)
		}
		for i := range *leakPods {
			name := fmt.Sprintf("leak-%d-%d", n, i)
			m.ready(name)
			m.delete(name, 5)
		}
		m.eventually("end of the round's pods", func() bool {
			list, err := m.api.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
			return err == nil && len(list.Items) == 0
		})
		// The API in memory keeps what it was asked.
		m.api.ClearActions()
		t.Logf("round %d", n)
	}
	round(0)
	first := m.settled(nil)
	memory := m.memory("first")
	for n := range *leakRounds {
		round(n + 1)
	}
	last := m.settled(first)
	for _, what := range slices.Sorted(maps.Keys(last)) {
		if last[what] > first[what] { // less is what had not gone yet after the first
			t.Errorf("%s: %d after the first round, %d after the last", what, first[what], last[what])
		}
	}
	grown := m.memory("last")
	made := *leakPods * *leakRounds
	t.Logf("%d pods made and deleted: %v", made, first)
	for _, what := range slices.Sorted(maps.Keys(grown)) {
		t.Logf("%s: %.1f MiB after the first round, %.1f after the last", what, memory[what], grown[what])
		if !strings.HasSuffix(what, "agent and test") && grown[what] > memory[what]+8 { // the API in memory is in there
			t.Errorf("%s has grown by %.1f MiB", what, grown[what]-memory[what])
		}
	}
}

// census counts what a pod takes of the machine.
func (m *machine) census() map[string]int {
	m.t.Helper()
	out := map[string]int{"goroutines": goruntime.NumGoroutine(), "agent's descriptors": entries("/proc/self/fd")}
	links, err := netlink.LinkList()
	for errors.Is(err, netlink.ErrDumpInterrupted) { // something came or went meanwhile
		links, err = netlink.LinkList()
	}
	if err != nil {
		m.t.Fatal(err)
	}
	out["network devices"] = len(links)
	out["network namespaces"] = entries(filepath.Join(m.dir, "net", "netns"))
	out["pod folders"] = entries(filepath.Join(m.dir, "pods"))
	out["log folders"] = entries(filepath.Join(m.dir, "log", "pods"))
	for _, d := range []string{"sandboxes", "containers", "state"} {
		out["podmon's "+d] = entries(filepath.Join(m.dir, "podmon", "live", d))
	}
	var ipam struct {
		Allocated map[string]any `json:"allocated"`
	}
	if b, err := os.ReadFile(filepath.Join(m.dir, "net", "ipam.json")); err != nil {
		m.t.Fatal(err)
	} else if err := json.Unmarshal(b, &ipam); err != nil {
		m.t.Fatal(err)
	}
	out["addresses"] = len(ipam.Allocated)
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		m.t.Fatal(err)
	}
	out["mounts"] = strings.Count(string(b), m.dir+"/")
	for _, root := range []string{"/sys/fs/cgroup" + m.cgroup, "/sys/fs/cgroup/memory" + m.cgroup, "/sys/fs/cgroup/devices" + m.cgroup, "/sys/fs/cgroup/systemd" + m.cgroup} {
		_ = filepath.WalkDir(root, func(_ string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				out["cgroups"]++
			}
			return nil
		})
	}
	for comm, pids := range m.processes() {
		out["processes "+comm] = len(pids)
		if strings.HasPrefix(comm, "podmon") {
			for _, pid := range pids {
				out[comm+"'s descriptors"] += entries(fmt.Sprintf("/proc/%d/fd", pid))
			}
		}
	}
	return out
}

// settled counts until nothing is more than in want, or for want of that stays the
// same for a while: what has been asked to go needs its time.
func (m *machine) settled(want map[string]int) map[string]int {
	deadline := time.Now().Add(time.Minute)
	for last, same := m.census(), 0; ; {
		<-time.After(50 * time.Millisecond)
		goruntime.GC() // files that nobody closes are closed by it, as in life
		now := m.census()
		if maps.Equal(now, last) {
			same++
		} else {
			last, same = now, 0
		}
		if want == nil && same >= 20 || want != nil && within(now, want) || time.Now().After(deadline) {
			return now
		}
	}
}

// within tells whether nothing is more than in want.
func within(now, want map[string]int) bool {
	for what, n := range now {
		if n > want[what] {
			return false
		}
	}
	return true
}

// processes are those in the machine's cgroups, by name.
func (m *machine) processes() map[string][]int {
	out := map[string][]int{}
	all, _ := filepath.Glob("/proc/[0-9]*/cgroup")
	for _, p := range all {
		b, err := os.ReadFile(p)
		if err != nil || !strings.Contains(string(b), m.cgroup) {
			continue
		}
		comm, err := os.ReadFile(filepath.Join(filepath.Dir(p), "comm"))
		if err != nil {
			continue
		}
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(p)))
		name := strings.TrimSpace(string(comm))
		out[name] = append(out[name], pid)
	}
	return out
}

// memory is what podmon, its keeper and this process hold for themselves, in
// MiB. When is the name of its heap profile, should one be wanted.
func (m *machine) memory(when string) map[string]float64 {
	debug.FreeOSMemory()
	if *leakHeap != "" {
		var b bytes.Buffer
		if err := pprof.Lookup("heap").WriteTo(&b, 0); err != nil {
			m.t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(*leakHeap, when+".heap"), b.Bytes(), 0o644); err != nil {
			m.t.Fatal(err)
		}
	}
	var heap goruntime.MemStats
	goruntime.ReadMemStats(&heap)
	out := map[string]float64{"agent and test": private("self"), "heap of agent and test": float64(heap.HeapInuse) / (1 << 20)}
	for comm, pids := range m.processes() {
		for _, pid := range pids {
			if strings.HasPrefix(comm, "podmon") {
				out[comm] += private(strconv.Itoa(pid))
			}
		}
	}
	return out
}

// private is the memory that only this process has, in MiB.
func private(pid string) float64 {
	f, err := os.Open("/proc/" + pid + "/smaps_rollup")
	if err != nil {
		return 0
	}
	defer f.Close()
	var kib float64
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), "Private_Dirty:"); ok {
			_, _ = fmt.Sscan(rest, &kib)
		}
	}
	return kib / 1024
}

func entries(dir string) int {
	list, _ := os.ReadDir(dir)
	return len(list)
}
