package job

import (
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/internal/podctl"
	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// The bug of issue 9: a pod whose name was taken failed the pass.
func TestTakenName(t *testing.T) {
	client := fake.NewClientset()
	refused := schedtest.RefuseNames(client, "pods", 2)
	env := loop.Env{Client: client, Informers: informers.NewSharedInformerFactory(client, 0), Events: loop.NewEvents(client, clock.RealClock{}), Clock: clock.RealClock{}}
	control, err := podctl.New(env, Kind, "test")
	if err != nil {
		t.Fatal(err)
	}
	c := &controller{client: client, clock: env.Clock, pods: control}
	j := newJob(size(1, 1))
	if err := c.create(t.Context(), j, []Create{{Index: -1}}); err != nil {
		t.Errorf("create a pod after a name that is taken: %v", err)
	}
	list, err := client.CoreV1().Pods(j.Namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) != 1 || refused() != 2 {
		t.Errorf("%d names were refused, the pods are %v: %v", refused(), list.Items, err)
	}
}

// TestUnseen: a pod that a new leader's cache does not show yet is not taken for one that
// has gone, which would be counted now and once more when it shows.
func TestUnseen(t *testing.T) {
	j := newJob(size(3, 3))
	j.Spec.Template.Labels = map[string]string{"job": "j"}
	j.Spec.Selector = &metav1.LabelSelector{MatchLabels: j.Spec.Template.Labels}
	late, seen := pod(j, "late succeeded"), pod(j, "seen succeeded")
	j.Status.UncountedTerminatedPods = &batchv1.UncountedTerminatedPods{Succeeded: []types.UID{late.UID, seen.UID, "uid-gone"}}
	client := fake.NewSimpleClientset(late, seen)
	c := &controller{client: client}
	mine, err := c.unseen(t.Context(), j, []*corev1.Pod{seen})
	if err != nil {
		t.Fatal(err)
	}
	got := Decide(Input{Job: j, Pods: mine, Now: now}).Status
	if got.Succeeded != 1 || len(got.UncountedTerminatedPods.Succeeded) != 2 {
		t.Errorf("%d are counted and %v are not, want the one that has gone", got.Succeeded, got.UncountedTerminatedPods.Succeeded)
	}
	client.ClearActions()
	if _, err := c.unseen(t.Context(), newJob(size(3, 3)), []*corev1.Pod{seen}); err != nil || len(client.Actions()) > 0 {
		t.Errorf("asks %v though none is missing: %v", client.Actions(), err)
	}
}
