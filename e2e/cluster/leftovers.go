package cluster

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/moby/sys/mountinfo"
	"github.com/vishvananda/netlink"
)

// Census counts what clusterd could leave behind on a machine: mounts,
// cgroups, interfaces, network rules, processes. Taken before and after, the
// difference must be empty.
type Census map[string]bool

// TakeCensus looks at the machine, in the caller's network namespace.
func TakeCensus() (Census, error) {
	c := Census{}
	for _, take := range []func(Census) error{censusMounts, censusCgroups, censusLinks, censusTables, censusProcesses} {
		if err := take(c); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// Since returns what is there now and was not before, sorted.
func (c Census) Since(before Census) []string {
	var left []string
	for what := range c {
		if !before[what] {
			left = append(left, what)
		}
	}
	slices.Sort(left)
	return left
}

// Remains lists what is on the machine now and bears one of the marks, see
// Netns.Marks.
func Remains(marks ...string) ([]string, error) {
	census, err := TakeCensus()
	if err != nil {
		return nil, err
	}
	if err := eachProcess(func(comm, mark string) { census["process "+mark+": "+comm] = true }); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(census.Since(nil), func(what string) bool {
		return !slices.ContainsFunc(marks, func(m string) bool { return strings.Contains(what, m) })
	}), nil
}

// staysFor is how long what ends may take to be gone.
const staysFor = 10 * time.Second

// Stays lists what Remains does and is there still after staysFor: a process that was
// killed takes a moment on a busy machine.
func Stays(marks ...string) (left []string, err error) {
	for end := time.Now().Add(staysFor); ; time.Sleep(50 * time.Millisecond) {
		if left, err = Remains(marks...); err != nil || len(left) == 0 || time.Now().After(end) {
			return left, err
		}
	}
}

func censusMounts(c Census) error {
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return err
	}
	for _, m := range mounts {
		c["mount "+m.Mountpoint] = true
	}
	return nil
}

func censusCgroups(c Census) error {
	return filepath.WalkDir("/sys/fs/cgroup", func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() {
			c["cgroup "+path] = true
		}
		return nil
	})
}

func censusLinks(c Census) error {
	links, err := listLinks()
	if err != nil {
		return err
	}
	for _, l := range links {
		c["interface "+l.Attrs().Name] = true
	}
	return nil
}

func listLinks() ([]netlink.Link, error) {
	links, err := netlink.LinkList()
	for errors.Is(err, netlink.ErrDumpInterrupted) { // something came or went meanwhile
		links, err = netlink.LinkList()
	}
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	return links, nil
}

func censusTables(c Census) error {
	conn, err := nftables.New()
	if err != nil {
		return err
	}
	tables, err := conn.ListTables()
	if err != nil {
		return fmt.Errorf("list nftables: %w", err)
	}
	for _, t := range tables {
		c["nft table "+t.Name] = true
	}
	return nil
}

func censusProcesses(c Census) error {
	return eachProcess(func(comm, mark string) {
		switch comm {
		case "clusterd", "podmon", "podmon-keeper", "pause-maker", "pause", "hello":
			c["process "+mark+": "+comm] = true
		}
	})
}

func eachProcess(see func(comm, mark string)) error {
	return eachPid(func(pid int) {
		started, err := startTime(pid)
		if err != nil {
			return
		}
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		see(strings.TrimSpace(string(name)), processMark(pid, started))
	})
}

// processMark names a process for all time: its pid may be used again, but
// not with the same start.
func processMark(pid int, started string) string {
	return fmt.Sprintf("%d started at %s", pid, started)
}
