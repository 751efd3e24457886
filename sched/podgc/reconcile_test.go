package podgc

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/sched/schedtest"
)

var now = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

// fenced is a pod that its node ends by itself.
func fenced(pod *corev1.Pod) *corev1.Pod {
	pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{Type: names.SelfFencingCondition, Status: corev1.ConditionTrue})
	return pod
}

func TestDecide(t *testing.T) {
	off := schedtest.Node("off").Taint(corev1.TaintNodeOutOfService, "", corev1.TaintEffectNoExecute).Obj()
	off.Status.Conditions[0].Status = corev1.ConditionUnknown
	nodes := map[string]*corev1.Node{"n1": schedtest.Node("n1").Obj(), "off": off, "lapsed": schedtest.Node("lapsed").Obj()}
	taken := func(node string) bool { return node == "lapsed" }
	missing := map[string]time.Time{"old": now.Add(-quarantine), "new": now.Add(-time.Second)}
	all := []*corev1.Pod{
		schedtest.Pod("fine").On("n1").Obj(),
		schedtest.Pod("waiting").Obj(),
		schedtest.Pod("never-placed").Deleting(now).Obj(),
		schedtest.Pod("terminating").On("n1").Deleting(now).Obj(),
		schedtest.Pod("lost").On("old").Obj(),
		schedtest.Pod("too-soon").On("new").Obj(),
		schedtest.Pod("lost-deleted").On("new").Deleting(now).Obj(),
		schedtest.Pod("off-deleted").On("off").Deleting(now).Obj(),
		schedtest.Pod("off-kept").On("off").Obj(),
		fenced(schedtest.Pod("fenced").On("lapsed").Deleting(now).Obj()),
		fenced(schedtest.Pod("fenced-kept").On("lapsed").Obj()),
		fenced(schedtest.Pod("fenced-elsewhere").On("n1").Deleting(now).Obj()),
		schedtest.Pod("not-fenced").On("lapsed").Deleting(now).Obj(),
		schedtest.Pod("done").On("n1").Phase(corev1.PodSucceeded).Obj(),
	}
	got := map[string]Reason{}
	for _, v := range Decide(all, nodes, missing, taken, now) {
		got[v.Pod.Name] = v.Reason
	}
	want := map[string]Reason{"never-placed": NeverPlaced, "lost": NodeGone, "lost-deleted": NodeGone, "off-deleted": OutOfService, "fenced": Fenced}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestOldestFinishedPodsGo(t *testing.T) {
	var all []*corev1.Pod
	for i := range maxFinished + 2 {
		all = append(all, schedtest.Pod(fmt.Sprint(i)).On("n1").Phase(corev1.PodFailed).Created(now.Add(-time.Duration(i)*time.Second)).Obj())
	}
	got := Decide(all, map[string]*corev1.Node{"n1": schedtest.Node("n1").Obj()}, nil, nil, now)
	if len(got) != 2 || got[0].Pod.Name != fmt.Sprint(maxFinished+1) || got[1].Pod.Name != fmt.Sprint(maxFinished) {
		t.Errorf("removes %d pods", len(got))
	}
}
