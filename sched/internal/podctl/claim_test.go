package podctl

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/loop"
)

// The bug: Jobs made more pods than they asked for. A pass read a cache without
// the pods just made, the cache then came to show them, and only then was asked
// whether it shows them.
func TestClaimAsksBeforeItReads(t *testing.T) {
	client := fake.NewClientset()
	kind := appsv1.SchemeGroupVersion.WithKind("ReplicaSet")
	factory := informers.NewSharedInformerFactory(client, 0)
	c, err := New(loop.Env{Client: client, Informers: factory, Events: loop.NewEvents(client, clock.RealClock{}), Clock: clock.RealClock{}}, kind, "test")
	if err != nil {
		t.Fatal(err)
	}
	c.Events = record.NewFakeRecorder(20)
	rs := &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "u"}}
	pod := func(name string) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: "u-1", Labels: map[string]string{"app": "web"}}}
	}
	made := pod("web-1")
	made.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(rs, kind)}
	if err := c.Create(t.Context(), rs, made); err != nil {
		t.Fatal(err)
	}
	orphan := pod("orphan")
	if err := c.pods.Add(orphan); err != nil {
		t.Fatal(err)
	}
	selector := &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
	claim := func(meanwhile func()) (int, bool) {
		t.Helper()
		mine, wait, err := c.Claim(t.Context(), rs, selector, func(*corev1.Pod) bool { meanwhile(); return false }, nil)
		if err != nil {
			t.Fatal(err)
		}
		return len(mine), wait > 0
	}
	if n, waits := claim(func() {
		if err := c.pods.Add(made); err != nil {
			t.Fatal(err)
		}
		c.Pending.SawPresent(loop.KeyOf(rs), loop.KeyOf(made))
	}); n != 0 || !waits {
		t.Errorf("%d pods, waits %v: what came after the cache was read counts as seen", n, waits)
	}
	if n, waits := claim(func() {}); n != 1 || waits {
		t.Errorf("%d pods, waits %v, want the one made and no wait", n, waits)
	}
}
