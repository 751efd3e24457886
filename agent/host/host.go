// Package host looks at the machine before an agent starts on it: swap, the
// version of its cgroups, the addresses it is to be known by, and the directories
// that the agent's parts and their plugins share. What is decided is decided
// from values; Look and Directories alone touch the machine. It keeps nothing.
package host

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
)

// Machine is what a start depends on.
type Machine struct {
	// Swaps are the files and devices that are swapped to.
	Swaps []string
	// CgroupV2: version 2 alone is mounted.
	CgroupV2 bool
	// Addrs are the addresses of the machine's interfaces.
	Addrs []netip.Addr
}

// Where the kernel tells.
const (
	swapsFile   = "/proc/swaps"
	cgroupsFile = "/sys/fs/cgroup/cgroup.controllers"
)

// Look reads what the kernel says now.
func Look() (Machine, error) {
	var m Machine
	text, err := os.ReadFile(swapsFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // a kernel without swap
		return m, fmt.Errorf("what is swapped to: %w", err)
	}
	m.Swaps = swaps(string(text))
	_, err = os.Stat(cgroupsFile)
	m.CgroupV2 = err == nil
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return m, fmt.Errorf("addresses of the interfaces: %w", err)
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			m.Addrs = append(m.Addrs, p.Addr().Unmap())
		}
	}
	return m, nil
}

// swaps are the names in the text of /proc/swaps, which has a line of titles.
func swaps(text string) []string {
	var out []string
	_, rows, _ := strings.Cut(text, "\n")
	for line := range strings.Lines(rows) {
		if f := strings.Fields(line); len(f) > 0 {
			out = append(out, f[0])
		}
	}
	return out
}

// RefuseSwap is the error of a start that swap forbids.
func (m Machine) RefuseSwap() error {
	if len(m.Swaps) == 0 {
		return nil
	}
	return fmt.Errorf("--fail-swap-on: this machine swaps to %s, so what a pod asks for of memory may be on a disk: turn it off (swapoff -a, and its line in /etc/fstab), or leave the flag out",
		strings.Join(m.Swaps, ", "))
}

// Notice is something of the machine that pods are worse off for.
type Notice struct{ Reason, Message string }

// Notices are what whoever looks at the node should know of its machine.
func (m Machine) Notices() []Notice {
	var out []Notice
	if !m.CgroupV2 {
		out = append(out, Notice{"CgroupV1",
			"cgroup v1: memory QoS is not to be had on this machine: what a pod asks for of memory is not kept for it (memory.min), and nothing is slowed down before its limit (memory.high); boot with systemd.unified_cgroup_hierarchy=1 to have cgroup v2"})
	}
	if len(m.Swaps) > 0 {
		out = append(out, Notice{"SwapOn", fmt.Sprintf(
			"this machine swaps to %s: containers with a limit of memory do not, all others may be slow when memory is short; --fail-swap-on refuses to start so",
			strings.Join(m.Swaps, ", "))})
	}
	return out
}

// Folder is a directory below the agent's data directory.
type Folder struct {
	Path string
	Mode fs.FileMode
}

// PodResources holds the socket of package podresources.
const PodResources = "pod-resources"

// folders that are there before any part of the agent starts. They name pods
// and lead to sockets, so no other user of the machine looks into them.
var folders = []Folder{
	{"pods", 0o750},
	{"kubelet/plugins", 0o750},
	{"kubelet/plugins_registry", 0o750},
	{PodResources, 0o750},
}

// Folders makes them, and takes rights away that they should not have.
func Folders(data string) error {
	if err := os.MkdirAll(data, 0o750); err != nil {
		return err
	}
	for _, f := range append([]Folder{{".", 0o750}}, folders...) {
		path := filepath.Join(data, f.Path)
		if err := os.MkdirAll(path, f.Mode); err != nil {
			return err
		}
		st, err := os.Stat(path)
		if err != nil {
			return err
		}
		if more := st.Mode().Perm() &^ f.Mode; more != 0 {
			if err := os.Chmod(path, st.Mode().Perm()&f.Mode); err != nil {
				return err
			}
		}
	}
	return nil
}
