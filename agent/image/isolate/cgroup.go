package isolate

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// mountPoint is where the machine has its cgroups.
var mountPoint = "/sys/fs/cgroup" // another one in a test

// unified reports whether the machine has cgroup v2 alone.
func unified() bool {
	_, err := os.Stat(filepath.Join(mountPoint, "cgroup.controllers"))
	return err == nil
}

// group is the cgroup of one process.
type group struct {
	dirs  []string
	kills string // file that counts what was killed for memory; empty: none
}

// groupDirs are the directories of the cgroup of that path.
func groupDirs(path string) (memory, pids string) {
	if unified() {
		d := filepath.Join(mountPoint, path)
		return d, d
	}
	return filepath.Join(mountPoint, "memory", path), filepath.Join(mountPoint, "pids", path)
}

// makeGroup makes a cgroup with these limits; memory 0: without one.
func makeGroup(path string, memory, processes int64) (_ *group, err error) {
	mem, pids := groupDirs(path)
	g := &group{}
	defer func() {
		if err != nil {
			g.remove()
		}
	}()
	if mem == pids {
		if err := g.make(mem); err != nil {
			return nil, err
		}
		if memory > 0 {
			g.kills = filepath.Join(mem, "memory.events")
			if err := errors.Join(write(mem, "memory.max", memory), optional(write(mem, "memory.swap.max", 0)), optional(write(mem, "memory.oom.group", 1))); err != nil {
				return nil, err
			}
		}
		return g, write(pids, "pids.max", processes)
	}
	if memory > 0 {
		if err := g.make(mem); err != nil {
			return nil, err
		}
		g.kills = filepath.Join(mem, "memory.oom_control")
		if err := errors.Join(write(mem, "memory.limit_in_bytes", memory), optional(write(mem, "memory.memsw.limit_in_bytes", memory))); err != nil {
			return nil, err
		}
	}
	if err := g.make(pids); err != nil {
		return nil, err
	}
	return g, write(pids, "pids.max", processes)
}

// make makes a directory and, on cgroup v2, hands the controllers down to it.
func (g *group) make(dir string) error {
	if unified() {
		rel, err := filepath.Rel(mountPoint, filepath.Dir(dir))
		if err != nil {
			return err
		}
		at := mountPoint
		for part := range strings.SplitSeq(rel, "/") {
			if err := setFile(filepath.Join(at, "cgroup.subtree_control"), "+memory +pids"); err != nil {
				return err
			}
			at = filepath.Join(at, part)
			if err := os.Mkdir(at, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
		}
		if err := setFile(filepath.Join(at, "cgroup.subtree_control"), "+memory +pids"); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	g.dirs = append(g.dirs, dir)
	return nil
}

func write(dir, file string, n int64) error {
	return setFile(filepath.Join(dir, file), strconv.FormatInt(n, 10))
}

// setFile writes to a file of the kernel's.
func setFile(file, text string) error {
	return os.WriteFile(file, []byte(text), 0) //nolint:forbidigo // nothing of it is on a disk
}

// optional is for files that not every kernel has.
func optional(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (g *group) add(pid int) error {
	for _, d := range g.dirs {
		if err := write(d, "cgroup.procs", int64(pid)); err != nil {
			return err
		}
	}
	return nil
}

// deaths says whether the kernel has killed for memory here; own: it was for this
// group's limit, and not because the machine, or a group above, had no more.
func (g *group) deaths() (killed, own bool) {
	if g == nil || g.kills == "" {
		return false, false
	}
	b, err := os.ReadFile(g.kills)
	if err != nil {
		return false, false
	}
	counts := map[string]string{}
	for line := range strings.Lines(string(b)) {
		name, n, _ := strings.Cut(strings.TrimSpace(line), " ")
		counts[name] = n
	}
	killed = some(counts["oom_kill"])
	if reached, v2 := counts["oom"]; v2 {
		return killed, some(reached)
	}
	// On v1 not each way to the limit counts in memory.failcnt.
	dir := filepath.Dir(g.kills)
	return killed, number(dir, "memory.max_usage_in_bytes") >= number(dir, "memory.limit_in_bytes")-nearLimit
}

// nearLimit is how near to its limit the kernel lets a group of cgroup v1 come before it
// kills there, at the most: it charges pages in batches.
const nearLimit = 4 << 20

func number(dir, file string) int64 {
	b, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseInt(string(bytes.TrimSpace(b)), 10, 64)
	return n
}

func some(n string) bool { return n != "" && n != "0" }

// removeTries bounds how often a cgroup is tried to be removed whose process has ended:
// the kernel may still be about to take it out.
const removeTries = 20

func (g *group) remove() error {
	var errs []error
	for _, d := range g.dirs {
		err := unix.Rmdir(d)
		for try := 1; errors.Is(err, unix.EBUSY) && try < removeTries; try++ {
			time.Sleep(time.Millisecond)
			err = unix.Rmdir(d)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove %s: %w", d, err))
		}
	}
	return errors.Join(errs...)
}

// groups numbers the cgroups that this process makes.
var groups atomic.Int64

// groupName is a name that says which process made a cgroup: its ID, and when it started.
func groupName() string {
	pid := os.Getpid()
	return fmt.Sprintf("%d-%d-%d", pid, startOf(pid), groups.Add(1))
}

// startOf is when a process started, in the kernel's ticks; 0: there is none.
func startOf(pid int) uint64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:]) // from the state on, proc_pid_stat(5)
	if len(fields) < 20 {
		return 0
	}
	n, _ := strconv.ParseUint(string(fields[19]), 10, 64)
	return n
}

// makerLives reports whether the process still runs that made a cgroup of that name.
func makerLives(name string) bool {
	var pid int
	var start uint64
	var n int64
	if _, err := fmt.Sscanf(name, "%d-%d-%d", &pid, &start, &n); err != nil {
		return false
	}
	return start != 0 && startOf(pid) == start
}

// sweep removes cgroups below path whose maker has ended, and kills what runs there: a
// process that was taken over may have seen to it that it does not end with its parent.
func sweep(path string) {
	mem, pids := groupDirs(path)
	for _, d := range []string{mem, pids} {
		list, err := os.ReadDir(d)
		if err != nil {
			continue
		}
		for _, e := range list {
			if e.IsDir() && !makerLives(e.Name()) {
				end(filepath.Join(d, e.Name()))
			}
		}
	}
}

// end kills all processes of a cgroup and removes it.
func end(dir string) {
	for range 10 * removeTries {
		if err := unix.Rmdir(dir); !errors.Is(err, unix.EBUSY) {
			return
		}
		kill := filepath.Join(dir, "cgroup.kill") // Linux 5.14, cgroup v2
		if _, err := os.Stat(kill); err == nil {
			_ = setFile(kill, "1")
		} else if b, err := os.ReadFile(filepath.Join(dir, "cgroup.procs")); err == nil {
			for line := range bytes.Lines(b) {
				if pid, err := strconv.Atoi(string(bytes.TrimSpace(line))); err == nil && pid > 1 {
					_ = unix.Kill(pid, unix.SIGKILL)
				}
			}
		}
		time.Sleep(time.Millisecond)
	}
}
