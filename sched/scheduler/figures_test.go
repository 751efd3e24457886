package scheduler

import (
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/sched/replicaset"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// TestFigures prints how many decisions and preemptions a second one goroutine
// takes, without the API.
func TestFigures(t *testing.T) {
	if os.Getenv("CLUSTERD_BENCH") == "" {
		t.Skip("a benchmark: make bench-sched")
	}
	// What counts is processor time, with that of collections: others use the machine, too.
	say := func(what string, nodes int, work func(b *testing.B)) {
		var took time.Duration
		r := testing.Benchmark(func(b *testing.B) {
			b.ReportAllocs()
			before := processorTime(t)
			work(b)
			took = processorTime(t) - before
		})
		us := float64(took.Microseconds()) / float64(r.N)
		fmt.Printf(`{"bench":"sched","case":%q,"nodes":%d,"per_cpu_s":%.0f,"cpu_us":%.1f,"us":%.1f,"allocs":%d}`+"\n",
			what, nodes, 1e6/us, us, float64(r.NsPerOp())/1000, r.AllocsPerOp())
	}
	rs := schedtest.ReplicaSet("web", 1)
	kinds := []struct {
		name string
		pod  func(*schedtest.PodBuilder) *schedtest.PodBuilder
	}{
		{"decide", func(p *schedtest.PodBuilder) *schedtest.PodBuilder { return p }},
		{"decide, spread over zones", func(p *schedtest.PodBuilder) *schedtest.PodBuilder {
			return p.Spread("zone", 1, corev1.DoNotSchedule, "app", "web")
		}},
		{"decide, apart by host", func(p *schedtest.PodBuilder) *schedtest.PodBuilder {
			return p.Apart(corev1.LabelHostname, "app", "other")
		}},
	}
	for _, nodes := range []int{100, 1000, 5000} {
		world := func(pod func(*schedtest.PodBuilder) *schedtest.PodBuilder, cpu string) (*snapshot, func() *podInfo) {
			s := newSnapshot()
			for i := range nodes {
				name := fmt.Sprintf("n%d", i)
				s.setNode(schedtest.Node(name).Label("zone", fmt.Sprint(i%3)).Label(corev1.LabelHostname, name).Has("pods", "1000000").Obj())
			}
			made := 0
			next := func() *podInfo {
				made++
				return newPodInfo(pod(schedtest.Pod(fmt.Sprintf("p%d", made)).Label("app", "web").CPU(cpu).OwnedBy(rs, replicaset.Kind)).Obj())
			}
			for i := range 2 * nodes {
				s.assume(next(), fmt.Sprintf("n%d", i%nodes))
			}
			return s, next
		}
		for _, kind := range kinds {
			s, next := world(kind.pod, "1m")
			say(kind.name, nodes, func(b *testing.B) {
				for b.Loop() {
					p := next()
					s.assume(p, best(s, p, runFilters(s, p).fit).name)
				}
			})
		}
		// Each node is full with two pods; one of them has to go.
		s, _ := world(kinds[0].pod, "2")
		urgent := newPodInfo(schedtest.Pod("urgent").CPU("1").Priority(100).Obj())
		say("preempt", nodes, func(b *testing.B) {
			for b.Loop() {
				if len(runFilters(s, urgent).fit) > 0 || preempt(s, urgent, nil) == nil {
					b.Fatal("there is room, or none to be made")
				}
			}
		})
		// In vain: no node has the device; and an equal has the port on each.
		inVain := func(what string, urgent *podInfo) {
			say(what, nodes, func(b *testing.B) {
				for b.Loop() {
					if preempt(s, urgent, nil) != nil {
						b.Fatal("there is room to be made")
					}
				}
			})
		}
		inVain("preempt in vain, no device", newPodInfo(gpus(schedtest.Pod("urgent"), "1").Priority(100).Obj()))
		for i := range nodes {
			s.setPod(schedtest.Pod(fmt.Sprint("equal", i)).On(fmt.Sprintf("n%d", i)).HostPort(80).Priority(100).Obj())
		}
		inVain("preempt in vain, port", newPodInfo(schedtest.Pod("urgent").CPU("1").HostPort(80).Priority(100).Obj()))
	}
}

// processorTime is what this process has taken.
func processorTime(t *testing.T) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
