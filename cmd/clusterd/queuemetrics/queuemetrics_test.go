package queuemetrics_test // a test inside would make component-base an import of the package itself

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/util/workqueue"
	_ "k8s.io/component-base/metrics/prometheus/workqueue" // its provider must not be the first

	"github.com/clusterd/clusterd/cmd/clusterd/queuemetrics"
)

// value of a metric of a queue; -1: there is none.
func value(t *testing.T, metric, queue string) float64 {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	for _, c := range queuemetrics.Collectors() {
		reg.MustRegister(c)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.Metric {
			if f.GetName() == metric && m.Label[0].GetValue() == queue {
				return m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return -1
}

// Queues of whoever report here, though component-base wants to be told.
func TestProvider(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := workqueue.NewTypedRateLimitingQueueWithConfig(workqueue.NewTypedItemExponentialFailureRateLimiter[string](time.Second, time.Second),
			workqueue.TypedRateLimitingQueueConfig[string]{Name: "one"})
		q.Add("a")
		q.Add("b")
		if got := value(t, "workqueue_depth", "one"); got != 2 {
			t.Fatalf("depth %v, want 2: is another provider in place?", got)
		}
		a, _ := q.Get()
		time.Sleep(3 * time.Second)
		b, _ := q.Get()
		time.Sleep(time.Second)
		for metric, want := range map[string]float64{
			"workqueue_depth": 0, "workqueue_adds_total": 2, "workqueue_queue_duration_seconds": 2, "workqueue_work_duration_seconds": 0,
			"workqueue_unfinished_work_seconds": 5, "workqueue_longest_running_processor_seconds": 4,
		} {
			if got := value(t, metric, "one"); got != want {
				t.Errorf("%s is %v, want %v", metric, got, want)
			}
		}
		q.Done(a)
		if got := value(t, "workqueue_unfinished_work_seconds", "one"); got != 1 {
			t.Errorf("%v s of unfinished work once the older item is done, want 1", got)
		}
		q.AddRateLimited(a)
		time.Sleep(time.Minute)
		if again, _ := q.Get(); again != a {
			t.Errorf("%q came back, want %q", again, a)
		}
		q.Done(a)
		q.Done(b)
		if got := value(t, "workqueue_longest_running_processor_seconds", "one"); got != 0 {
			t.Errorf("the longest is %v when all is done", got)
		}
		if got := value(t, "workqueue_retries_total", "one"); got != 1 {
			t.Errorf("%v retries", got)
		}
		q.ShutDown()
		if item, over := q.Get(); !over {
			t.Errorf("a queue that was shut down gives %q", item)
		}
	})
}

// What a queue's goroutine would do twice a second ends with its first time, and the
// queue goes on: synctest ends when no goroutine is left, and fails when one never ends.
func TestQueueGoesOnWithoutUpdates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[int]{Name: "two"})
		time.Sleep(time.Hour)
		before := time.Now()
		for i := range 1000 {
			q.Add(i)
			if got, over := q.Get(); got != i || over {
				t.Fatalf("%d came out for %d", got, i)
			}
			q.Done(i)
		}
		if !before.Equal(time.Now()) {
			t.Error("the queue waited for something")
		}
		q.Add(1)
		if got, _ := q.Get(); got != 1 {
			t.Errorf("%d came out", got)
		}
		drained := make(chan struct{})
		go func() { q.ShutDownWithDrain(); close(drained) }()
		synctest.Wait()
		q.Done(1)
		<-drained
	})
}

func TestNamesOfAll(t *testing.T) {
	descs := make(chan *prometheus.Desc, 100)
	for _, c := range queuemetrics.Collectors() {
		c.Describe(descs)
	}
	close(descs)
	n := 0
	for d := range descs {
		n++
		if !strings.Contains(d.String(), `"workqueue_`) {
			t.Error(d)
		}
	}
	if n != 7 {
		t.Errorf("%d metrics", n)
	}
}
