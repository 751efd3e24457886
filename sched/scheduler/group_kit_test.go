package scheduler

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	"k8s.io/client-go/informers"
	testingclock "k8s.io/utils/clock/testing"

	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// table is a scheduler without its goroutine: the test plays the informers and
// the API server, and decides what happens when.
type table struct {
	t     *testing.T
	clock *testingclock.FakeClock
	env   loop.Env
	s     *scheduler
	// begun are the bindings that no answer has come for.
	begun []placement
	stop  func()
}

func newTable(t *testing.T) *table {
	x := &table{t: t, clock: testingclock.NewFakeClock(time.Unix(1000, 0))}
	x.lead(nil, nil, nil)
	t.Cleanup(func() { x.stop() })
	return x
}

// lead begins with a new scheduler that knows what informers show: what the old
// one had only decided is lost.
func (x *table) lead(nodes []*corev1.Node, groups []*schedulingv1beta1.PodGroup, pods []*corev1.Pod) {
	if x.stop != nil {
		x.stop()
	}
	c := schedtest.New(x.t)
	x.env = loop.Env{Client: c.Client, Informers: informers.NewSharedInformerFactory(c.Client, 0), Events: loop.NewEvents(c.Client, x.clock), Clock: x.clock}
	x.s, x.begun = newScheduler(x.env, Config{}), nil
	// A reason that has been written is forgotten; here the test reads them.
	x.s.reporter = loop.New("scheduler-reports", x.env, 1, func(context.Context, loop.Key) error { return nil })
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, reporter := range []*loop.Controller{x.s.reporter, x.s.groups.reporter} {
		ready := make(chan struct{})
		wg.Go(func() { _ = reporter.RunReady(ctx, func() { close(ready) }) })
		<-ready
	}
	x.stop = func() { cancel(); wg.Wait() }
	for _, n := range nodes {
		x.node(n)
	}
	for _, g := range groups {
		x.group(g)
	}
	for _, p := range pods {
		x.pod(nil, p)
	}
}

func (x *table) node(n *corev1.Node) { x.s.onNode(nil, n) }

func (x *table) group(g *schedulingv1beta1.PodGroup) {
	store := x.env.Informers.Scheduling().V1beta1().PodGroups().Informer().GetIndexer()
	old, known, _ := store.Get(g)
	if err := store.Add(g); err != nil {
		x.t.Fatal(err)
	}
	if known {
		x.s.onGroup(old.(*schedulingv1beta1.PodGroup), g)
	} else {
		x.s.onGroup(nil, g)
	}
}

// pod shows a pod; nil: old has gone.
func (x *table) pod(old, pod *corev1.Pod) {
	store := x.env.Informers.Core().V1().Pods().Informer().GetIndexer()
	var err error
	if pod != nil {
		err = store.Add(pod)
	} else {
		err = store.Delete(old)
	}
	if err != nil {
		x.t.Fatal(err)
	}
	x.s.onPod(old, pod)
}

func (x *table) pods(pods ...*schedtest.PodBuilder) {
	for _, p := range pods {
		x.pod(nil, p.Obj())
	}
}

// decide lets the scheduler work on all that is ready.
func (x *table) decide() {
	for x.decideOne() {
	}
}

func (x *table) decideOne() bool {
	pod, _ := x.s.queue.take()
	if pod == nil {
		return false
	}
	if pod.Spec.SchedulingGroup != nil {
		if places, handled := x.s.scheduleGroup(x.t.Context(), pod); handled {
			x.begun = append(x.begun, places...)
			return true
		}
	}
	if place := x.s.schedule(x.t.Context(), pod); place.node != "" {
		x.begun = append(x.begun, place)
	}
	return true
}

// answer ends a binding: the informer shows it, or it failed.
func (x *table) answer(i int, err error) {
	place := x.begun[i]
	x.begun = slices.Delete(x.begun, i, i+1)
	if err != nil {
		x.s.unbound(x.t.Context(), place.pod, place.node, err)
		return
	}
	x.s.queue.remove(place.pod.UID)
	now, gone := x.s.lister.Pods(place.pod.Namespace).Get(place.pod.Name)
	if gone != nil || now.UID != place.pod.UID {
		return
	}
	bound := now.DeepCopy()
	bound.Spec.NodeName = place.node
	x.pod(now, bound)
}

func (x *table) answerAll() {
	for len(x.begun) > 0 {
		x.answer(0, nil)
	}
}

// later lets every back-off end.
func (x *table) later() { x.clock.Step(maxBackoff) }

// on lists the pods that are assumed or bound, by name, sorted.
func (x *table) on() string {
	x.s.mu.Lock()
	defer x.s.mu.Unlock()
	var names []string
	for uid := range x.s.snapshot.placed {
		names = append(names, strings.TrimPrefix(string(uid), "uid-"))
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}

// why is what the scheduler has said of the pod.
func (x *table) why(pod string) string {
	v, _ := x.s.why.Load(loop.Key{Namespace: schedtest.Namespace, Name: pod})
	if r, ok := v.(*reason); ok {
		return r.message
	}
	return ""
}

func (x *table) want(what, on string) {
	x.t.Helper()
	if got := x.on(); got != on {
		x.t.Errorf("%s: on nodes are %q, want %q", what, got, on)
	}
}

func gangPods(group string, n int, cpu string) (out []*schedtest.PodBuilder) {
	for i := range n {
		out = append(out, schedtest.Pod(fmt.Sprintf("%s%d", group, i)).Group(group).CPU(cpu))
	}
	return out
}
