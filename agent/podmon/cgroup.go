package podmon

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/opencontainers/cgroups"
	_ "github.com/opencontainers/cgroups/devices" // lets the managers set device rules
	devices "github.com/opencontainers/cgroups/devices/config"
	"github.com/opencontainers/cgroups/manager"
	"golang.org/x/sys/unix"
)

// ownOOMScore makes podmon and its keeper the last that the kernel kills for
// memory: with them goes more than they use.
const ownOOMScore = -999

// enterCgroup moves this process out of clusterd's cgroup, to one below root;
// its children follow.
func enterCgroup(root string) error {
	if root == "" {
		return nil
	}
	m, err := cgroupManager(path.Join(root, "podmon"), api.Resources{})
	if err != nil {
		return err
	}
	return m.Apply(os.Getpid())
}

// endCgroupsNamed ends and removes the cgroup of a container whose record does
// not tell where it is. All that podmon makes lies below
// Config.CgroupRoot and is named by an id, which no other cgroup is.
func (s *Supervisor) endCgroupsNamed(id string) {
	m, err := cgroupManager(path.Join("/", s.cfg.CgroupRoot, id), api.Resources{})
	if err != nil {
		s.log.Warn("cgroups of a lost record not found", "id", id, "err", err)
		return
	}
	found := map[string]bool{}
	for _, dir := range m.GetPaths() {
		_ = filepath.WalkDir(path.Dir(dir), func(p string, d os.DirEntry, err error) error {
			if err != nil || !d.IsDir() {
				return nil // it has just been removed, or is a file
			}
			if d.Name() != id {
				return nil
			}
			rel, _ := strings.CutPrefix(p, path.Dir(dir))
			found[path.Join("/", s.cfg.CgroupRoot, rel)] = true
			return filepath.SkipDir
		})
	}
	for at := range found {
		m, err := cgroupManager(at, api.Resources{})
		if err == nil {
			err = errors.Join(killCgroup(m), removeCgroupTree(m))
		}
		if err != nil {
			s.log.Warn("cgroup of a lost record stays", "cgroup", at, "err", err)
		}
	}
}

// leaveCgroup undoes enterCgroup after all containers are gone, so that nothing
// stays: back to the hierarchies' roots, the keeper too, and away with the whole
// tree, the class cgroups that the agent weighs included. What holds processes
// of others stays and is an error.
func (s *Supervisor) leaveCgroup() error {
	if s.cfg.CgroupRoot == "" {
		return nil
	}
	tail := path.Join(s.cfg.CgroupRoot, "podmon")
	own, err := cgroupManager(tail, api.Resources{})
	if err != nil {
		return err
	}
	for _, dir := range own.GetPaths() {
		root := strings.TrimSuffix(dir, tail)
		if err := cgroups.WriteCgroupProc(root, os.Getpid()); err != nil {
			return err
		}
		if s.link != nil {
			if err := cgroups.WriteCgroupProc(root, os.Getppid()); err != nil {
				return err
			}
		}
	}
	tree, err := cgroupManager(s.cfg.CgroupRoot, api.Resources{})
	if err != nil {
		return err
	}
	return removeCgroupTree(tree)
}

// cgroupManager manages one cgroup that holds no container (those are
// libcontainer's): a pod's, a pause's, podmon's own.
func cgroupManager(path string, r api.Resources) (cgroups.Manager, error) {
	res := resources(r)
	res.SkipDevices = true
	return managerAt(path, res)
}

// managerAt manages the cgroup at an absolute path. The library looks for every
// hierarchy unless it is given their paths.
func managerAt(cgroup string, res *cgroups.Resources) (cgroups.Manager, error) {
	roots, err := cgroupRoots()
	if err != nil {
		return nil, err
	}
	paths := make(map[string]string, len(roots))
	for controller, root := range roots {
		paths[controller] = path.Join(root, cgroup)
	}
	return manager.NewWithPaths(&cgroups.Cgroup{Path: cgroup, Resources: res}, paths)
}

// cgroupRoots are the hierarchies' mount points by controller, as the library
// names them ("" on cgroup v2).
var cgroupRoots = sync.OnceValues(func() (map[string]string, error) {
	const any = "/any"
	m, err := manager.New(&cgroups.Cgroup{Path: any, Resources: &cgroups.Resources{SkipDevices: true}})
	if err != nil {
		return nil, fmt.Errorf("find the cgroup hierarchies: %w", err)
	}
	roots := map[string]string{}
	for controller, p := range m.GetPaths() {
		roots[controller] = strings.TrimSuffix(p, any)
	}
	return roots, nil
})

// validCgroup refuses what would reach out of the tree.
func validCgroup(p string) error {
	if !path.IsAbs(p) || path.Clean(p) != p || p == "/" {
		return invalidf("cgroup %q: want a clean absolute path below the root", p)
	}
	return nil
}

// resources turns limits into what the cgroup library writes, for both cgroup
// versions. Zero leaves a limit alone.
func resources(r api.Resources) *cgroups.Resources {
	out := &cgroups.Resources{
		CpuShares:  r.CPUShares,
		CpuQuota:   r.CPUQuota,
		CpuPeriod:  r.CPUPeriod,
		Memory:     r.MemoryLimit,
		CpusetCpus: r.CpusetCpus,
	}
	if r.PidsLimit != 0 {
		limit := r.PidsLimit
		out.PidsLimit = &limit
	}
	if hugepagesLimited() {
		for _, size := range slices.Sorted(maps.Keys(r.Hugepages)) {
			out.HugetlbLimit = append(out.HugetlbLimit, &cgroups.HugepageLimit{Pagesize: size, Limit: r.Hugepages[size]})
		}
	}
	if cgroups.IsCgroup2UnifiedMode() {
		out.CpuShares = 0 // version 2 ignores shares
		if r.CPUShares != 0 {
			out.CpuWeight = cgroups.ConvertCPUSharesToCgroupV2Value(r.CPUShares)
		}
		if r.MemoryLimit > 0 {
			out.MemorySwap = r.MemoryLimit // no swap beyond the limit
		}
	} else if r.MemoryLimit > 0 && swapAccounted() {
		out.MemorySwap = r.MemoryLimit
	}
	return out
}

// containerResources adds what only a container's cgroup has.
func containerResources(c *api.Container) *cgroups.Resources {
	r := resources(c.Resources)
	if cgroups.IsCgroup2UnifiedMode() && c.Resources.MemoryLimit > 0 && !c.OOMSingleProcess {
		// A container out of memory dies as a whole, not one process of it. On
		// version 1 watchOOM sees to it.
		r.Unified = map[string]string{"memory.oom.group": "1"}
	}
	return r
}

// hugepagesLimited tells whether the kernel's hugetlb controller is there.
var hugepagesLimited = sync.OnceValue(func() bool {
	if !cgroups.IsCgroup2UnifiedMode() {
		_, err := os.Stat("/sys/fs/cgroup/hugetlb")
		return err == nil
	}
	b, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
	return err == nil && slices.Contains(strings.Fields(string(b)), "hugetlb")
})

// swapAccounted tells whether cgroup v1 counts swap on this kernel.
func swapAccounted() bool {
	_, err := os.Stat("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes")
	return err == nil
}

// killCgroup kills every process of m's cgroup and those below, and waits until
// it is empty.
func killCgroup(m cgroups.Manager) error {
	if unified := m.Path(""); unified != "" {
		// One write for all of them, where the kernel has it.
		_ = cgroups.WriteFile(unified, "cgroup.kill", "1")
	}
	deadline := time.Now().Add(10 * time.Second)
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		pids, err := processesOf(m)
		if err != nil {
			return err
		}
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		if time.Now().After(deadline) {
			return errorf(api.CodeBusy, "cgroup still has %d processes after SIGKILL, the first is %d", len(pids), pids[0])
		}
		time.Sleep(pause)
	}
}

// processesOf lists the processes of m's cgroup and those below, in any
// hierarchy: one that was killed half way through a move is only in some.
func processesOf(m cgroups.Manager) ([]int, error) {
	var all []int
	for _, dir := range m.GetPaths() {
		pids, err := cgroups.GetAllPids(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ENODEV) {
			return nil, err
		}
		all = append(all, pids...)
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// removeIdleCgroup removes m's cgroup if nothing is in it or below it, and says
// whether it is gone: the usual end of a pod, whose containers went before. The
// kernel refuses it otherwise, in that hierarchy; to look for processes in all of
// them first takes longer than the removal.
func removeIdleCgroup(m cgroups.Manager) bool {
	gone := true
	for _, dir := range m.GetPaths() {
		if err := unix.Rmdir(dir); err != nil && err != unix.ENOENT {
			gone = false
		}
	}
	return gone
}

// removeCgroupTree removes m's cgroup and every empty one below it, in all
// hierarchies. It tries again for a moment while the kernel is still busy.
func removeCgroupTree(m cgroups.Manager) error { return m.Destroy() }

// deviceRules are the cgroup rules of a container: everything for a privileged
// one; otherwise nodes may be made but only the harmless ones opened, and
// extra as they are.
func deviceRules(privileged bool, nodes []*devices.Device) []*devices.Rule {
	if privileged {
		return []*devices.Rule{{Type: devices.WildcardDevice, Major: devices.Wildcard, Minor: devices.Wildcard, Permissions: "rwm", Allow: true}}
	}
	rules := []*devices.Rule{
		{Type: devices.WildcardDevice, Major: devices.Wildcard, Minor: devices.Wildcard, Permissions: "rwm", Allow: false},
		{Type: devices.CharDevice, Major: devices.Wildcard, Minor: devices.Wildcard, Permissions: "m", Allow: true},
		{Type: devices.BlockDevice, Major: devices.Wildcard, Minor: devices.Wildcard, Permissions: "m", Allow: true},
		{Type: devices.CharDevice, Major: 136, Minor: devices.Wildcard, Permissions: "rwm", Allow: true}, // /dev/pts/*
		{Type: devices.CharDevice, Major: 5, Minor: 2, Permissions: "rwm", Allow: true},                  // /dev/ptmx
	}
	for _, n := range nodes {
		if n.Permissions != "" {
			rules = append(rules, &n.Rule)
		}
	}
	return rules
}

// isHostPath tells whether p looks like a path and not like a name.
func isHostPath(p string) bool { return strings.HasPrefix(p, "/") }
