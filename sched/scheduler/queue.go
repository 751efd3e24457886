package scheduler

import (
	"container/heap"
	"context"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/utils/clock"
)

// Back-off of a pod between attempts, doubling, unless Config says another; and how long a pod may wait for
// a change that concerns it before it is tried anyway.
const (
	firstBackoff = 100 * time.Millisecond
	maxBackoff   = 10 * time.Second
	maxParked    = time.Minute
)

// place is where a waiting pod is.
//
//	        add                pop
//	───────────────► ready ───────────► inFlight ──bound──► (gone)
//	                   ▲                  │   │
//	       due         │                  │   └─ no node ──► parked
//	inBackoff ─────────┘                  │                    │
//	    ▲  ▲                              │                    │ a change that
//	    │  └───────── bind failed ────────┘                    │ may help, or
//	    └──────────────────────────────────────────────────────┘ maxParked
type place int

const (
	nowhere place = iota // before the first push
	ready
	inBackoff
	parked
	inFlight
)

// waiting is one pod without a node.
type waiting struct {
	pod      *corev1.Pod
	priority int32
	seq      uint64 // order of arrival
	place    place
	index    int // in the heap it is in
	attempts int
	tried    time.Time // start of the last attempt
	due      time.Time // when its back-off ends
	// missed gathers the changes that happen while it is in flight: a decision taken on
	// the state before them must not park the pod.
	missed  change
	wokenBy change
	search  search // how far the preemptions for it have come
}

// queue orders pods without a node: by priority, then by age. Pods that cannot
// be placed wait aside until something changes that may help them.
type queue struct {
	clock clock.WithTicker
	// first and most bound the back-off.
	first, most time.Duration
	wake        chan struct{} // capacity 1: look again
	// priorityOf is by which a pod waits.
	priorityOf func(*corev1.Pod) int32

	mu   sync.Mutex // guards below
	pods map[types.UID]*waiting
	// parked and inFlight are those of pods in that place: a change concerns
	// no others, and a long queue would cost each of them a walk.
	parked, inFlight map[*waiting]bool
	ready            readyHeap
	backed           backedHeap
	seq              uint64
}

func newQueue(clock clock.WithTicker) *queue {
	return &queue{clock: clock, first: firstBackoff, most: maxBackoff, wake: make(chan struct{}, 1), priorityOf: corev1helpers.PodPriority, pods: map[types.UID]*waiting{}, parked: map[*waiting]bool{}, inFlight: map[*waiting]bool{}}
}

func (q *queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// add lets a pod wait, or renews what is known of one that does. A pod that was
// parked and has changed is tried again.
func (q *queue) add(pod *corev1.Pod) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if w := q.pods[pod.UID]; w != nil {
		q.again(w, pod)
		return
	}
	q.seq++
	w := &waiting{pod: pod, priority: q.priorityOf(pod), seq: q.seq, place: nowhere}
	q.pods[pod.UID] = w
	q.push(w)
}

// renew is add for a pod that waits already, if it does.
func (q *queue) renew(pod *corev1.Pod) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if w := q.pods[pod.UID]; w != nil {
		q.again(w, pod)
	}
}

func (q *queue) again(w *waiting, pod *corev1.Pod) {
	w.pod = pod
	w.priority = q.priorityOf(pod)
	switch w.place {
	case ready:
		heap.Fix(&q.ready, w.index)
	case parked:
		q.retry(w)
	case inFlight:
		w.missed = anything
	}
}

// takeToo takes a pod that is not in flight, wherever it waits, to be decided
// together with one that pop gave. It reports whether it was there.
func (q *queue) takeToo(uid types.UID) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	w := q.pods[uid]
	if w == nil || w.place == inFlight {
		return false
	}
	switch w.place {
	case ready:
		heap.Remove(&q.ready, w.index)
	case inBackoff:
		heap.Remove(&q.backed, w.index)
	}
	q.flies(w, q.clock.Now())
	return true
}

// flies makes a pod that is in no heap the caller's, for one attempt.
func (q *queue) flies(w *waiting, now time.Time) {
	w.tried, w.missed = now, 0
	w.attempts++
	q.move(w, inFlight)
}

// refresh renews what is known of a waiting pod without trying it again: only
// its status changed.
func (q *queue) refresh(pod *corev1.Pod) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if w := q.pods[pod.UID]; w != nil {
		w.pod = pod
	}
}

// remove forgets a pod: bound, deleted or no longer ours.
func (q *queue) remove(uid types.UID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	w := q.pods[uid]
	if w == nil {
		return
	}
	delete(q.pods, uid)
	defer q.move(w, nowhere)
	switch w.place {
	case ready:
		heap.Remove(&q.ready, w.index)
	case inBackoff:
		heap.Remove(&q.backed, w.index)
	}
}

// changed wakes the parked pods that the change may help.
func (q *queue) changed(c change) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for w := range q.inFlight {
		w.missed |= c
	}
	for w := range q.parked {
		if w.wokenBy&c != 0 {
			q.retry(w)
		}
	}
}

// wakeUp has a pod tried again that is parked, or about to be.
func (q *queue) wakeUp(uid types.UID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch w := q.pods[uid]; {
	case w == nil:
	case w.place == parked:
		q.retry(w)
	case w.place == inFlight:
		w.missed = anything
	}
}

// pop returns the next pod to place; it blocks until there is one or ctx ends.
// The caller must answer with park, fail or remove.
func (q *queue) pop(ctx context.Context) (*corev1.Pod, bool) {
	for ctx.Err() == nil {
		pod, next := q.take()
		if pod != nil {
			return pod, true
		}
		timer := q.clock.NewTimer(next)
		select {
		case <-ctx.Done():
		case <-q.wake:
		case <-timer.C():
		}
		timer.Stop()
	}
	return nil, false
}

// take returns a ready pod, or the time until it is worth looking again.
func (q *queue) take() (*corev1.Pod, time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := q.clock.Now()
	for len(q.backed) > 0 && !q.backed[0].due.After(now) {
		q.push(heap.Pop(&q.backed).(*waiting))
	}
	if len(q.ready) > 0 {
		w := heap.Pop(&q.ready).(*waiting)
		q.flies(w, now)
		return w.pod, 0
	}
	next := maxParked
	for w := range q.parked {
		left := w.tried.Add(maxParked).Sub(now)
		if left <= 0 {
			q.retry(w)
			left = 0
		}
		next = min(next, left)
	}
	if len(q.backed) > 0 {
		next = min(next, q.backed[0].due.Sub(now))
	}
	return nil, max(next, time.Millisecond)
}

// park lets a inFlight pod wait for one of the changes in wokenBy.
func (q *queue) park(uid types.UID, wokenBy change) {
	q.mu.Lock()
	defer q.mu.Unlock()
	w := q.pods[uid]
	if w == nil || w.place != inFlight {
		return
	}
	w.wokenBy, w.search = wokenBy, search{}
	if w.missed&wokenBy != 0 {
		q.retry(w)
		return
	}
	q.move(w, parked)
}

// fail lets a inFlight pod be tried again after its back-off.
func (q *queue) fail(uid types.UID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if w := q.pods[uid]; w != nil && w.place == inFlight {
		q.retry(w)
	}
}

// goOn is fail for a pod whose preemption has nodes left to look at.
func (q *queue) goOn(uid types.UID, at search) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if w := q.pods[uid]; w != nil && w.place == inFlight {
		w.search = at
		q.retry(w)
	}
}

// searched is how far the preemptions for the pod have come.
func (q *queue) searched(uid types.UID) search {
	q.mu.Lock()
	defer q.mu.Unlock()
	if w := q.pods[uid]; w != nil {
		return w.search
	}
	return search{}
}

// retry makes w ready once its back-off, counted from its last attempt, is over.
func (q *queue) retry(w *waiting) {
	wait := min(q.first<<min(w.attempts-1, 10), q.most)
	w.due = w.tried.Add(wait)
	q.move(w, inBackoff)
	heap.Push(&q.backed, w)
	q.signal()
}

func (q *queue) push(w *waiting) {
	q.move(w, ready)
	heap.Push(&q.ready, w)
	q.signal()
}

// move changes the pod's place, and the sets and gauges with it.
func (q *queue) move(w *waiting, to place) {
	switch w.place {
	case parked:
		delete(q.parked, w)
	case inFlight:
		delete(q.inFlight, w)
	}
	switch to {
	case parked:
		q.parked[w] = true
	case inFlight:
		q.inFlight[w] = true
	}
	if w.place != nowhere {
		waitingPods.WithLabelValues(w.place.String()).Dec()
	}
	if to != nowhere {
		waitingPods.WithLabelValues(to.String()).Inc()
	}
	w.place = to
}

func (p place) String() string {
	return [...]string{"nowhere", "ready", "backoff", "unschedulable", "in_flight"}[p]
}

type readyHeap []*waiting

func (h readyHeap) Len() int { return len(h) }
func (h readyHeap) Less(i, j int) bool {
	if h[i].priority != h[j].priority {
		return h[i].priority > h[j].priority
	}
	return h[i].seq < h[j].seq
}
func (h readyHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i]; h[i].index, h[j].index = i, j }
func (h *readyHeap) Push(x any)   { w := x.(*waiting); w.index = len(*h); *h = append(*h, w) }
func (h *readyHeap) Pop() any     { return popLast((*[]*waiting)(h)) }

type backedHeap []*waiting

func (h backedHeap) Len() int           { return len(h) }
func (h backedHeap) Less(i, j int) bool { return h[i].due.Before(h[j].due) }
func (h backedHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i]; h[i].index, h[j].index = i, j }
func (h *backedHeap) Push(x any)        { w := x.(*waiting); w.index = len(*h); *h = append(*h, w) }
func (h *backedHeap) Pop() any          { return popLast((*[]*waiting)(h)) }

func popLast(h *[]*waiting) *waiting {
	old := *h
	w := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return w
}
