package podmon

import (
	"fmt"
	"path"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podmon/seccomp"
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer/configs"
)

// containerConfig says to libcontainer what the agent said to us.
func (s *Supervisor) containerConfig(spec *api.Container, sb *sandbox) (*configs.Config, error) {
	pod := &sb.status.Sandbox
	if err := validIDs(spec, pod.Users); err != nil {
		return nil, err
	}
	res := containerResources(spec)
	target, err := s.target(spec)
	if err != nil {
		return nil, err
	}
	cfg := &configs.Config{
		Rootfs:          spec.Rootfs,
		Readonlyfs:      spec.ReadonlyRootfs,
		RootPropagation: rootPropagation(spec.Mounts),
		Namespaces:      namespaces(sb, target),
		NoNewPrivileges: spec.NoNewPrivileges,
		MaskPaths:       spec.MaskedPaths,
		ReadonlyPaths:   spec.ReadonlyPaths,
		Cgroups:         &cgroups.Cgroup{Path: path.Join(pod.CgroupParent, spec.ID), Resources: res},
		Devices:         standardDevices(),
	}
	shm := s.shmSource(pod)
	if cfg.Mounts, err = mounts(spec, shm); err != nil {
		return nil, err
	}
	joinUsers(cfg, sb, shm, spec.Mounts)
	if spec.Privileged {
		all, err := hostDevices()
		if err != nil {
			return nil, err
		}
		cfg.Devices = all
	}
	for _, p := range spec.Devices {
		d, err := hostDevice(p)
		if err != nil {
			return nil, err
		}
		cfg.Devices = append(cfg.Devices, d)
	}
	for _, v := range spec.Volumes {
		d, err := volumeDevice(v)
		if err != nil {
			return nil, err
		}
		if pod.Users != nil && v.Source != v.Destination {
			return nil, invalidf("device %s: a pod with a user namespace has devices of the host at their own paths only, not %s", v.Source, v.Destination)
		}
		cfg.Devices = append(cfg.Devices, d)
	}
	res.Devices = deviceRules(spec.Privileged, cfg.Devices)
	if cfg.Capabilities, err = capabilities(spec); err != nil {
		return nil, err
	}
	if cfg.Seccomp, err = seccompFilter(spec); err != nil {
		return nil, err
	}
	if cfg.Rlimits, err = rlimits(spec.Rlimits); err != nil {
		return nil, err
	}
	if err := s.setHooks(cfg, spec, pod); err != nil {
		return nil, err
	}
	score := clampOOMScore(spec.OOMScoreAdj)
	cfg.OomScoreAdj = &score
	return cfg, nil
}

// target is the first process of the container whose processes spec is to see,
// 0: of none.
func (s *Supervisor) target(spec *api.Container) (pid int, err error) {
	if spec.TargetID == "" {
		return 0, nil
	}
	c, err := s.runningContainer(spec.TargetID)
	if err != nil {
		return 0, fmt.Errorf("target of container %s: %w", spec.Name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.status.Container.SandboxID != spec.SandboxID {
		return 0, invalidf("target of container %s: container %s is of another sandbox", spec.Name, spec.TargetID)
	}
	return c.status.Pid, nil
}

// namespaces: a mount namespace of its own, most others the pause's, and the
// process ids of target if that is not 0.
func namespaces(sb *sandbox, target int) configs.Namespaces {
	pod := &sb.status.Sandbox
	ns := configs.Namespaces{{Type: configs.NEWNS}}
	if pod.NetNS != "" {
		ns.Add(configs.NEWNET, sb.nsPath("net"))
		ns.Add(configs.NEWUTS, sb.nsPath("uts"))
	}
	if !pod.HostIPC {
		ns.Add(configs.NEWIPC, sb.nsPath("ipc"))
	}
	switch {
	case target != 0 && !pod.SharePID && !pod.HostPID:
		ns.Add(configs.NEWPID, fmt.Sprintf("/proc/%d/ns/pid", target))
	case pod.SharePID:
		ns.Add(configs.NEWPID, sb.nsPath("pid"))
	case !pod.HostPID:
		ns.Add(configs.NEWPID, "")
	}
	ns.Add(configs.NEWCGROUP, "")
	return ns
}

// containerCgroup manages a running or just ended container's cgroup.
func (s *Supervisor) containerCgroup(c *container) (cgroups.Manager, error) {
	s.mu.Lock()
	sb := s.sandboxes[c.status.Container.SandboxID]
	s.mu.Unlock()
	if sb == nil {
		return nil, errorf(api.CodeNotFound, "no sandbox %s", c.status.Container.SandboxID)
	}
	return managerAt(path.Join(sb.status.Sandbox.CgroupParent, c.id), &cgroups.Resources{SkipDevices: true})
}

// update sets other limits on a pod's or container's cgroup.
func (s *Supervisor) update(u api.Update) error {
	s.mu.Lock()
	sb := s.sandboxes[u.ID]
	s.mu.Unlock()
	res := resources(u.Resources)
	res.SkipDevices = true
	// A limit below what is in use is refused. (Version 1 does that itself,
	// version 2 would kill.)
	res.MemoryCheckBeforeUpdate = true
	if sb != nil {
		m, err := cgroupManager(sb.status.Sandbox.CgroupParent, u.Resources)
		if err != nil {
			return err
		}
		if err := m.Set(res); err != nil {
			return fmt.Errorf("set pod's limits: %w", err)
		}
		s.mu.Lock()
		sb.status.Sandbox.PodResources = merged(sb.status.Sandbox.PodResources, u.Resources)
		s.mu.Unlock()
		return s.saveSandbox(sb)
	}
	c, err := s.runningContainer(u.ID)
	if err != nil {
		return err
	}
	m, err := s.containerCgroup(c)
	if err != nil {
		return err
	}
	s.mu.Lock()
	bounded := c.status.Container.Resources.MemoryLimit == 0 && u.Resources.MemoryLimit > 0
	s.mu.Unlock()
	if bounded && !c.status.Container.OOMSingleProcess && cgroups.IsCgroup2UnifiedMode() {
		res.Unified = map[string]string{"memory.oom.group": "1"}
	}
	if err := m.Set(res); err != nil {
		return fmt.Errorf("set container's limits: %w", err)
	}
	s.mu.Lock()
	c.status.Container.Resources = merged(c.status.Container.Resources, u.Resources)
	s.mu.Unlock()
	if bounded {
		s.watchOOM(c)
	}
	return s.saveContainer(c)
}

// merged is old with the set fields of u.
func merged(old, u api.Resources) api.Resources {
	set := func(dst *int64, v int64) {
		if v != 0 {
			*dst = v
		}
	}
	if u.CPUShares != 0 {
		old.CPUShares = u.CPUShares
	}
	if u.CPUPeriod != 0 {
		old.CPUPeriod = u.CPUPeriod
	}
	set(&old.CPUQuota, u.CPUQuota)
	set(&old.MemoryLimit, u.MemoryLimit)
	set(&old.PidsLimit, u.PidsLimit)
	if u.CpusetCpus != "" {
		old.CpusetCpus = u.CpusetCpus
	}
	if u.Hugepages != nil {
		old.Hugepages = u.Hugepages
	}
	return old
}

// seccompFilter gives a container's system call filter; nil for none.
func seccompFilter(spec *api.Container) (*configs.Seccomp, error) {
	f, err := seccomp.Filter(spec)
	if err != nil {
		return nil, invalidf("%v", err)
	}
	return f, nil
}
