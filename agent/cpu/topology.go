// Package cpu implements the static CPU manager policy: exclusive CPUs for containers of
// Guaranteed pods. It holds the CPU topology of the machine, the assignments, and the
// shared pool. It writes no cgroup; the pod manager does that.
package cpu

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"k8s.io/utils/cpuset"
)

// CPU is one logical processor and where it is.
type CPU struct {
	ID     int
	Core   int // cores of different sockets may have the same number
	Socket int
	Node   int // of memory (NUMA)
}

// Topology are the processors that are online, by ID.
type Topology map[int]CPU

// All are the processors' numbers.
func (t Topology) All() cpuset.CPUSet {
	ids := make([]int, 0, len(t))
	for id := range t {
		ids = append(ids, id)
	}
	return cpuset.New(ids...)
}

// Discover reads the topology from a sysfs mounted at root, usually "/sys"
// (Documentation/ABI/stable/sysfs-devices-system-cpu). What the kernel does not
// tell counts as 0.
func Discover(root string) (Topology, error) {
	dir := filepath.Join(root, "devices/system")
	b, err := os.ReadFile(filepath.Join(dir, "cpu/online"))
	if err != nil {
		return nil, fmt.Errorf("list the processors: %w", err)
	}
	online, err := cpuset.Parse(strings.TrimSpace(string(b)))
	if err != nil {
		return nil, fmt.Errorf("list the processors: cpu/online: %w", err)
	}
	t := Topology{}
	for _, id := range online.List() {
		at := filepath.Join(dir, "cpu", "cpu"+strconv.Itoa(id), "topology")
		t[id] = CPU{ID: id, Core: number(filepath.Join(at, "core_id")), Socket: number(filepath.Join(at, "physical_package_id"))}
	}
	nodes, err := filepath.Glob(filepath.Join(dir, "node/node[0-9]*/cpulist"))
	if err != nil {
		return nil, err
	}
	for _, file := range nodes {
		node, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(filepath.Dir(file)), "node"))
		if err != nil {
			continue
		}
		b, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("processors of memory node %d: %w", node, err)
		}
		of, err := cpuset.Parse(strings.TrimSpace(string(b)))
		if err != nil {
			return nil, fmt.Errorf("processors of memory node %d: %w", node, err)
		}
		for _, id := range of.List() {
			if c, ok := t[id]; ok {
				c.Node = node
				t[id] = c
			}
		}
	}
	return t, nil
}

func number(file string) int {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || n < 0 { // -1: unknown
		return 0
	}
	return n
}
