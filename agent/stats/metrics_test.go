package stats

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
)

// twoVersions are the same cgroup as version 1 and as version 2 tell it.
var twoVersions = map[string]map[string]string{
	"v1": {
		"cpuacct/p/c/cpuacct.usage": "5000000000\n", "cpuacct/p/c/cpuacct.stat": "user 300\nsystem 200\n",
		"cpu/p/c/cpu.stat": "nr_periods 10\nnr_throttled 4\nthrottled_time 2500000000\n", "cpu/p/c/cpu.cfs_quota_us": "50000\n",
		"cpu/p/c/cpu.cfs_period_us": "100000\n", "cpu/p/c/cpu.shares": "1024\n",
		"memory/p/c/memory.usage_in_bytes": "1000\n", "memory/p/c/memory.max_usage_in_bytes": "1500\n", "memory/p/c/memory.failcnt": "7\n",
		"memory/p/c/memory.limit_in_bytes": "2000\n", "memory/p/c/memory.soft_limit_in_bytes": "9223372036854771712\n",
		"memory/p/c/memory.memsw.limit_in_bytes": "2000\n", "memory/p/c/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
		"memory/p/c/memory.stat": "total_rss 400\ntotal_cache 600\ntotal_mapped_file 50\ntotal_swap 0\ntotal_inactive_file 300\ntotal_pgfault 9\ntotal_pgmajfault 2\n",
		"pids/p/c/pids.current":  "3\n", "pids/p/c/cgroup.procs": "17\n18\n",
		"blkio/p/c/blkio.throttle.io_service_bytes_recursive": "8:0 Read 4096\n8:0 Write 8192\n8:0 Sync 0\nTotal 12288\n",
		"blkio/p/c/blkio.throttle.io_serviced_recursive":      "8:0 Read 1\n8:0 Write 2\nTotal 3\n",
	},
	"v2": {
		"cgroup.controllers": "cpu memory pids io\n",
		"p/c/cpu.stat":       "usage_usec 5000000\nuser_usec 3000000\nsystem_usec 2000000\nnr_periods 10\nnr_throttled 4\nthrottled_usec 2500000\n",
		"p/c/cpu.max":        "50000 100000\n", "p/c/cpu.weight": "100\n",
		"p/c/memory.current": "1000\n", "p/c/memory.peak": "1500\n", "p/c/memory.max": "2000\n", "p/c/memory.low": "0\n", "p/c/memory.swap.max": "0\n",
		"p/c/memory.swap.current": "0\n", "p/c/memory.events": "low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\n",
		"p/c/memory.stat":  "anon 400\nfile 600\nfile_mapped 50\ninactive_file 300\npgfault 9\npgmajfault 2\n",
		"p/c/pids.current": "3\n", "p/c/cgroup.procs": "17\n18\n", "p/c/io.stat": "8:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0\n",
	},
}

// TestDetailVersions: both versions of cgroups tell the same.
func TestDetailVersions(t *testing.T) {
	want := Detail{
		User: 3e9, System: 2e9, Periods: 10, Throttled: 4, ThrottledTime: 2.5e9, Quota: 50000, Period: 100000, Shares: 1024,
		Cache: 600, MappedFile: 50, MaxMemory: 1500, MemoryFailures: 7, MemoryLimit: 2000, SwapLimit: 2000, OOMKills: 1, Threads: 3,
		ReadBytes: map[string]uint64{"8:0": 4096}, WrittenBytes: map[string]uint64{"8:0": 8192},
		ReadRequests: map[string]uint64{"8:0": 1}, WriteRequests: map[string]uint64{"8:0": 2},
	}
	for version, files := range twoVersions {
		root := Cgroups{t.TempDir()}
		write(t, root.Mount, files)
		got, err := root.Detail("/p/c")
		if err != nil {
			t.Errorf("%s: %v", version, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", version, diff)
		}
		if n, err := root.Processes("/p/c"); n != 2 || err != nil {
			t.Errorf("%s: %d processes, %v", version, n, err)
		}
		if _, err := root.Detail("/p/none"); err == nil {
			t.Errorf("%s: a cgroup that is not there is told", version)
		}
	}
}

func TestShares(t *testing.T) {
	for weight, shares := range map[uint64]uint64{1: 2, 100: 1024, 10000: 262144} {
		if got := sharesOf(weight); got != shares {
			t.Errorf("weight %d: %d shares, want %d", weight, got, shares)
		}
	}
}

// collector has one pod with one container on a machine of files.
func collector(t *testing.T, version string) *Collector {
	t.Helper()
	root := t.TempDir()
	write(t, root, twoVersions[version])
	pod := map[string]string{}
	for name, content := range twoVersions[version] {
		if strings.Contains(name, "/p/c/") || strings.HasPrefix(name, "p/c/") {
			pod[strings.Replace(name, "p/c/", "p/", 1)] = content
		}
	}
	write(t, root, pod)
	return New(Config{
		NodeName: "n1", Cgroups: Cgroups{root}, Root: "/p", NodeDir: t.TempDir(), ImageDir: t.TempDir(),
		MemoryOf: func() (int64, int64) { return 600, 1000 },
		Pods: func(context.Context) ([]Pod, error) {
			return []Pod{{Namespace: "ns", Name: "web-0", UID: "u", Cgroup: "/p", HostNetwork: true, Started: time.Unix(90, 0),
				Containers: []Container{{Name: "web", ID: "c", Image: "example.org/web:1", Started: time.Unix(100, 0)}}}}, nil
		},
	})
}

// TestResource: the names, labels and values that metrics-server and others
// read.
func TestResource(t *testing.T) {
	for version := range twoVersions {
		want := `
# HELP container_cpu_usage_seconds_total Cumulative cpu time consumed by the container in core-seconds
# TYPE container_cpu_usage_seconds_total counter
container_cpu_usage_seconds_total{container="web",namespace="ns",pod="web-0"} 5
# HELP container_memory_working_set_bytes Current working set of the container in bytes
# TYPE container_memory_working_set_bytes gauge
container_memory_working_set_bytes{container="web",namespace="ns",pod="web-0"} 700
# HELP container_start_time_seconds Start time of the container since unix epoch in seconds
# TYPE container_start_time_seconds gauge
container_start_time_seconds{container="web",namespace="ns",pod="web-0"} 100
# HELP node_memory_working_set_bytes Current working set of the node in bytes
# TYPE node_memory_working_set_bytes gauge
node_memory_working_set_bytes 400
# HELP pod_cpu_usage_seconds_total Cumulative cpu time consumed by the pod in core-seconds
# TYPE pod_cpu_usage_seconds_total counter
pod_cpu_usage_seconds_total{namespace="ns",pod="web-0"} 5
# HELP pod_memory_working_set_bytes Current working set of the pod in bytes
# TYPE pod_memory_working_set_bytes gauge
pod_memory_working_set_bytes{namespace="ns",pod="web-0"} 700
# HELP resource_scrape_error 1 if there was an error while getting container metrics, 0 otherwise
# TYPE resource_scrape_error gauge
resource_scrape_error 0
`
		compare(t, version, collector(t, version).Resource(), want)
		if n := testutil.CollectAndCount(collector(t, version).Resource(), "node_cpu_usage_seconds_total"); n != 1 {
			t.Errorf("%s: the node's processor time is told %d times", version, n)
		}
	}
}

// compare wants the metrics that want names to be just as it says, but for the
// moments at which they were read.
func compare(t *testing.T, version string, c prometheus.Collector, want string) {
	t.Helper()
	var names []string
	for line := range strings.Lines(want) {
		if name, ok := strings.CutPrefix(line, "# TYPE "); ok {
			names = append(names, strings.Fields(name)[0])
		}
	}
	if err := testutil.CollectAndCompare(timeless{c}, strings.NewReader(want), names...); err != nil {
		t.Errorf("%s: %v", version, err)
	}
}

// timeless takes the times off what a collector says.
type timeless struct{ prometheus.Collector }

func (c timeless) Collect(ch chan<- prometheus.Metric) {
	all := make(chan prometheus.Metric)
	go func() { defer close(all); c.Collector.Collect(all) }()
	for m := range all {
		ch <- undated{m}
	}
}

type undated struct{ prometheus.Metric }

func (m undated) Write(out *dto.Metric) error {
	err := m.Metric.Write(out)
	out.TimestampMs = nil
	return err
}

// TestContainers: the series that the usual dashboards read, with the labels
// by which they choose.
func TestContainers(t *testing.T) {
	for version := range twoVersions {
		c := `{container="web",id="/p/c",image="example.org/web:1",name="c",namespace="ns",pod="web-0"`
		p := `{container="",id="/p",image="",name="",namespace="ns",pod="web-0"`
		want := ""
		say := func(name, kind, help string, lines ...string) {
			want += "# HELP " + name + " " + help + "\n# TYPE " + name + " " + kind + "\n"
			for _, l := range lines {
				want += name + l + "\n"
			}
		}
		say("container_cpu_cfs_throttled_seconds_total", "counter", "Total time duration the container has been throttled.", c+"} 2.5", p+"} 2.5")
		say("container_cpu_cfs_periods_total", "counter", "Number of elapsed enforcement period intervals.", c+"} 10", p+"} 10")
		say("container_cpu_user_seconds_total", "counter", "Cumulative user cpu time consumed in seconds.", c+"} 3", p+"} 3")
		say("container_memory_rss", "gauge", "Size of RSS in bytes.", c+"} 400", p+"} 400")
		say("container_memory_cache", "gauge", "Number of bytes of page cache memory.", c+"} 600", p+"} 600")
		say("container_spec_cpu_quota", "gauge", "CPU quota of the container.", c+"} 50000", p+"} 50000")
		say("container_spec_cpu_shares", "gauge", "CPU share of the container.", c+"} 1024", p+"} 1024")
		say("container_oom_events_total", "counter", "Count of out of memory events observed for the container.", c+"} 1", p+"} 1")
		say("container_processes", "gauge", "Number of processes running inside the container.", c+"} 2")
		say("container_scrape_error", "gauge", "1 if there was an error while getting container metrics, 0 otherwise", " 0")
		say("machine_memory_bytes", "gauge", "Amount of memory installed on the machine.", " 1000")
		compare(t, version, collector(t, version).Containers(), want)
		for name, rows := range map[string]int{ // one of them for the machine
			"container_cpu_usage_seconds_total": 3, "container_memory_working_set_bytes": 3, "container_spec_memory_limit_bytes": 3,
			"container_start_time_seconds": 3, "container_last_seen": 3, "container_fs_writes_bytes_total": 2, "container_fs_reads_total": 2,
			"container_memory_failures_total": 4, "container_fs_limit_bytes": -1,
		} {
			if n := testutil.CollectAndCount(collector(t, version).Containers(), name); n != rows && (rows >= 0 || n == 0) {
				t.Errorf("%s: %s has %d rows, want %d", version, name, n, rows)
			}
		}
	}
}

// TestScrapeError: podmon does not answer, the node's own figures are there.
func TestScrapeError(t *testing.T) {
	c := New(Config{Cgroups: Cgroups{t.TempDir()}, Pods: func(context.Context) ([]Pod, error) { return nil, errors.New("no podmon") }})
	compare(t, "resource", c.Resource(), `
# HELP resource_scrape_error 1 if there was an error while getting container metrics, 0 otherwise
# TYPE resource_scrape_error gauge
resource_scrape_error 1
`)
	compare(t, "cadvisor", c.Containers(), `
# HELP container_scrape_error 1 if there was an error while getting container metrics, 0 otherwise
# TYPE container_scrape_error gauge
container_scrape_error 1
`)
}

// TestInterfaces reads what proc(5) shows of net/dev.
func TestInterfaces(t *testing.T) {
	root := t.TempDir()
	write(t, root, map[string]string{"dev": `Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     100       1    0    0    0     0          0         0      100       1    0    0    0     0       0          0
  eth0:       1       2    3    4    0     0          0         0        5       6    7    8    0     0       0          0
`, "bad": "eth0: a b c d e f g h i j k l m\n"})
	got, err := interfaces(root + "/dev")
	want := []networkInterface{{name: "eth0", rx: traffic{1, 2, 3, 4}, tx: traffic{5, 6, 7, 8}}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(networkInterface{}, traffic{})); err != nil || diff != "" {
		t.Errorf("%v %s", err, diff)
	}
	if _, err := interfaces(root + "/bad"); err == nil {
		t.Error("letters are taken for numbers")
	}
}
