package pressure

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Level is a signal as measured.
type Level struct{ Available, Capacity int64 }

// ThresholdMet is a threshold that a signal has crossed.
type ThresholdMet struct {
	Threshold
	Level
}

// message is why a pod has to go, in the words users search for.
func (c ThresholdMet) message() string {
	format := func(n int64) string {
		if r := c.Signal.resource(); r == "pids" || r == "inodes" {
			return fmt.Sprint(n)
		}
		return resource.NewQuantity(n, resource.BinarySI).String()
	}
	return fmt.Sprintf("The node was low on resource: %s. Threshold quantity: %s, available: %s. ",
		c.Signal.resource(), format(c.limit(c.Capacity)), format(c.Available))
}

// watcher remembers how long thresholds have been crossed.
type watcher struct {
	thresholds []Threshold
	transition time.Duration // how long a condition stays after its cause has gone

	since map[int]time.Time                  // threshold → crossed since
	last  map[v1.NodeConditionType]time.Time // condition → when its cause was last there
}

// observe takes a measurement. It returns the conditions that the node is in
// and the thresholds that have been crossed for their grace, hard and urgent
// ones first. A signal that could not be measured counts as fine.
func (w *watcher) observe(now time.Time, levels map[Signal]Level) (under map[v1.NodeConditionType]bool, crossed []ThresholdMet) {
	if w.since == nil {
		w.since, w.last = map[int]time.Time{}, map[v1.NodeConditionType]time.Time{}
	}
	for i, t := range w.thresholds {
		l, known := levels[t.Signal]
		if !known || l.Available >= t.limit(l.Capacity) {
			delete(w.since, i)
			continue
		}
		if _, ok := w.since[i]; !ok {
			w.since[i] = now
		}
		if now.Sub(w.since[i]) < t.Grace {
			continue
		}
		w.last[t.Signal.condition()] = now
		crossed = append(crossed, ThresholdMet{t, l})
	}
	slices.SortStableFunc(crossed, func(a, b ThresholdMet) int {
		return cmp.Or(
			cmp.Compare(min(a.Grace, 1), min(b.Grace, 1)),
			cmp.Compare(slices.Index(order, a.Signal), slices.Index(order, b.Signal)),
		)
	})
	under = map[v1.NodeConditionType]bool{}
	for c, at := range w.last {
		if at.Equal(now) || now.Sub(at) < w.transition {
			under[c] = true
		}
	}
	return under, crossed
}

// Candidate is a pod that could be evicted and what it uses.
type Candidate struct {
	Pod    *v1.Pod
	QOS    v1.PodQOSClass
	Memory int64 // working set, bytes
	Disk   int64 // bytes of logs, volumes and written files
	Inodes int64 // how many files and directories these are
	Pids   int64
	// Requests are the pod's, overhead included.
	Requests v1.ResourceList
}

func (c Candidate) usage(s Signal) (used, requested int64) {
	switch s.resource() {
	case "memory":
		q := c.Requests[v1.ResourceMemory]
		return c.Memory, q.Value()
	case "pids":
		return c.Pids, 0
	case "inodes":
		return c.Inodes, 0
	}
	q := c.Requests[v1.ResourceEphemeralStorage]
	return c.Disk, q.Value()
}

// rank orders pods for eviction, the first one to evict first: usage above the request
// first, then lower priority, then the larger excess over the request (the order that
// Kubernetes documents for node-pressure eviction); of two that are equal, the youngest.
func rank(s Signal, pods []Candidate) []Candidate {
	out := slices.Clone(pods)
	priority := func(c Candidate) int32 {
		if p := c.Pod.Spec.Priority; p != nil {
			return *p
		}
		return 0
	}
	over := func(used, asked int64) int {
		if r := s.resource(); r != "pids" && r != "inodes" && used > asked { // pods cannot ask for these
			return 0
		}
		return 1
	}
	slices.SortStableFunc(out, func(a, b Candidate) int {
		usedA, askedA := a.usage(s)
		usedB, askedB := b.usage(s)
		return cmp.Or(
			cmp.Compare(over(usedA, askedA), over(usedB, askedB)),
			cmp.Compare(priority(a), priority(b)),
			cmp.Compare(usedB-askedB, usedA-askedA),
			b.Pod.CreationTimestamp.Compare(a.Pod.CreationTimestamp.Time),
		)
	})
	return out
}

// useWords says what the pod used.
func useWords(s Signal, used, requested int64) string {
	if r := s.resource(); r == "pids" || r == "inodes" {
		return ""
	}
	q := func(n int64) string { return resource.NewQuantity(n, resource.BinarySI).String() }
	return fmt.Sprintf("The pod was using %s, request is %s. ", q(used), q(requested))
}
