package main

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
)

// helpersPSS sums the proportional set size (proc(5), smaps_rollup) of what is
// in the node's cgroups but the apps: podmon and the pauses.
func (n *node) helpersPSS() (kib float64, err error) {
	procs, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		return 0, err
	}
	for _, p := range procs {
		dir := filepath.Dir(p)
		groups, err := os.ReadFile(p)
		if err != nil || !strings.Contains(string(groups), n.cgroup+"/") {
			continue // it ended, or is not ours
		}
		if comm, err := os.ReadFile(filepath.Join(dir, "comm")); err != nil || strings.TrimSpace(string(comm)) == "box" {
			continue
		}
		pss, err := procKiB(filepath.Join(dir, "smaps_rollup"), "Pss:")
		if err != nil {
			continue
		}
		kib += pss
	}
	return kib, nil
}

// procKiB reads one "Key: 123 kB" line.
func procKiB(path, key string) (float64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if fields := strings.Fields(s.Text()); len(fields) >= 2 && fields[0] == key {
			return strconv.ParseFloat(fields[1], 64)
		}
	}
	return 0, fmt.Errorf("%s has no %s", path, key)
}

func describeMachine() string {
	mem, _ := procKiB("/proc/meminfo", "MemTotal:")
	release, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	load, _ := os.ReadFile("/proc/loadavg")
	busy, _, _ := strings.Cut(string(load), " ")
	return fmt.Sprintf("%d cores, %.0f GiB, Linux %s, load %s", runtime.NumCPU(), mem/1024/1024, strings.TrimSpace(string(release)), busy)
}
