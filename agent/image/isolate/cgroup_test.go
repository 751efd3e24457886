package isolate

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestRootSweep: what outlived the process that made its cgroup is killed; what has a
// maker stays.
func TestRootSweep(t *testing.T) {
	r := newRunner(t, nil)
	sleeper := func(name string) (*exec.Cmd, *group) {
		t.Helper()
		g, err := makeGroup(filepath.Join(r.cfg.Cgroup, name), 64<<20, 64)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("sleep", "1000")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait(); _ = g.remove() })
		if err := g.add(cmd.Process.Pid); err != nil {
			t.Fatal(err)
		}
		return cmd, g
	}
	pid := os.Getpid()
	stays, its := sleeper(groupName())
	for _, name := range []string{
		"1999999999-5-1", // there is no such process
		fmt.Sprintf("%d-%d-1", pid, startOf(pid)+1), // another process had the number before
		fmt.Sprintf("%d-1", pid),                    // as it was named before
	} {
		dies, g := sleeper(name)
		sweep(r.cfg.Cgroup)
		if err := dies.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
			t.Errorf("%s: %v", name, err)
		}
		sweep(r.cfg.Cgroup) // the parent has waited for it only now
		for _, d := range g.dirs {
			if _, err := os.Stat(d); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s is left: %v", d, err)
			}
		}
	}
	if err := stays.Process.Signal(unix.Signal(0)); err != nil {
		t.Errorf("one with a maker: %v", err)
	}
	if b, err := os.ReadFile(filepath.Join(its.dirs[0], "cgroup.procs")); err != nil || !strings.Contains(string(b), fmt.Sprint(stays.Process.Pid)) {
		t.Errorf("its cgroup: %q %v", b, err)
	}
}

// TestDeathsOfV1: cgroup v1 counts kills, and knows how near to its limit the group came.
func TestDeathsOfV1(t *testing.T) {
	dir := t.TempDir()
	g := &group{kills: filepath.Join(dir, "memory.oom_control")}
	const limit = 512 << 20
	for _, tt := range []struct {
		kills       string
		most        int64
		killed, own bool
	}{{"0", limit, false, true}, {"1", limit, true, true}, {"1", limit - 100<<10, true, true}, {"1", 100 << 20, true, false}} {
		err := errors.Join(
			os.WriteFile(g.kills, []byte("oom_kill_disable 0\nunder_oom 0\noom_kill "+tt.kills+"\n"), 0o644),
			os.WriteFile(filepath.Join(dir, "memory.limit_in_bytes"), fmt.Appendln(nil, limit), 0o644),
			os.WriteFile(filepath.Join(dir, "memory.max_usage_in_bytes"), fmt.Appendln(nil, tt.most), 0o644))
		if err != nil {
			t.Fatal(err)
		}
		if killed, own := g.deaths(); killed != tt.killed || own != tt.own {
			t.Errorf("%+v: %v %v", tt, killed, own)
		}
	}
	if err := (&ExitError{Machine: true}); !strings.Contains(err.Error(), "the machine has no more memory") {
		t.Error(err)
	}
}
