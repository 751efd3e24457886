package replicaset

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/schedtest"
)

var now = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

func TestDecide(t *testing.T) {
	pod := func(name string) *schedtest.PodBuilder { return schedtest.Pod(name).Created(now.Add(-time.Hour)) }
	ready := func(name string) *schedtest.PodBuilder {
		return pod(name).On("n1").Ready(now.Add(-time.Hour))
	}
	tests := []struct {
		name    string
		want    int32
		pods    []*schedtest.PodBuilder
		perNode map[string]int
		create  int
		delete  []string
	}{
		{name: "nothing to do", want: 1, pods: []*schedtest.PodBuilder{ready("a")}},
		{name: "missing", want: 3, pods: []*schedtest.PodBuilder{ready("a")}, create: 2},
		{name: "burst is bounded", want: 2000, create: 500},
		{name: "all go", want: 0, pods: []*schedtest.PodBuilder{ready("a"), ready("b")}, delete: []string{"a", "b"}},
		{name: "no node before pending", want: 1, pods: []*schedtest.PodBuilder{pod("placed").On("n1"), pod("unplaced")}, delete: []string{"unplaced"}},
		{name: "pending before running", want: 1, pods: []*schedtest.PodBuilder{pod("running").On("n1").Phase(corev1.PodRunning), pod("pending").On("n1")}, delete: []string{"pending"}},
		{name: "not ready before ready", want: 1, pods: []*schedtest.PodBuilder{ready("a"), pod("b").On("n1").Phase(corev1.PodRunning)}, delete: []string{"b"}},
		{name: "cheap before dear", want: 1, pods: []*schedtest.PodBuilder{ready("dear").Annotate(corev1.PodDeletionCost, "10"), ready("free")}, delete: []string{"free"}},
		{name: "negative cost first", want: 1, pods: []*schedtest.PodBuilder{ready("free"), ready("cheap").Annotate(corev1.PodDeletionCost, "-1")}, delete: []string{"cheap"}},
		{name: "crowded node first", want: 2, pods: []*schedtest.PodBuilder{ready("alone").On("n2"), ready("x"), ready("y")}, perNode: map[string]int{"n1": 2, "n2": 1}, delete: []string{"x"}},
		{name: "ready for shorter time", want: 1, pods: []*schedtest.PodBuilder{ready("old"), ready("new").Ready(now.Add(-time.Second))}, delete: []string{"new"}},
		{name: "younger", want: 1, pods: []*schedtest.PodBuilder{pod("old"), pod("new").Created(now.Add(-time.Second))}, delete: []string{"new"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var active []*corev1.Pod
			for _, b := range test.pods {
				active = append(active, b.Obj())
			}
			d := Decide(schedtest.ReplicaSet("web", test.want), active, test.perNode, now)
			var deleted []string
			for _, pod := range d.Delete {
				deleted = append(deleted, pod.Name)
			}
			if d.Create != test.create || !cmp.Equal(deleted, test.delete) {
				t.Errorf("create %d, delete %v; want %d, %v", d.Create, deleted, test.create, test.delete)
			}
		})
	}
}

func TestStatus(t *testing.T) {
	rs := schedtest.ReplicaSet("web", 4)
	rs.Generation = 7
	rs.Spec.MinReadySeconds = 10
	mine := []*corev1.Pod{
		schedtest.Pod("available").Label("app", "web").Ready(now.Add(-time.Minute)).Obj(),
		schedtest.Pod("ready").Label("app", "web").Ready(now.Add(-4 * time.Second)).Obj(),
		schedtest.Pod("starting").Obj(),
		schedtest.Pod("going").Deleting(now).Obj(),
		schedtest.Pod("failed").Phase(corev1.PodFailed).Obj(),
	}
	got, recheck := Status(rs, mine, nil, now)
	want := appsv1.ReplicaSetStatus{
		Replicas: 3, FullyLabeledReplicas: 2, ReadyReplicas: 2, AvailableReplicas: 1,
		TerminatingReplicas: ptr.To[int32](1), ObservedGeneration: 7,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
	if recheck != 6*time.Second {
		t.Errorf("recheck after %v, want 6s", recheck)
	}
}

func TestStatusFailure(t *testing.T) {
	rs := schedtest.ReplicaSet("web", 1)
	failed := &failure{reason: "FailedCreate", err: errors.New("exceeded quota")}
	rs.Status, _ = Status(rs, nil, failed, now)
	if len(rs.Status.Conditions) != 1 || rs.Status.Conditions[0].Reason != "FailedCreate" || rs.Status.Conditions[0].Message != "exceeded quota" {
		t.Fatalf("conditions %+v", rs.Status.Conditions)
	}
	again, _ := Status(rs, nil, failed, now.Add(time.Hour))
	if diff := cmp.Diff(rs.Status, again); diff != "" {
		t.Errorf("the same failure rewrites the status:\n%s", diff)
	}
	healed, _ := Status(rs, nil, nil, now)
	if len(healed.Conditions) != 0 {
		t.Errorf("condition stays after success: %+v", healed.Conditions)
	}
}

func TestPauseGrowsWithTheSet(t *testing.T) {
	for n, want := range map[int32]time.Duration{0: 0, 32: 0, 400: 40 * time.Millisecond, 2500: 200 * time.Millisecond} {
		if got := pause(n); got != want {
			t.Errorf("events of %d pods gather for %v, want %v", n, got, want)
		}
	}
}
