package stats

import (
	"context"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	summary "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
	"k8s.io/utils/ptr"
)

// Pod is what has to be known of a pod to measure it.
type Pod struct {
	Namespace, Name, UID string
	Started              time.Time
	Cgroup               string // "/clusterd/burstable/podUID"
	Pid                  int    // of its pause; 0: none
	HostNetwork          bool
	LogDir, Dir          string // folders of its logs and of its volumes
	Containers           []Container
}

// Container is a running one.
type Container struct {
	Name, ID string
	Image    string // as its status names it
	Started  time.Time
	Written  string // the directory of what it has changed in its root file system
	LogDir   string
}

// Config of a Collector.
type Config struct {
	NodeName  string
	Cgroups   Cgroups
	Root      string // the cgroup of all pods: "/clusterd"
	NodeDir   string // on the file system of pods
	ImageDir  string // on the file system of images
	BootTime  time.Time
	MemoryOf  func() (available, capacity int64) // the node's, bytes
	Pods      func(ctx context.Context) ([]Pod, error)
	Processes func() (running, limit int64)
	// Volumes tells what CSI drivers know of a pod's volumes; nil:
	// nothing.
	Volumes func(ctx context.Context, podUID string) []Volume
}

// Volume is one of a pod that its driver measures.
type Volume struct {
	Name  string // the pod's own for it
	Claim string // "": it has none
	// In bytes and inodes; a total of 0 is not known.
	Total, Available, Used, InodesTotal, InodesAvailable, InodesUsed int64
}

// volumes are a pod's in the summary's words.
func (c *Collector) volumes(ctx context.Context, p Pod) []summary.VolumeStats {
	if c.cfg.Volumes == nil {
		return nil
	}
	var out []summary.VolumeStats
	for _, v := range c.cfg.Volumes(ctx, p.UID) {
		one := summary.VolumeStats{Name: v.Name, FsStats: summary.FsStats{Time: metav1.Now()}}
		if v.Claim != "" {
			one.PVCRef = &summary.PVCReference{Name: v.Claim, Namespace: p.Namespace}
		}
		if v.Total > 0 {
			one.CapacityBytes, one.AvailableBytes, one.UsedBytes = ptr.To(uint64(v.Total)), ptr.To(uint64(max(v.Available, 0))), ptr.To(uint64(max(v.Used, 0)))
		}
		if v.InodesTotal > 0 {
			one.Inodes, one.InodesFree, one.InodesUsed = ptr.To(uint64(v.InodesTotal)), ptr.To(uint64(max(v.InodesAvailable, 0))), ptr.To(uint64(max(v.InodesUsed, 0)))
		}
		out = append(out, one)
	}
	return out
}

// Collector measures on demand; it keeps only what rates are made of. Its
// methods may be called concurrently.
type Collector struct {
	cfg   Config
	rates rates
}

// New returns a Collector.
func New(cfg Config) *Collector { return &Collector{cfg: cfg} }

// Use is what one pod uses, for who has to choose between pods.
func (c *Collector) Use(ctx context.Context, p Pod) (memory Usage, disk Disk, err error) {
	if memory, err = c.cfg.Cgroups.Read(p.Cgroup); err != nil {
		return memory, disk, err
	}
	disk, err = DiskUse(ctx, p.folders()...)
	return memory, disk, err
}

func (p Pod) folders() []string {
	dirs := []string{p.LogDir, p.Dir}
	for _, c := range p.Containers {
		dirs = append(dirs, c.Written)
	}
	return dirs
}

// Summary measures the node and all pods on it. Without disks, onlyCPUAndMemory,
// it is much cheaper.
func (c *Collector) Summary(ctx context.Context, onlyCPUAndMemory bool) (*summary.Summary, error) {
	pods, err := c.cfg.Pods(ctx)
	if err != nil {
		return nil, fmt.Errorf("list the node's pods: %w", err)
	}
	out := &summary.Summary{Node: c.node(), Pods: []summary.PodStats{}}
	alive := map[string]bool{c.cfg.Root: true}
	for _, p := range pods {
		use, err := c.cfg.Cgroups.Read(p.Cgroup)
		if err != nil {
			continue // it is being made, or gone
		}
		alive[p.Cgroup] = true
		now := metav1.Now()
		st := summary.PodStats{
			PodRef:    summary.PodReference{Name: p.Name, Namespace: p.Namespace, UID: p.UID},
			StartTime: metav1.NewTime(p.Started), Containers: []summary.ContainerStats{},
			CPU: c.cpu(p.Cgroup, use, now), Memory: memoryStats(use, now, nil),
			ProcessStats: &summary.ProcessStats{ProcessCount: ptr.To(use.Pids)},
		}
		if p.Pid > 0 && !p.HostNetwork {
			st.Network = network(fmt.Sprintf("/proc/%d/net/dev", p.Pid), now)
		}
		var total Disk
		for _, ct := range p.Containers {
			group := path.Join(p.Cgroup, ct.ID)
			use, err := c.cfg.Cgroups.Read(group)
			if err != nil {
				continue
			}
			alive[group] = true
			now := metav1.Now()
			cs := summary.ContainerStats{Name: ct.Name, StartTime: metav1.NewTime(ct.Started), CPU: c.cpu(group, use, now), Memory: memoryStats(use, now, nil)}
			if !onlyCPUAndMemory {
				cs.Rootfs, cs.Logs = c.used(ctx, c.cfg.ImageDir, ct.Written, &total), c.used(ctx, c.cfg.NodeDir, ct.LogDir, &total)
			}
			st.Containers = append(st.Containers, cs)
		}
		if !onlyCPUAndMemory {
			st.VolumeStats = c.volumes(ctx, p)
			c.used(ctx, c.cfg.NodeDir, p.Dir, &total)
			st.EphemeralStorage = fileSystem(c.cfg.NodeDir)
			if st.EphemeralStorage != nil {
				st.EphemeralStorage.UsedBytes, st.EphemeralStorage.InodesUsed = ptr.To(uint64(total.Bytes)), ptr.To(uint64(total.Inodes))
			}
		}
		out.Pods = append(out.Pods, st)
	}
	c.rates.keep(alive)
	return out, nil
}

func (c *Collector) node() summary.NodeStats {
	now := metav1.Now()
	n := summary.NodeStats{NodeName: c.cfg.NodeName, StartTime: metav1.NewTime(c.cfg.BootTime), Network: network("/proc/net/dev", now)}
	if busy, err := busyTime("/proc/stat"); err == nil {
		n.CPU = c.cpu("node", Usage{CPU: uint64(busy)}, now)
	}
	if c.cfg.MemoryOf != nil {
		available, capacity := c.cfg.MemoryOf()
		used := uint64(capacity - available)
		n.Memory = &summary.MemoryStats{Time: now, AvailableBytes: ptr.To(uint64(available)), UsageBytes: &used, WorkingSetBytes: &used}
	}
	n.Fs = fileSystem(c.cfg.NodeDir)
	n.Runtime = &summary.RuntimeStats{ImageFs: fileSystem(c.cfg.ImageDir)}
	if c.cfg.Processes != nil {
		running, limit := c.cfg.Processes()
		n.Rlimit = &summary.RlimitStats{Time: now, MaxPID: &limit, NumOfRunningProcesses: &running}
	}
	if use, err := c.cfg.Cgroups.Read(c.cfg.Root); err == nil {
		n.SystemContainers = []summary.ContainerStats{{Name: summary.SystemContainerPods, StartTime: n.StartTime,
			CPU: c.cpu(c.cfg.Root, use, now), Memory: memoryStats(use, now, nil)}}
	}
	return n
}

func (c *Collector) cpu(key string, u Usage, now metav1.Time) *summary.CPUStats {
	return &summary.CPUStats{Time: now, UsageCoreNanoSeconds: ptr.To(u.CPU), UsageNanoCores: c.rates.of(key, u.CPU, now.Time)}
}

func memoryStats(u Usage, now metav1.Time, available *uint64) *summary.MemoryStats {
	return &summary.MemoryStats{Time: now, AvailableBytes: available, UsageBytes: &u.Memory, WorkingSetBytes: &u.WorkingSet,
		RSSBytes: &u.RSS, PageFaults: &u.PageFaults, MajorPageFaults: &u.MajorFault}
}

// used measures a directory on a file system and adds it to total.
func (c *Collector) used(ctx context.Context, on, dir string, total *Disk) *summary.FsStats {
	st := fileSystem(on)
	d, err := DiskUse(ctx, dir)
	if err != nil || st == nil {
		return st
	}
	total.Bytes += d.Bytes
	total.Inodes += d.Inodes
	st.UsedBytes, st.InodesUsed = ptr.To(uint64(d.Bytes)), ptr.To(uint64(d.Inodes))
	return st
}

func fileSystem(dir string) *summary.FsStats {
	st, err := FileSystem(dir)
	if err != nil {
		return nil
	}
	size := uint64(st.Bsize)
	return &summary.FsStats{Time: metav1.Now(), CapacityBytes: ptr.To(st.Blocks * size), AvailableBytes: ptr.To(st.Bavail * size),
		UsedBytes: ptr.To((st.Blocks - st.Bfree) * size), Inodes: ptr.To(st.Files), InodesFree: ptr.To(st.Ffree), InodesUsed: ptr.To(st.Files - st.Ffree)}
}

// network tells what went over a network namespace's interfaces.
func network(file string, now metav1.Time) *summary.NetworkStats {
	list, err := interfaces(file)
	if err != nil {
		return nil
	}
	out := &summary.NetworkStats{Time: now}
	for _, i := range list {
		out.Interfaces = append(out.Interfaces, summary.InterfaceStats{Name: i.name,
			RxBytes: &i.rx.bytes, RxErrors: &i.rx.errors, TxBytes: &i.tx.bytes, TxErrors: &i.tx.errors})
		if i.name == "eth0" {
			out.InterfaceStats = out.Interfaces[len(out.Interfaces)-1]
		}
	}
	return out
}

// busyTime is how long the machine's processors have worked (proc(5), stat).
func busyTime(file string) (time.Duration, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(b), "\n")
	fields := strings.Fields(line)
	if len(fields) < 9 || fields[0] != "cpu" {
		return 0, fmt.Errorf("%s is not as proc(5) says", file)
	}
	var ticks uint64
	for i, f := range fields[1:9] {
		if i == 3 || i == 4 { // idle, iowait
			continue
		}
		n, err := strconv.ParseUint(f, 10, 64)
		if err != nil {
			return 0, err
		}
		ticks += n
	}
	return time.Duration(ticks) * (time.Second / 100), nil // USER_HZ is 100 on all we run on
}
