package stats

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func write(t *testing.T, root string, files map[string]string) {
	t.Helper()
	for name, content := range files {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCgroupVersions: both versions of cgroups tell the same.
func TestCgroupVersions(t *testing.T) {
	want := Usage{CPU: 5_000_000, Memory: 1000, WorkingSet: 700, RSS: 400, PageFaults: 9, MajorFault: 2, Pids: 3}
	for version, files := range map[string]map[string]string{
		"v1": {
			"cpuacct/a/b/cpuacct.usage": "5000000\n", "memory/a/b/memory.usage_in_bytes": "1000\n", "pids/a/b/pids.current": "3\n",
			"memory/a/b/memory.stat": "rss 1\ninactive_file 1\ntotal_rss 400\ntotal_inactive_file 300\ntotal_pgfault 9\ntotal_pgmajfault 2\n",
		},
		"v2": {
			"cgroup.controllers": "cpu memory pids\n", "a/b/cpu.stat": "usage_usec 5000\nuser_usec 1\n", "a/b/memory.current": "1000\n",
			"a/b/memory.stat": "anon 400\nfile 600\ninactive_file 300\npgfault 9\npgmajfault 2\n", "a/b/pids.current": "3\n",
		},
	} {
		root := t.TempDir()
		write(t, root, files)
		if got, err := (Cgroups{root}).Read("/a/b"); err != nil || got != want {
			t.Errorf("%s: %+v %v, want %+v", version, got, err, want)
		}
		if _, err := (Cgroups{root}).Read("/a/none"); !os.IsNotExist(err) {
			t.Errorf("%s, no such cgroup: %v", version, err)
		}
	}
	// More cache than memory, as the kernel's figures are not of one moment.
	root := t.TempDir()
	write(t, root, map[string]string{"cgroup.controllers": "", "g/cpu.stat": "", "g/memory.current": "10", "g/memory.stat": "inactive_file 20\n", "g/pids.current": "1"})
	if got, err := (Cgroups{root}).Read("/g"); err != nil || got.WorkingSet != 0 {
		t.Errorf("working set %d %v", got.WorkingSet, err)
	}
}

func TestDiskUse(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"a/b/c": strings.Repeat("x", 100_000), "a/d": "1"})
	got, err := DiskUse(t.Context(), filepath.Join(dir, "a"), filepath.Join(dir, "none"))
	if err != nil || got.Inodes != 4 || got.Bytes < 100_000 || got.Bytes > 1<<20 {
		t.Errorf("%+v %v", got, err)
	}
}

func TestRates(t *testing.T) {
	var r rates
	at := time.Unix(1000, 0)
	if r.of("a", 100, at) != nil {
		t.Error("a rate from one look")
	}
	at = at.Add(2 * time.Second)
	if got := r.of("a", 100+1e9, at); got == nil || *got != 5e8 {
		t.Errorf("half a processor: %v", got)
	}
	if got := r.of("a", 100+1e9, at.Add(time.Millisecond)); got == nil || *got != 5e8 {
		t.Errorf("asked again at once: %v", got)
	}
	if r.of("a", 5, at.Add(time.Minute)) != nil {
		t.Error("the counter began anew, a rate was made of it")
	}
	r.keep(map[string]bool{})
	if len(r.last) != 0 {
		t.Errorf("kept %v", r.last)
	}
}
