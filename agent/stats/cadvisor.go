package stats

import (
	"context"
	"fmt"
	"path"
	"runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"
)

// Containers collects what /metrics/cadvisor serves: the container_ series by
// which the usual dashboards draw containers. There is a row per container, a
// row per pod (container and image empty; it has the network's figures), and
// one for the machine, whose id is "/". Nothing is measured between requests,
// and directories at most once a minute.
type Containers struct {
	c     *Collector
	disks *diskCache
}

// Containers returns the collector of /metrics/cadvisor.
func (c *Collector) Containers() Containers {
	return Containers{c, &diskCache{known: map[string]diskReading{}}}
}

// identity is the labels that all container_ series have.
var identity = []string{"container", "id", "image", "name", "namespace", "pod"}

func with(label ...string) []string { return append(append([]string{}, identity...), label...) }

var (
	containerCPU       = counter("container_cpu_usage_seconds_total", "Cumulative cpu time consumed in seconds.", with("cpu")...)
	containerUser      = counter("container_cpu_user_seconds_total", "Cumulative user cpu time consumed in seconds.", identity...)
	containerSystem    = counter("container_cpu_system_seconds_total", "Cumulative system cpu time consumed in seconds.", identity...)
	containerPeriods   = counter("container_cpu_cfs_periods_total", "Number of elapsed enforcement period intervals.", identity...)
	containerThrottled = counter("container_cpu_cfs_throttled_periods_total", "Number of throttled period intervals.", identity...)
	throttledSeconds   = counter("container_cpu_cfs_throttled_seconds_total", "Total time duration the container has been throttled.", identity...)

	containerMemory     = gauge("container_memory_usage_bytes", "Current memory usage in bytes, including all memory regardless of when it was accessed.", identity...)
	containerWorkingSet = gauge("container_memory_working_set_bytes", "Current working set in bytes.", identity...)
	containerRSS        = gauge("container_memory_rss", "Size of RSS in bytes.", identity...)
	containerCache      = gauge("container_memory_cache", "Number of bytes of page cache memory.", identity...)
	containerMapped     = gauge("container_memory_mapped_file", "Size of memory mapped files in bytes.", identity...)
	containerSwap       = gauge("container_memory_swap", "Container swap usage in bytes.", identity...)
	containerMaxMemory  = gauge("container_memory_max_usage_bytes", "Maximum memory usage recorded in bytes.", identity...)
	containerFailCount  = counter("container_memory_failcnt", "Number of memory usage hits limits.", identity...)
	containerFaults     = counter("container_memory_failures_total", "Cumulative count of memory allocation failures.", with("failure_type", "scope")...)
	containerOOM        = counter("container_oom_events_total", "Count of out of memory events observed for the container.", identity...)

	fsUsage        = gauge("container_fs_usage_bytes", "Number of bytes that are consumed by the container on this filesystem.", with("device")...)
	fsLimit        = gauge("container_fs_limit_bytes", "Number of bytes that can be consumed by the container on this filesystem.", with("device")...)
	fsInodesTotal  = gauge("container_fs_inodes_total", "Number of Inodes.", with("device")...)
	fsInodesFree   = gauge("container_fs_inodes_free", "Number of available Inodes.", with("device")...)
	fsReads        = counter("container_fs_reads_total", "Cumulative count of reads completed.", with("device")...)
	fsWrites       = counter("container_fs_writes_total", "Cumulative count of writes completed.", with("device")...)
	fsReadBytes    = counter("container_fs_reads_bytes_total", "Cumulative count of bytes read.", with("device")...)
	fsWrittenBytes = counter("container_fs_writes_bytes_total", "Cumulative count of bytes written.", with("device")...)

	rxBytes   = counter("container_network_receive_bytes_total", "Cumulative count of bytes received.", with("interface")...)
	rxPackets = counter("container_network_receive_packets_total", "Cumulative count of packets received.", with("interface")...)
	rxErrors  = counter("container_network_receive_errors_total", "Cumulative count of errors encountered while receiving.", with("interface")...)
	rxDropped = counter("container_network_receive_packets_dropped_total", "Cumulative count of packets dropped while receiving.", with("interface")...)
	txBytes   = counter("container_network_transmit_bytes_total", "Cumulative count of bytes transmitted.", with("interface")...)
	txPackets = counter("container_network_transmit_packets_total", "Cumulative count of packets transmitted.", with("interface")...)
	txErrors  = counter("container_network_transmit_errors_total", "Cumulative count of errors encountered while transmitting.", with("interface")...)
	txDropped = counter("container_network_transmit_packets_dropped_total", "Cumulative count of packets dropped while transmitting.", with("interface")...)

	specPeriod    = gauge("container_spec_cpu_period", "CPU period of the container.", identity...)
	specQuota     = gauge("container_spec_cpu_quota", "CPU quota of the container.", identity...)
	specShares    = gauge("container_spec_cpu_shares", "CPU share of the container.", identity...)
	specMemory    = gauge("container_spec_memory_limit_bytes", "Memory limit for the container.", identity...)
	specReserved  = gauge("container_spec_memory_reservation_limit_bytes", "Memory reservation limit for the container.", identity...)
	specSwap      = gauge("container_spec_memory_swap_limit_bytes", "Memory swap limit for the container.", identity...)
	startTime     = gauge("container_start_time_seconds", "Start time of the container since unix epoch in seconds.", identity...)
	lastSeen      = gauge("container_last_seen", "Last time a container was seen by the exporter", identity...)
	containerPids = gauge("container_processes", "Number of processes running inside the container.", identity...)
	threads       = gauge("container_threads", "Number of threads running inside the container.", identity...)

	machineCores  = gauge("machine_cpu_cores", "Number of logical CPU cores.")
	machineMemory = gauge("machine_memory_bytes", "Amount of memory installed on the machine.")
	scrapeError   = gauge("container_scrape_error", "1 if there was an error while getting container metrics, 0 otherwise")
)

// Describe implements prometheus.Collector: which series there are, the answer
// tells.
func (Containers) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (r Containers) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	pods, err := r.c.cfg.Pods(ctx)
	failed := 0.0
	if err != nil {
		klog.Background().Error(err, "Container metrics are not complete")
		failed = 1
	}
	scrapeError.send(ch, failed)
	r.machine(ch)
	alive := map[string]bool{}
	for _, p := range pods {
		r.pod(ctx, ch, p, alive)
	}
	r.disks.keep(alive)
}

// machine gives the figures of the whole machine.
func (r Containers) machine(ch chan<- prometheus.Metric) {
	n := r.c.node()
	root := []string{"", "/", "", "", "", ""}
	machineCores.send(ch, float64(runtime.NumCPU()))
	if n.CPU != nil {
		containerCPU.send(ch, seconds(*n.CPU.UsageCoreNanoSeconds), append(root, "total")...)
	}
	if m := n.Memory; m != nil {
		machineMemory.send(ch, float64(*m.AvailableBytes+*m.UsageBytes))
		containerMemory.send(ch, float64(*m.UsageBytes), root...)
		containerWorkingSet.send(ch, float64(*m.WorkingSetBytes), root...)
		specMemory.send(ch, float64(*m.AvailableBytes+*m.UsageBytes), root...)
	}
	startTime.send(ch, unixSeconds(r.c.cfg.BootTime), root...)
	lastSeen.send(ch, unixSeconds(time.Now()), root...)
	seen := map[string]bool{}
	for _, dir := range []string{r.c.cfg.NodeDir, r.c.cfg.ImageDir} {
		device, fs := deviceOf(dir), fileSystem(dir)
		if fs == nil || seen[device] {
			continue
		}
		seen[device] = true
		labels := append(root, device)
		fsUsage.send(ch, float64(*fs.UsedBytes), labels...)
		fsLimit.send(ch, float64(*fs.CapacityBytes), labels...)
		fsInodesTotal.send(ch, float64(*fs.Inodes), labels...)
		fsInodesFree.send(ch, float64(*fs.InodesFree), labels...)
	}
	sendNetwork(ch, "/proc/net/dev", root)
}

// pod gives the figures of a pod and its containers.
func (r Containers) pod(ctx context.Context, ch chan<- prometheus.Metric, p Pod, alive map[string]bool) {
	labels := []string{"", p.Cgroup, "", "", p.Namespace, p.Name}
	if !r.cgroup(ch, p.Cgroup, p.Started, labels) {
		return // it is being made, or gone
	}
	if p.Pid > 0 && !p.HostNetwork {
		sendNetwork(ch, fmt.Sprintf("/proc/%d/net/dev", p.Pid), labels)
	}
	device := deviceOf(r.c.cfg.ImageDir)
	fs := fileSystem(r.c.cfg.ImageDir)
	for _, c := range p.Containers {
		group := path.Join(p.Cgroup, c.ID)
		labels := []string{c.Name, group, c.Image, c.ID, p.Namespace, p.Name}
		if !r.cgroup(ch, group, c.Started, labels) {
			continue
		}
		alive[c.ID] = true
		if n, err := r.c.cfg.Cgroups.Processes(group); err == nil {
			containerPids.send(ch, float64(n), labels...)
		}
		if use, err := r.disks.of(ctx, c); err == nil && fs != nil {
			fsUsage.send(ch, float64(use.Bytes), append(labels, device)...)
			fsLimit.send(ch, float64(*fs.CapacityBytes), append(labels, device)...)
		}
	}
}

// cgroup tells what a cgroup uses; false: there is none.
func (r Containers) cgroup(ch chan<- prometheus.Metric, group string, started time.Time, labels []string) bool {
	u, err := r.c.cfg.Cgroups.Read(group)
	if err != nil {
		return false
	}
	d, err := r.c.cfg.Cgroups.Detail(group)
	if err != nil {
		return false
	}
	containerCPU.send(ch, seconds(u.CPU), append(labels, "total")...)
	containerUser.send(ch, seconds(d.User), labels...)
	containerSystem.send(ch, seconds(d.System), labels...)
	if d.Quota > 0 {
		containerPeriods.send(ch, float64(d.Periods), labels...)
		containerThrottled.send(ch, float64(d.Throttled), labels...)
		throttledSeconds.send(ch, seconds(d.ThrottledTime), labels...)
		specQuota.send(ch, float64(d.Quota), labels...)
	}
	specPeriod.send(ch, float64(d.Period), labels...)
	specShares.send(ch, float64(d.Shares), labels...)
	for s, v := range map[series]uint64{
		containerMemory: u.Memory, containerWorkingSet: u.WorkingSet, containerRSS: u.RSS, containerCache: d.Cache,
		containerMapped: d.MappedFile, containerSwap: d.Swap, containerMaxMemory: d.MaxMemory, containerFailCount: d.MemoryFailures,
		containerOOM: d.OOMKills, specMemory: d.MemoryLimit, specReserved: d.MemorySoft, specSwap: d.SwapLimit, threads: d.Threads,
	} {
		s.send(ch, float64(v), labels...)
	}
	containerFaults.send(ch, float64(u.PageFaults), append(labels, "pgfault", "hierarchy")...)
	containerFaults.send(ch, float64(u.MajorFault), append(labels, "pgmajfault", "hierarchy")...)
	for s, byDevice := range map[series]map[string]uint64{
		fsReads: d.ReadRequests, fsWrites: d.WriteRequests, fsReadBytes: d.ReadBytes, fsWrittenBytes: d.WrittenBytes,
	} {
		for number, v := range byDevice {
			s.send(ch, float64(v), append(labels, deviceName(number))...)
		}
	}
	startTime.send(ch, unixSeconds(started), labels...)
	lastSeen.send(ch, unixSeconds(time.Now()), labels...)
	return true
}

// sendNetwork tells what went over the interfaces of a network namespace, as
// its net/dev says; nothing, when the namespace has gone.
func sendNetwork(ch chan<- prometheus.Metric, file string, labels []string) {
	list, err := interfaces(file)
	if err != nil {
		return
	}
	for _, i := range list {
		labels := append(labels, i.name)
		for s, v := range map[series]uint64{
			rxBytes: i.rx.bytes, rxPackets: i.rx.packets, rxErrors: i.rx.errors, rxDropped: i.rx.dropped,
			txBytes: i.tx.bytes, txPackets: i.tx.packets, txErrors: i.tx.errors, txDropped: i.tx.dropped,
		} {
			s.send(ch, float64(v), labels...)
		}
	}
}

// diskCache holds what containers' directories take, for a minute.
type diskCache struct {
	mu    sync.Mutex
	known map[string]diskReading // by container ID
}

type diskReading struct {
	use Disk
	at  time.Time
}

// diskAge is how old a figure of a directory may be.
const diskAge = time.Minute

func (d *diskCache) of(ctx context.Context, c Container) (Disk, error) {
	d.mu.Lock()
	last, ok := d.known[c.ID]
	d.mu.Unlock()
	if ok && time.Since(last.at) < diskAge {
		return last.use, nil
	}
	use, err := DiskUse(ctx, c.Written, c.LogDir)
	if err != nil {
		return use, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.known[c.ID] = diskReading{use, time.Now()}
	return use, nil
}

// keep forgets all but the given containers.
func (d *diskCache) keep(alive map[string]bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for id := range d.known {
		if !alive[id] {
			delete(d.known, id)
		}
	}
}
