package nodelifecycle

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	corelisters "k8s.io/client-go/listers/core/v1"
	testingclock "k8s.io/utils/clock/testing"

	"github.com/clusterd/clusterd/sched/schedtest"
)

// Whatever becomes of nodes, the census is what counting them gives.
func TestCensusIsWhatCountingGives(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 1))
		kept, members := newCensus(), map[int]member{}
		for step := range 200 {
			i := r.IntN(8)
			kept.add(members[i], -1)
			members[i] = member{zone: fmt.Sprint(r.IntN(3)), counts: r.IntN(4) > 0, lost: r.IntN(2) == 0}
			kept.add(members[i], 1)
			var nodes []*corev1.Node
			isLost := map[string]bool{}
			for i, m := range members {
				if m.counts {
					node := schedtest.Node(fmt.Sprint(i)).Label(corev1.LabelTopologyZone, m.zone).Obj()
					nodes, isLost[node.Name] = append(nodes, node), m.lost
				}
			}
			all := zones(nodes, func(node *corev1.Node) bool { return isLost[node.Name] })
			if !maps.Equal(kept.zones, all) {
				t.Fatalf("seed %d, step %d: kept %v, counted %v", seed, step, kept.zones, all)
			}
			for zone := range all {
				if got, want := kept.pace(zone), paces(all)[zone]; got != want {
					t.Fatalf("seed %d, step %d, zone %s of %v: pace %v, want %v", seed, step, zone, all, got, want)
				}
			}
		}
	}
}

// lists counts how often all nodes are looked through.
type lists struct {
	corelisters.NodeLister
	n atomic.Int64
}

func (l *lists) List(selector labels.Selector) ([]*corev1.Node, error) {
	l.n.Add(1)
	return l.NodeLister.List(selector)
}

// A new leader looked through all nodes for each of them.
func TestNewLeaderLooksThroughNodesOnce(t *testing.T) {
	const many = 200
	all := nodes(many)
	for i := range many / 4 { // lost in its predecessor's time, and not yet tainted
		all[i].(*corev1.Node).Status.Conditions[0].Status = corev1.ConditionUnknown
	}
	c := schedtest.New(t, all...)
	var counted *lists
	startAt(t, c, Config{}, testingclock.NewFakeClock(time.Now()), func(l *controller) {
		counted = &lists{NodeLister: l.nodes}
		l.nodes = counted
	})
	for i := range many / 4 {
		schedtest.Eventually(t, readyIs(t, c, fmt.Sprint("n", i+1), corev1.ConditionUnknown, 2))
	}
	if n := counted.n.Load(); n > many/10 {
		t.Errorf("all nodes were looked through %d times", n)
	}
}

// After a time in which this process stood still all nodes are silent at once: none
// of them is evicted, not the first one either.
func TestSilenceIsCountedBeforeItIsActedOn(t *testing.T) {
	c := schedtest.New(t, nodes(9)...)
	clock := testingclock.NewFakeClock(time.Now())
	l := startAt(t, c, Config{}, clock, func(*controller) {})
	schedtest.Eventually(t, func() string {
		l.mu.Lock()
		defer l.mu.Unlock()
		if all := l.census.zones[""].All; all != 9 {
			return fmt.Sprintf("%d nodes are counted", all)
		}
		return ""
	})
	// Whatever of the timers is set already: each node is looked at again.
	schedtest.Eventually(t, func() string {
		clock.Step(Grace + time.Second)
		for i := range 9 {
			if fault := readyIs(t, c, fmt.Sprint("n", i+1), corev1.ConditionUnknown, 1)(); fault != "" {
				return fault
			}
		}
		return ""
	})
	list, err := c.Client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range list.Items {
		for _, taint := range list.Items[i].Spec.Taints {
			if taint.Effect == corev1.TaintEffectNoExecute {
				t.Errorf("%s has %v", list.Items[i].Name, taint)
			}
		}
	}
}

// That evictions are suspended is said of some nodes, not of each: half of a cluster
// would be thousands of writes when most of it is lost.
func TestSuspensionIsSaidOfSomeNodes(t *testing.T) {
	const many, lost = 3 * maxSaid, 2 * maxSaid
	all := nodes(many)
	for i := range lost {
		all[i].(*corev1.Node).Status.Conditions[0].Status = corev1.ConditionUnknown
	}
	c := schedtest.New(t, all...)
	l := startAt(t, c, Config{}, testingclock.NewFakeClock(time.Now()), func(*controller) {})
	said := func() int {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.waits)
	}
	schedtest.Eventually(t, func() string {
		if n := said(); n == 0 {
			return "nothing was said"
		}
		return ""
	})
	l.announce() // all nodes are counted by now
	if n := said(); n != maxSaid {
		t.Errorf("it was said of %d nodes, want %d", n, maxSaid)
	}
}
