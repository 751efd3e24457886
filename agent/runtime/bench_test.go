package runtime_test

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/runtime"
)

// percentiles reports the times of one kind of call.
func percentiles(b *testing.B, what string, d []time.Duration) {
	slices.Sort(d)
	ms := func(q float64) float64 { return float64(d[int(q*float64(len(d)-1))].Microseconds()) / 1000 }
	b.ReportMetric(ms(0.5), what+"-p50-ms")
	b.ReportMetric(ms(0.99), what+"-p99-ms")
}

// BenchmarkRootPod: one pod after the other: pause, one container, an exec,
// removal. Host network, so that podmon alone is measured.
//
//	CLUSTERD_ROOT=1 go test ./agent/runtime -run - -bench RootPod -benchtime 200x
func BenchmarkRootPod(b *testing.B) {
	n := newNode(b)
	var sandbox, container, execs, remove []time.Duration
	cpu := map[*[]time.Duration]time.Duration{}
	timed := func(d *[]time.Duration, f func() error) {
		start, used := time.Now(), n.cpu()
		if err := f(); err != nil {
			b.Fatal(err)
		}
		*d = append(*d, time.Since(start))
		cpu[d] += n.cpu() - used
	}
	i := 0
	for b.Loop() {
		id := "p" + strconv.Itoa(i)
		i++
		timed(&sandbox, func() error {
			_, err := n.client.CreateSandbox(n.ctx, api.Sandbox{ID: id, CgroupParent: n.cgroup + "/pod" + id})
			return err
		})
		timed(&container, func() error {
			spec := n.spec(id, "c"+id, "sleep")
			st, err := n.client.StartContainer(n.ctx, spec)
			if err == nil && st.StartError != "" {
				err = fmt.Errorf("%s", st.StartError)
			}
			return err
		})
		timed(&execs, func() error {
			_, err := n.client.Exec(n.ctx, api.Exec{ContainerID: "c" + id, Args: []string{"/bin/box", "true"}}, runtime.ExecIO{})
			return err
		})
		timed(&remove, func() error { return n.client.RemoveSandbox(n.ctx, id) })
	}
	for what, d := range map[string]*[]time.Duration{"sandbox": &sandbox, "container": &container, "exec": &execs, "remove": &remove} {
		percentiles(b, what, *d)
		if cpu[d] > 0 {
			b.ReportMetric(float64(cpu[d].Microseconds())/1000/float64(len(*d)), what+"-cpu-ms")
		}
	}
}

// cpu is the processor time that podmon and all it ever started have used; 0
// where no cgroup of version 1 tells it.
func (n *node) cpu() time.Duration {
	b, err := os.ReadFile("/sys/fs/cgroup/cpuacct" + n.cgroup + "/cpuacct.usage")
	if err != nil {
		return 0
	}
	ns, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		n.t.Fatal(err)
	}
	return time.Duration(ns)
}

// BenchmarkRootParallelPods: pods per second with 16 at a time.
func BenchmarkRootParallelPods(b *testing.B) {
	n := newNode(b)
	var up, down time.Duration
	pods := 0
	for b.Loop() {
		const batch = 64
		each := func(f func(id string) error) time.Duration {
			start := time.Now()
			slots := make(chan struct{}, 16)
			var wg sync.WaitGroup
			for i := range batch {
				slots <- struct{}{}
				wg.Go(func() {
					defer func() { <-slots }()
					if err := f("p" + strconv.Itoa(pods+i)); err != nil {
						b.Error(err)
					}
				})
			}
			wg.Wait()
			return time.Since(start)
		}
		up += each(func(id string) error {
			_, err := n.client.CreateSandbox(n.ctx, api.Sandbox{ID: id, CgroupParent: n.cgroup + "/pod" + id})
			if err == nil {
				_, err = n.client.StartContainer(n.ctx, n.spec(id, "c"+id, "sleep"))
			}
			return err
		})
		down += each(func(id string) error { return n.client.RemoveSandbox(n.ctx, id) })
		pods += batch
	}
	b.ReportMetric(float64(pods)/up.Seconds(), "up-pods/s")
	b.ReportMetric(float64(pods)/down.Seconds(), "down-pods/s")
}

// BenchmarkRootMemory: what a pod costs beside its app: podmon's growth and
// the pause, in KiB of PSS and of private memory.
func BenchmarkRootMemory(b *testing.B) {
	n := newNode(b)
	for b.Loop() {
		const pods = 100
		n.sandbox("warm")
		n.run(n.spec("warm", "warmc", "true"))
		before := smaps(b, n.podmonPid())
		var pauses memory
		for i := range pods {
			id := "p" + strconv.Itoa(i)
			sb := n.sandbox(id)
			n.start(n.spec(id, "c"+id, "sleep"))
			pauses = pauses.plus(smaps(b, sb.Pid))
		}
		after := smaps(b, n.podmonPid())
		b.ReportMetric(float64(before.pss), "podmon-pss-KiB")
		b.ReportMetric(float64(before.private), "podmon-private-KiB")
		b.ReportMetric(float64(after.private-before.private)/pods, "podmon-private-KiB/pod")
		b.ReportMetric(float64(pauses.pss)/pods, "pause-pss-KiB")
		b.ReportMetric(float64(pauses.private)/pods, "pause-private-KiB")
		b.ReportMetric(float64(pauses.rss)/pods, "pause-rss-KiB")
		for i := range pods {
			if err := n.client.RemoveSandbox(n.ctx, "p"+strconv.Itoa(i)); err != nil {
				b.Fatal(err)
			}
		}
		if err := n.client.RemoveSandbox(n.ctx, "warm"); err != nil {
			b.Fatal(err)
		}
	}
}

type memory struct{ rss, pss, private int }

func (m memory) plus(o memory) memory {
	return memory{m.rss + o.rss, m.pss + o.pss, m.private + o.private}
}

func smaps(tb testing.TB, pid int) memory {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		tb.Fatal(err)
	}
	var m memory
	for line := range strings.Lines(string(b)) {
		var key string
		var kib int
		if n, _ := fmt.Sscan(line, &key, &kib); n < 2 {
			continue
		}
		switch key {
		case "Rss:":
			m.rss = kib
		case "Pss:":
			m.pss = kib
		case "Private_Dirty:", "Private_Clean:":
			m.private += kib
		}
	}
	return m
}
