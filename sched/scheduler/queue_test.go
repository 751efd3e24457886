package scheduler

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	testingclock "k8s.io/utils/clock/testing"

	"github.com/clusterd/clusterd/sched/schedtest"
)

func take(t *testing.T, q *queue, want string) time.Duration {
	t.Helper()
	pod, next := q.take()
	got := ""
	if pod != nil {
		got = pod.Name
	}
	if got != want {
		t.Fatalf("took %q, want %q", got, want)
	}
	return next
}

func newTestQueue(pods ...*corev1.Pod) (*queue, *testingclock.FakeClock) {
	clock := testingclock.NewFakeClock(time.Unix(1000, 0))
	q := newQueue(clock)
	for _, p := range pods {
		q.add(p)
	}
	return q, clock
}

func TestQueueOrder(t *testing.T) {
	q, _ := newTestQueue(schedtest.Pod("a").Obj(), schedtest.Pod("b").Priority(10).Obj(), schedtest.Pod("c").Obj())
	take(t, q, "b")
	take(t, q, "a")
	take(t, q, "c")
	take(t, q, "")
}

func TestParkedPodWaitsForItsChange(t *testing.T) {
	pod := schedtest.Pod("a").Obj()
	q, clock := newTestQueue(pod)
	take(t, q, "a")
	q.park(pod.UID, nodeAdded|podGone)
	q.changed(nodeLabels)
	clock.Step(10 * time.Second)
	take(t, q, "")
	q.changed(podGone)
	take(t, q, "a") // the back-off was over long ago
}

func TestBackoffDoubles(t *testing.T) {
	pod := schedtest.Pod("a").Obj()
	q, clock := newTestQueue(pod)
	for _, wait := range []time.Duration{100 * time.Millisecond, 200 * time.Millisecond, 400 * time.Millisecond} {
		take(t, q, "a")
		q.fail(pod.UID)
		if next := take(t, q, ""); next != wait {
			t.Errorf("back-off %v, want %v", next, wait)
		}
		clock.Step(wait)
	}
}

// A change that happens between the decision and parking is not lost.
func TestChangeWhileFlying(t *testing.T) {
	pod := schedtest.Pod("a").Obj()
	q, clock := newTestQueue(pod)
	take(t, q, "a")
	q.changed(podGone)
	q.park(pod.UID, podGone)
	clock.Step(firstBackoff)
	take(t, q, "a")
}

func TestForgottenPodIsTriedAgain(t *testing.T) {
	pod := schedtest.Pod("a").Obj()
	q, clock := newTestQueue(pod)
	take(t, q, "a")
	q.park(pod.UID, podGone)
	clock.Step(maxParked)
	take(t, q, "")
	take(t, q, "a")
}

func TestRemove(t *testing.T) {
	a, b, c := schedtest.Pod("a").Obj(), schedtest.Pod("b").Obj(), schedtest.Pod("c").Obj()
	q, clock := newTestQueue(a, b, c)
	take(t, q, "a")
	q.fail(a.UID)
	take(t, q, "b")
	q.remove(a.UID)
	q.remove(b.UID)
	q.remove(c.UID)
	q.park(b.UID, anything)
	q.fail(b.UID)
	clock.Step(time.Hour)
	q.changed(anything)
	take(t, q, "")
}

func TestPopEndsWithContext(t *testing.T) {
	q, _ := newTestQueue()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, ok := q.pop(ctx); ok {
		t.Error("pop returned a pod from an empty queue")
	}
}
