// Package stats measures what the node, its pods and their containers use, and
// says it in the form that tools know (the summary API). It reads cgroups and
// folders and changes nothing.
package stats

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Usage is what a cgroup uses.
type Usage struct {
	CPU        uint64 // nanoseconds of processor time since it was made
	Memory     uint64 // bytes, page cache included
	WorkingSet uint64 // bytes that cannot be taken back at once: Memory without inactive file pages
	RSS        uint64 // bytes of anonymous memory
	MajorFault uint64
	PageFaults uint64
	Pids       uint64
}

// Cgroups reads cgroups below a mount point, usually /sys/fs/cgroup.
type Cgroups struct{ Mount string }

// Read measures a cgroup, such as "/clusterd/burstable/podUID", and all below
// it. The error is os.ErrNotExist when there is none.
func (c Cgroups) Read(group string) (Usage, error) {
	if _, err := os.Stat(filepath.Join(c.Mount, "cgroup.controllers")); err == nil {
		return c.readV2(group)
	}
	return c.readV1(group)
}

func (c Cgroups) readV2(group string) (Usage, error) {
	dir := filepath.Join(c.Mount, group)
	var u Usage
	cpu, err := readFields(filepath.Join(dir, "cpu.stat"))
	if err != nil {
		return u, err
	}
	memory, err := readFields(filepath.Join(dir, "memory.stat"))
	if err != nil {
		return u, err
	}
	if u.Memory, err = readNumber(filepath.Join(dir, "memory.current")); err != nil {
		return u, err
	}
	u.CPU = cpu["usage_usec"] * 1000
	u.RSS, u.PageFaults, u.MajorFault = memory["anon"], memory["pgfault"], memory["pgmajfault"]
	u.WorkingSet = u.Memory - min(u.Memory, memory["inactive_file"])
	u.Pids, err = readNumber(filepath.Join(dir, "pids.current"))
	return u, err
}

func (c Cgroups) readV1(group string) (Usage, error) {
	var u Usage
	var err error
	if u.CPU, err = readNumber(filepath.Join(c.Mount, "cpuacct", group, "cpuacct.usage")); err != nil {
		return u, err
	}
	dir := filepath.Join(c.Mount, "memory", group)
	memory, err := readFields(filepath.Join(dir, "memory.stat"))
	if err != nil {
		return u, err
	}
	if u.Memory, err = readNumber(filepath.Join(dir, "memory.usage_in_bytes")); err != nil {
		return u, err
	}
	u.RSS, u.PageFaults, u.MajorFault = memory["total_rss"], memory["total_pgfault"], memory["total_pgmajfault"]
	u.WorkingSet = u.Memory - min(u.Memory, memory["total_inactive_file"])
	u.Pids, err = pidsV1(filepath.Join(c.Mount, "pids", group))
	return u, err
}

// pidsV1 counts the processes; the roots of hierarchies do not tell.
func pidsV1(dir string) (uint64, error) {
	n, err := readNumber(filepath.Join(dir, "pids.current"))
	if os.IsNotExist(err) {
		if _, serr := os.Stat(dir); serr == nil {
			return 0, nil
		}
	}
	return n, err
}

func readNumber(file string) (uint64, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", file, err)
	}
	return n, nil
}

// readFields reads lines of a name and a number.
func readFields(file string) (map[string]uint64, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	out := map[string]uint64{}
	for line := range strings.Lines(string(b)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if n, err := strconv.ParseUint(value, 10, 64); err == nil {
			out[name] = n
		}
	}
	return out, nil
}
