// Package proc reads from /proc what the processes of a benchmark have used.
package proc

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Usage is what processes have used since they began, and hold now.
type Usage struct {
	RSS     float64 // bytes
	File    float64 // bytes of RSS that are pages of files: the program's, mostly
	Wakeups float64 // voluntary context switches
	Written float64 // bytes, to disk
	CPU     time.Duration
}

// Nodes knows the processes of machines: *cluster.Netns.
type Nodes interface {
	Processes(node string) ([]int, error)
}

// Of adds up clusterd and podmon of a node.
func Of(nodes Nodes, node string) (Usage, error) {
	var sum Usage
	pids, err := nodes.Processes(node)
	if err != nil {
		return sum, err
	}
	for _, pid := range pids {
		u, err := One(pid)
		if err != nil {
			return sum, fmt.Errorf("process %d of %s: %w", pid, node, err)
		}
		sum.File += u.File
		sum.RSS, sum.Wakeups, sum.Written, sum.CPU = sum.RSS+u.RSS, sum.Wakeups+u.Wakeups, sum.Written+u.Written, sum.CPU+u.CPU
	}
	return sum, nil
}

// ticks is the unit of processor times in /proc, 1/100 s on all of Linux'
// architectures for programs.
const ticks = 10 * time.Millisecond

// One is what one process has used.
func One(pid int) (u Usage, err error) {
	dir := fmt.Sprintf("/proc/%d", pid)
	stat, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return u, err
	}
	// After the name, which may hold anything: fields from the third on.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 22 {
		return u, fmt.Errorf("%s/stat has %d fields", dir, len(fields)+2)
	}
	var user, system, pages int64
	if _, err := fmt.Sscan(fields[11]+" "+fields[12]+" "+fields[21], &user, &system, &pages); err != nil {
		return u, err
	}
	u.CPU, u.RSS = time.Duration(user+system)*ticks, float64(pages)*float64(os.Getpagesize())
	for _, kind := range []string{"RssFile:", "RssShmem:"} { // a program in memory (memfd) is of the latter
		kib, err := named(dir+"/status", kind)
		if err != nil {
			return u, err
		}
		u.File += kib * 1024
	}
	if u.Written, err = named(dir+"/io", "write_bytes:"); err != nil {
		return u, err
	}
	tasks, err := filepath.Glob(dir + "/task/*/status")
	if err != nil {
		return u, err
	}
	for _, t := range tasks {
		n, err := named(t, "voluntary_ctxt_switches:")
		if errors.Is(err, os.ErrNotExist) {
			continue // the thread has ended
		}
		if err != nil {
			return u, err
		}
		u.Wakeups += n
	}
	return u, nil
}

// named is the number of a line NAME NUMBER of a file.
func named(file, name string) (n float64, err error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			_, err := fmt.Sscan(rest, &n)
			return n, err
		}
	}
	return 0, fmt.Errorf("%s has no %s", file, name)
}

// CPU is the processor time that all threads of a process have had, those that
// have ended too, to the nanosecond where the kernel counts so.
func CPU(pid int) (time.Duration, error) {
	var t unix.Timespec
	// The clock of another process, as clock_getcpuclockid(3) makes its number.
	if err := unix.ClockGettime(int32(^pid)<<3|2, &t); err != nil {
		return 0, fmt.Errorf("processor time of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
}
