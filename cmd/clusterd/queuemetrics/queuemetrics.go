// Package queuemetrics measures the work queues of client-go, of all loops and of the
// libraries: the metrics workqueue_*, by the names that Kubernetes' programs give
// them. Those that component-base brings wake the process twice a second for each
// queue, to write down how long unfinished work has taken; here that is computed
// when somebody asks.
//
// The first provider that is set stays, and component-base sets its own while it is
// initialized. This package is initialized before: of packages whose imports are
// ready, the one with the least path is next (Go's specification, "Program
// initialization"), "github.com" comes before "k8s.io", and it imports nothing that
// component-base's package does not import as well. TestProvider would notice.
package queuemetrics

import (
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/util/workqueue"
)

func init() { workqueue.SetProvider(all) }

// Collectors are to be registered.
func Collectors() []prometheus.Collector {
	return []prometheus.Collector{all.depth, all.adds, all.waited, all.worked, all.retries, all}
}

var all = newProvider()

// provider is the workqueue.MetricsProvider, and the Collector of what is computed
// when it is asked for.
type provider struct {
	depth   *prometheus.GaugeVec
	adds    *prometheus.CounterVec
	retries *prometheus.CounterVec
	waited  *prometheus.HistogramVec
	worked  *prometheus.HistogramVec

	unfinished, longest *prometheus.Desc

	mu     sync.Mutex
	byName map[string]*unfinished
}

func newProvider() *provider {
	name := []string{"name"}
	buckets := prometheus.ExponentialBuckets(10e-9, 10, 10)
	return &provider{
		depth:      prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "workqueue_depth", Help: "Items that wait in a work queue."}, name),
		adds:       prometheus.NewCounterVec(prometheus.CounterOpts{Name: "workqueue_adds_total", Help: "Items that were put into a work queue."}, name),
		retries:    prometheus.NewCounterVec(prometheus.CounterOpts{Name: "workqueue_retries_total", Help: "Items that were put into a work queue again, after a while."}, name),
		waited:     prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "workqueue_queue_duration_seconds", Help: "Time an item waited in a work queue.", Buckets: buckets}, name),
		worked:     prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "workqueue_work_duration_seconds", Help: "Time that work on an item of a work queue took.", Buckets: buckets}, name),
		unfinished: prometheus.NewDesc("workqueue_unfinished_work_seconds", "Time that work has taken, in all, on items that it goes on for. One that grows by more than a second a second for each worker is stuck.", name, nil),
		longest:    prometheus.NewDesc("workqueue_longest_running_processor_seconds", "Time that work has taken on the item that it began with first, of those that it goes on for.", name, nil),
		byName:     map[string]*unfinished{},
	}
}

func (p *provider) NewDepthMetric(name string) workqueue.GaugeMetric {
	return p.depth.WithLabelValues(name)
}
func (p *provider) NewAddsMetric(name string) workqueue.CounterMetric {
	return p.adds.WithLabelValues(name)
}
func (p *provider) NewRetriesMetric(name string) workqueue.CounterMetric {
	return p.retries.WithLabelValues(name)
}

// NewLatencyMetric is told when work on an item begins, NewWorkDurationMetric when it
// is done.
func (p *provider) NewLatencyMetric(name string) workqueue.HistogramMetric {
	waited, u := p.waited.WithLabelValues(name), p.of(name)
	return observer(func(seconds float64) {
		waited.Observe(seconds)
		u.begin(time.Now())
	})
}

func (p *provider) NewWorkDurationMetric(name string) workqueue.HistogramMetric {
	worked, u := p.worked.WithLabelValues(name), p.of(name)
	return observer(func(seconds float64) {
		worked.Observe(seconds)
		u.end(time.Now().Add(-time.Duration(seconds * float64(time.Second))))
	})
}

func (p *provider) NewUnfinishedWorkSecondsMetric(string) workqueue.SettableGaugeMetric {
	return noUpdates{}
}

func (p *provider) NewLongestRunningProcessorSecondsMetric(string) workqueue.SettableGaugeMetric {
	return noUpdates{}
}

// of is the unfinished work of the queues of a name.
func (p *provider) of(name string) *unfinished {
	p.mu.Lock()
	defer p.mu.Unlock()
	u := p.byName[name]
	if u == nil {
		u = &unfinished{}
		p.byName[name] = u
	}
	return u
}

func (p *provider) Describe(ch chan<- *prometheus.Desc) {
	ch <- p.unfinished
	ch <- p.longest
}

func (p *provider) Collect(ch chan<- prometheus.Metric) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, u := range p.byName {
		sum, longest := u.at(time.Now())
		ch <- prometheus.MustNewConstMetric(p.unfinished, prometheus.GaugeValue, sum.Seconds(), name)
		ch <- prometheus.MustNewConstMetric(p.longest, prometheus.GaugeValue, longest.Seconds(), name)
	}
}

type observer func(seconds float64)

func (f observer) Observe(seconds float64) { f(seconds) }

// noUpdates is what a queue writes its unfinished work to, every half of a second, by
// a goroutine that does nothing else. The first such call ends that goroutine, with
// what it has deferred: it gives back the queue's lock and stops its ticker. There is
// no other way to say that it is not needed.
type noUpdates struct{}

func (noUpdates) Set(float64) { runtime.Goexit() }

// unfinished is when work began that is not done.
type unfinished struct {
	mu    sync.Mutex
	began []time.Time
}

func (u *unfinished) begin(at time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.began = append(u.began, at)
}

// end forgets the work that began closest to that time: the two were not measured in
// the same moment.
func (u *unfinished) end(began time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	closest := -1
	for i, at := range u.began {
		if closest < 0 || at.Sub(began).Abs() < u.began[closest].Sub(began).Abs() {
			closest = i
		}
	}
	if closest >= 0 {
		u.began = slices.Delete(u.began, closest, closest+1)
	}
}

// at is how long all of it, and what began first, has taken.
func (u *unfinished) at(now time.Time) (sum, longest time.Duration) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, at := range u.began {
		sum, longest = sum+now.Sub(at), max(longest, now.Sub(at))
	}
	return sum, longest
}
