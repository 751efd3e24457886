package kubectl

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/features"
)

// restart is one of a pod's first container: its number, and how long after the end
// of the instance before it the next one started, by the agent's clock.
type restart struct {
	count int32
	after time.Duration
}

// countRestarts follows the first container of a pod that is yet to be made, beside
// what else the test does, until it was started again so often. What is returned waits
// for that.
func (k *kit) countRestarts(name string, times int32) func() ([]restart, error) {
	k.Helper()
	before, err := k.api.CoreV1().Pods(k.ns).List(k.Context(), metav1.ListOptions{FieldSelector: "metadata.name=" + name})
	k.must(err)
	if len(before.Items) > 0 {
		k.Fatalf("%s is there already", name)
	}
	// Five restarts take two and a half minutes of back-off alone.
	ctx, cancel := context.WithTimeout(k.Context(), 10*time.Minute)
	w, err := k.api.CoreV1().Pods(k.ns).Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name, ResourceVersion: before.ResourceVersion})
	k.must(err)
	// Of instances by number. One that runs for a moment may not be seen to run: when
	// it started is known from its end then.
	started, ended := map[int32]time.Time{}, map[int32]time.Time{}
	over := func(n int32, t *corev1.ContainerStateTerminated) {
		if t != nil {
			started[n], ended[n] = t.StartedAt.Time, t.FinishedAt.Time
		}
	}
	done := make(chan error, 1)
	go func() {
		defer cancel()
		defer w.Stop()
		last := int32(0)
		for event := range w.ResultChan() {
			p, ok := event.Object.(*corev1.Pod)
			if !ok || p.DeletionTimestamp != nil {
				done <- fmt.Errorf("the watch says %s: %+v", event.Type, event.Object)
				return
			}
			if len(p.Status.ContainerStatuses) == 0 {
				continue
			}
			s := p.Status.ContainerStatuses[0]
			n := s.RestartCount
			if n < last || n > last+1 {
				done <- fmt.Errorf("the count was %d and is %d", last, n)
				return
			}
			last = n
			switch {
			case s.State.Running != nil:
				started[n] = s.State.Running.StartedAt.Time
				over(n-1, s.LastTerminationState.Terminated)
			case s.State.Terminated != nil:
				over(n, s.State.Terminated)
				over(n-1, s.LastTerminationState.Terminated)
			default: // it waits for the next start
				over(n, s.LastTerminationState.Terminated)
			}
			if !started[times].IsZero() {
				done <- nil
				return
			}
		}
		done <- fmt.Errorf("the watch has ended: %w", context.Cause(ctx))
	}()
	return func() (seen []restart, err error) {
		err = <-done
		for n := int32(1); n <= times && !started[n].IsZero() && !ended[n-1].IsZero(); n++ {
			seen = append(seen, restart{n, started[n].Sub(ended[n-1])})
		}
		return seen, err
	}
}

// growing fails the test unless the restarts are counted one by one, each after the
// wait that is twice the one before: 10 s before the second. The API tells whole
// seconds.
func (k *kit) growing(counted func() ([]restart, error), times int) {
	k.Helper()
	features.Conforms(k, 327)
	seen, err := counted()
	if err != nil || len(seen) != times {
		k.Fatalf("restarts %v, want %d (%v)", seen, times, err)
	}
	for i, r := range seen {
		if r.count != int32(i+1) {
			k.Errorf("restart %d counts as %d", i+1, r.count)
		}
		if least := 5 * time.Second << i; i > 0 && r.after < least-time.Second {
			k.Errorf("restart %d came %s after the end, want %s at least", i+1, r.after, least)
		}
	}
	k.Logf("restarts %v", seen)
}
