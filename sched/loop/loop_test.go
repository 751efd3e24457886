package loop

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/clock"
	testingclock "k8s.io/utils/clock/testing"

	"github.com/clusterd/clusterd/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// A reconcile that fails or panics is tried again, later and later; other keys
// go on meanwhile.
func TestRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		calls := map[string][]time.Duration{}
		begin := time.Now()
		c := New("test", Env{Clock: clock.RealClock{}}, 2, func(_ context.Context, key Key) error {
			mu.Lock()
			defer mu.Unlock()
			calls[key.Name] = append(calls[key.Name], time.Since(begin))
			switch n := len(calls[key.Name]); {
			case key.Name == "fails" && n < 4:
				return errors.New("not yet")
			case key.Name == "panics" && n < 2:
				panic("oh")
			}
			return nil
		})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			err := c.RunReady(ctx, func() {
				for _, name := range []string{"fails", "panics", "fine"} {
					c.Enqueue(Key{Name: name})
				}
			})
			if err != nil {
				t.Errorf("ended with %v", err)
			}
		})
		time.Sleep(time.Minute) // the bubble's clock: no time passes outside
		mu.Lock()
		want := []time.Duration{0, 5 * time.Millisecond, 15 * time.Millisecond, 35 * time.Millisecond}
		if got := calls["fails"]; fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("calls at %v, want %v", got, want)
		}
		if len(calls["panics"]) != 2 || len(calls["fine"]) != 1 {
			t.Errorf("calls %v", calls)
		}
		mu.Unlock()
		cancel()
		wg.Wait()
	})
}

// Nothing is reconciled while Hold waits, and all of it afterwards; a loop ends while it waits.
func TestHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		held, begin := make(chan struct{}), time.Now()
		var mu sync.Mutex
		var calls []time.Duration
		c := New("test", Env{Clock: clock.RealClock{}, Hold: func(ctx context.Context) {
			select {
			case <-held:
			case <-ctx.Done():
			}
		}}, 2, func(context.Context, Key) error {
			mu.Lock()
			defer mu.Unlock()
			calls = append(calls, time.Since(begin))
			return nil
		})
		for _, release := range []bool{true, false} {
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			wg.Go(func() {
				if err := c.RunReady(ctx, func() { c.Enqueue(Key{Name: "a"}); c.Enqueue(Key{Name: "b"}) }); err != nil {
					t.Errorf("ended with %v", err)
				}
			})
			time.Sleep(time.Minute)
			if release {
				close(held)
				synctest.Wait()
			}
			cancel()
			wg.Wait()
			held = make(chan struct{})
		}
		if want := []time.Duration{time.Minute, time.Minute}; fmt.Sprint(calls) != fmt.Sprint(want) {
			t.Errorf("calls at %v, want %v", calls, want)
		}
	})
}

func TestPending(t *testing.T) {
	owner, pod := Key{Namespace: "ns", Name: "rs"}, Key{Namespace: "ns", Name: "pod"}
	notFound := apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, "pod")
	quota := apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "pod", errors.New("exceeded quota"))
	lostAnswer := &url.Error{Op: "Post", URL: "x", Err: context.DeadlineExceeded}
	alive := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "u"}}
	dying := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "u", DeletionTimestamp: &metav1.Time{Time: time.Unix(1, 0)}}}
	tests := []struct {
		name    string
		do      func(p *Pending)
		after   time.Duration
		live    *corev1.Pod // nil: does not exist
		settled bool
	}{
		{"nothing written", func(*Pending) {}, 0, nil, true},
		{"created, not seen", func(p *Pending) { p.Creating(owner, pod); p.Answered(owner, pod, nil) }, 0, alive, false},
		{"created, seen", func(p *Pending) { p.Creating(owner, pod); p.Answered(owner, pod, nil); p.SawPresent(owner, pod) }, 0, alive, true},
		{"seen before the answer", func(p *Pending) { p.Creating(owner, pod); p.SawPresent(owner, pod); p.Answered(owner, pod, nil) }, 0, alive, true},
		{"came and went", func(p *Pending) { p.Creating(owner, pod); p.SawGone(owner, pod) }, 0, nil, true},
		{"refused", func(p *Pending) { p.Creating(owner, pod); p.Answered(owner, pod, quota) }, 0, nil, true},
		{"answer lost", func(p *Pending) { p.Creating(owner, pod); p.Answered(owner, pod, lostAnswer) }, 0, nil, false},
		{"answer lost, was not made", func(p *Pending) { p.Creating(owner, pod); p.Answered(owner, pod, lostAnswer) }, verifyAfter, nil, true},
		{"answer lost, was made", func(p *Pending) { p.Creating(owner, pod); p.Answered(owner, pod, lostAnswer) }, verifyAfter, alive, false},
		{"deleting, not seen", func(p *Pending) { p.Deleting(owner, pod, "u") }, 0, dying, false},
		{"deleting, another event", func(p *Pending) { p.Deleting(owner, pod, "u"); p.SawPresent(owner, pod) }, 0, dying, false},
		{"deleting, seen", func(p *Pending) { p.Deleting(owner, pod, "u"); p.SawGone(owner, pod) }, 0, nil, true},
		{"deleting, was gone", func(p *Pending) { p.Deleting(owner, pod, "u"); p.Answered(owner, pod, notFound) }, 0, nil, true},
		{"delete got lost", func(p *Pending) { p.Deleting(owner, pod, "u") }, verifyAfter, alive, true},
		{"deleted and recreated", func(p *Pending) { p.Deleting(owner, pod, "other") }, verifyAfter, alive, true},
		{"cache is far behind", func(p *Pending) { p.Deleting(owner, pod, "u") }, verifyAfter, dying, false},
		{"owner forgotten", func(p *Pending) { p.Creating(owner, pod); p.Forget(owner) }, 0, alive, true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			clock := testingclock.NewFakeClock(time.Unix(0, 0))
			p := NewPending(clock, func(context.Context, Key) (metav1.Object, error) {
				if test.live == nil {
					return nil, notFound
				}
				return test.live, nil
			})
			test.do(p)
			clock.Step(test.after)
			settled, wait, err := p.Settled(t.Context(), owner)
			if err != nil || settled != test.settled || !settled && wait <= 0 {
				t.Errorf("settled %v, wait %v, err %v; want %v", settled, wait, err, test.settled)
			}
		})
	}
}

func TestPendingServerDown(t *testing.T) {
	clock := testingclock.NewFakeClock(time.Unix(0, 0))
	down := errors.New("connection refused")
	p := NewPending(clock, func(context.Context, Key) (metav1.Object, error) { return nil, down })
	p.Creating(Key{Name: "rs"}, Key{Name: "pod"})
	clock.Step(verifyAfter)
	if settled, _, err := p.Settled(t.Context(), Key{Name: "rs"}); settled || !errors.Is(err, down) {
		t.Errorf("settled %v, err %v", settled, err)
	}
}

// The same event many times is one Event with a count.
func TestEventsAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cs := fake.NewSimpleClientset()
		events := NewEvents(cs, clock.RealClock{})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { _ = events.Run(ctx) })
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "u"}}
		for range 5 {
			events.For("tester").Eventf(pod, corev1.EventTypeWarning, "Failed", "no %s", "luck")
			time.Sleep(time.Millisecond) // the bubble's clock
		}
		synctest.Wait()
		list, err := cs.CoreV1().Events("ns").List(t.Context(), metav1.ListOptions{})
		if err != nil || len(list.Items) != 1 {
			t.Fatalf("%d events, err %v", len(list.Items), err)
		}
		e := list.Items[0]
		if e.Count != 5 || e.Message != "no luck" || e.InvolvedObject.Kind != "Pod" || e.Source.Component != "tester" {
			t.Errorf("event %+v", e)
		}
		cancel()
		wg.Wait()
	})
}

// No goroutine reads the queue: recording goes on, and does not block.
func TestEventsNeverBlock(t *testing.T) {
	events := NewEvents(fake.NewSimpleClientset(), clock.RealClock{})
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}}
	for range eventQueue + 10 {
		events.For("tester").Event(pod, corev1.EventTypeNormal, "Flood", "x")
	}
}
