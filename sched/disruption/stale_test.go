package disruption

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// target is a pod that was to be disrupted that long ago.
func target(name, reason string, ago time.Duration) *schedtest.PodBuilder {
	b := schedtest.Pod(name).On("n").Phase(corev1.PodRunning)
	b.P.Status.Conditions = []corev1.PodCondition{{
		Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: reason, LastTransitionTime: metav1.NewTime(time.Now().Add(-ago)),
	}}
	return b
}

func TestStale(t *testing.T) {
	now := time.Now()
	with := func(b *schedtest.PodBuilder, change func(*corev1.Pod)) *corev1.Pod { change(b.P); return b.P }
	for _, tt := range []struct {
		name  string
		pod   *corev1.Pod
		stale bool
		later bool // it will be
	}{
		{"no such condition", schedtest.Pod("p").Obj(), false, false},
		{"just evicted", target("p", "EvictionByEvictionAPI", time.Second).Obj(), false, true},
		{"long ago", target("p", "EvictionByEvictionAPI", 3*time.Minute).Obj(), true, false},
		{"by its node", target("p", corev1.PodReasonTerminationByKubelet, 3*time.Minute).Obj(), false, false},
		{"on its way out", target("p", "EvictionByEvictionAPI", 3*time.Minute).Deleting(now).Obj(), false, false},
		{"ended", target("p", "EvictionByEvictionAPI", 3*time.Minute).Phase(corev1.PodFailed).Obj(), false, false},
		{"taken back", with(target("p", "EvictionByEvictionAPI", 3*time.Minute), func(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }), false, false},
	} {
		if is, in := stale(tt.pod, now); is != tt.stale || (in > 0) != tt.later {
			t.Errorf("%s: %t, in %s", tt.name, is, in)
		}
	}
}

// A pod that was evicted and not deleted kept DisruptionTarget for ever.
func TestStaleConditionIsTakenBack(t *testing.T) {
	c := schedtest.New(t, []runtime.Object{target("stale", "EvictionByEvictionAPI", time.Hour).Obj(), target("fresh", "EvictionByEvictionAPI", 0).Obj()}...)
	env := loop.Env{Client: c.Client, Clock: clock.RealClock{}, Informers: informers.NewSharedInformerFactory(c.Client, 0), Events: loop.NewEvents(c.Client, clock.RealClock{})}
	l := New(env)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	env.Informers.StartWithContext(ctx)
	wg.Go(func() {
		if err := l.Run(ctx); err != nil {
			t.Errorf("the loop ended with %v", err)
		}
	})
	defer func() { cancel(); wg.Wait(); env.Informers.Shutdown() }()
	is := func(name string) (*corev1.PodCondition, error) {
		pod, err := c.Client.CoreV1().Pods(schedtest.Namespace).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		return pods.Condition(pod, corev1.DisruptionTarget), nil
	}
	schedtest.Eventually(t, func() string {
		condition, err := is("stale")
		if err != nil || condition.Status != corev1.ConditionFalse {
			return fmt.Sprintf("the condition is %v: %v", condition, err)
		}
		return ""
	})
	if condition, err := is("fresh"); err != nil || condition.Status != corev1.ConditionTrue {
		t.Errorf("one that was just evicted has %v: %v", condition, err)
	}
}
