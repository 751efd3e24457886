package stats

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Detail is what monitoring wants to know of a cgroup beside its Usage. What
// the kernel does not tell stays zero.
type Detail struct {
	User, System                uint64 // nanoseconds of processor time in user and in kernel mode
	Periods, Throttled          uint64 // of the processor limit, and those in which it was hit
	ThrottledTime               uint64 // nanoseconds
	Quota, Period               uint64 // the processor limit, microseconds; Quota 0: none
	Shares                      uint64 // weight on the scale of cgroup version 1
	Cache, MappedFile, Swap     uint64 // bytes
	MaxMemory, MemoryFailures   uint64 // the most that was used, in bytes; how often the limit was hit
	MemoryLimit, MemorySoft     uint64 // bytes; 0: none
	SwapLimit                   uint64 // memory and swap together, bytes; 0: none
	OOMKills                    uint64
	Threads                     uint64
	ReadBytes, WrittenBytes     map[string]uint64 // by block device, "8:0"
	ReadRequests, WriteRequests map[string]uint64
}

// unlimited is from where on version 1's limits mean none: it says the largest
// multiple of a page there is.
const unlimited = math.MaxInt64 &^ (1<<16 - 1)

// Detail reads a cgroup, as Read does.
func (c Cgroups) Detail(group string) (Detail, error) {
	if _, err := os.Stat(filepath.Join(c.Mount, "cgroup.controllers")); err == nil {
		return c.detailV2(group)
	}
	return c.detailV1(group)
}

// Processes counts the processes in a cgroup, without those in cgroups below.
func (c Cgroups) Processes(group string) (int, error) {
	file := filepath.Join(c.Mount, group, "cgroup.procs")
	if _, err := os.Stat(filepath.Join(c.Mount, "cgroup.controllers")); err != nil {
		file = filepath.Join(c.Mount, "pids", group, "cgroup.procs")
	}
	b, err := os.ReadFile(file)
	return strings.Count(string(b), "\n"), err
}

// reader reads the files of a cgroup. A file that is not there counts as
// nothing: kernels and hierarchies differ in what they have.
type reader struct{ err error }

func (r *reader) number(file string) uint64 {
	n, err := readNumber(file)
	if errors.Is(err, strconv.ErrSyntax) { // "max", "-1"
		return 0
	}
	r.note(err)
	return n
}

func (r *reader) fields(file string) map[string]uint64 {
	f, err := readFields(file)
	r.note(err)
	return f
}

func (r *reader) note(err error) {
	if err != nil && !os.IsNotExist(err) && r.err == nil {
		r.err = err
	}
}

func limit(n uint64) uint64 {
	if n >= unlimited {
		return 0
	}
	return n
}

func (c Cgroups) detailV1(group string) (d Detail, err error) {
	var r reader
	in := func(controller, file string) string { return filepath.Join(c.Mount, controller, group, file) }
	if _, err := os.Stat(in("memory", "")); err != nil {
		return d, err
	}
	const tick = 1e9 / 100 // USER_HZ
	use := r.fields(in("cpuacct", "cpuacct.stat"))
	d.User, d.System = use["user"]*tick, use["system"]*tick
	cpu := r.fields(in("cpu", "cpu.stat"))
	d.Periods, d.Throttled, d.ThrottledTime = cpu["nr_periods"], cpu["nr_throttled"], cpu["throttled_time"]
	d.Quota, d.Period, d.Shares = r.number(in("cpu", "cpu.cfs_quota_us")), r.number(in("cpu", "cpu.cfs_period_us")), r.number(in("cpu", "cpu.shares"))
	memory := r.fields(in("memory", "memory.stat"))
	d.Cache, d.MappedFile, d.Swap = memory["total_cache"], memory["total_mapped_file"], memory["total_swap"]
	d.MaxMemory, d.MemoryFailures = r.number(in("memory", "memory.max_usage_in_bytes")), r.number(in("memory", "memory.failcnt"))
	d.MemoryLimit, d.MemorySoft = limit(r.number(in("memory", "memory.limit_in_bytes"))), limit(r.number(in("memory", "memory.soft_limit_in_bytes")))
	d.SwapLimit = limit(r.number(in("memory", "memory.memsw.limit_in_bytes")))
	d.OOMKills = r.fields(in("memory", "memory.oom_control"))["oom_kill"]
	d.Threads = r.number(in("pids", "pids.current"))
	d.ReadBytes, d.WrittenBytes = r.blkio(in("blkio", "blkio.throttle.io_service_bytes_recursive"))
	d.ReadRequests, d.WriteRequests = r.blkio(in("blkio", "blkio.throttle.io_serviced_recursive"))
	return d, r.err
}

// blkio reads lines such as "8:0 Read 4096".
func (r *reader) blkio(file string) (read, written map[string]uint64) {
	read, written = map[string]uint64{}, map[string]uint64{}
	b, err := os.ReadFile(file)
	r.note(err)
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) != 3 {
			continue
		}
		n, err := strconv.ParseUint(f[2], 10, 64)
		r.note(err)
		switch f[1] {
		case "Read":
			read[f[0]] = n
		case "Write":
			written[f[0]] = n
		}
	}
	return read, written
}

func (c Cgroups) detailV2(group string) (d Detail, err error) {
	var r reader
	in := func(file string) string { return filepath.Join(c.Mount, group, file) }
	if _, err := os.Stat(in("")); err != nil {
		return d, err
	}
	cpu := r.fields(in("cpu.stat"))
	d.User, d.System = cpu["user_usec"]*1000, cpu["system_usec"]*1000
	d.Periods, d.Throttled, d.ThrottledTime = cpu["nr_periods"], cpu["nr_throttled"], cpu["throttled_usec"]*1000
	d.Quota, d.Period = r.cpuMax(in("cpu.max"))
	if w := r.number(in("cpu.weight")); w > 0 {
		d.Shares = sharesOf(w)
	}
	memory := r.fields(in("memory.stat"))
	d.Cache, d.MappedFile, d.Swap = memory["file"], memory["file_mapped"], r.number(in("memory.swap.current"))
	d.MaxMemory, d.MemoryLimit, d.MemorySoft = r.number(in("memory.peak")), r.number(in("memory.max")), r.number(in("memory.low"))
	if swap := r.number(in("memory.swap.max")); d.MemoryLimit > 0 {
		d.SwapLimit = d.MemoryLimit + swap
	}
	events := r.fields(in("memory.events"))
	d.MemoryFailures, d.OOMKills = events["max"], events["oom_kill"]
	d.Threads = r.number(in("pids.current"))
	d.ReadBytes, d.WrittenBytes, d.ReadRequests, d.WriteRequests = r.io(in("io.stat"))
	return d, r.err
}

// cpuMax reads "QUOTA PERIOD" or "max PERIOD".
func (r *reader) cpuMax(file string) (quota, period uint64) {
	b, err := os.ReadFile(file)
	r.note(err)
	f := strings.Fields(string(b))
	if len(f) != 2 {
		return 0, 0
	}
	if f[0] != "max" {
		quota, err = strconv.ParseUint(f[0], 10, 64)
		r.note(err)
	}
	period, err = strconv.ParseUint(f[1], 10, 64)
	r.note(err)
	return quota, period
}

// io reads lines such as "8:0 rbytes=4096 wbytes=0 rios=1 wios=0 …".
func (r *reader) io(file string) (rbytes, wbytes, rios, wios map[string]uint64) {
	out := map[string]map[string]uint64{"rbytes": {}, "wbytes": {}, "rios": {}, "wios": {}}
	b, err := os.ReadFile(file)
	r.note(err)
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		for _, pair := range f[min(1, len(f)):] {
			key, value, _ := strings.Cut(pair, "=")
			if of := out[key]; of != nil {
				n, err := strconv.ParseUint(value, 10, 64)
				r.note(err)
				of[f[0]] = n
			}
		}
	}
	return out["rbytes"], out["wbytes"], out["rios"], out["wios"]
}

// sharesOf turns a weight of version 2 (1 to 10000, default 100) into shares
// of version 1 (2 to 262144, default 1024). It is the inverse of what
// opencontainers/cgroups writes, whose scale is a quadratic curve through
// these three points in the exponents.
func sharesOf(weight uint64) uint64 {
	// log10(weight) = (l² + 125·l) / 612 − 7/34, where l = log2(shares).
	e := math.Log10(float64(weight))
	l := (-125 + math.Sqrt(125*125+4*612*(e+7.0/34))) / 2
	return uint64(math.Round(math.Exp2(l)))
}
