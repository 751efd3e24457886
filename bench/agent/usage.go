package main

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// cgroupDirs are the directories of a cgroup in every hierarchy, version 1's
// controllers or version 2's only one.
func cgroupDirs(cgroup string) []string {
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		return []string{"/sys/fs/cgroup" + cgroup}
	}
	var dirs []string
	roots, _ := filepath.Glob("/sys/fs/cgroup/*")
	for _, r := range roots {
		if _, err := os.Stat(r + "/cgroup.procs"); err == nil {
			dirs = append(dirs, r+cgroup)
		}
	}
	return dirs
}

// cgroupCPU is the processor time that a cgroup and all below it have used.
func cgroupCPU(cgroup string) (time.Duration, error) {
	b, err := os.ReadFile("/sys/fs/cgroup/cpuacct" + cgroup + "/cpuacct.usage")
	if err == nil {
		ns, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
		return time.Duration(ns), err
	}
	if b, err = os.ReadFile("/sys/fs/cgroup" + cgroup + "/cpu.stat"); err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if us, ok := strings.CutPrefix(line, "usage_usec "); ok {
			n, err := strconv.ParseInt(strings.TrimSpace(us), 10, 64)
			return time.Duration(n) * time.Microsecond, err
		}
	}
	return 0, fmt.Errorf("cgroup %s does not say what it has used", cgroup)
}

// ownCPU is this process's processor time, that of its ended children included.
func ownCPU() (time.Duration, error) {
	var sum time.Duration
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var u unix.Rusage
		if err := unix.Getrusage(who, &u); err != nil {
			return 0, err
		}
		sum += time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	return sum, nil
}

// cgroupPSS sums the proportional set size (proc(5), smaps_rollup) of what is
// in the cgroup and below but the apps.
func cgroupPSS(cgroup string) (kib float64, err error) {
	procs, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		return 0, err
	}
	for _, p := range procs {
		dir := filepath.Dir(p)
		groups, err := os.ReadFile(p)
		if err != nil || !strings.Contains(string(groups), cgroup+"/") {
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

// removeCgroup takes a cgroup away with all that is below it; false: something
// still runs there.
func removeCgroup(cgroup string) bool {
	gone := true
	for _, root := range cgroupDirs(cgroup) {
		var dirs []string
		_ = filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, p)
			}
			return nil
		})
		for i := len(dirs) - 1; i >= 0; i-- { // the deepest first
			if err := unix.Rmdir(dirs[i]); err != nil && !errors.Is(err, unix.ENOENT) {
				gone = false
			}
		}
	}
	return gone
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
