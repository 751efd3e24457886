package scheduler

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/sched/schedtest"
)

func TestWhyEach(t *testing.T) {
	node := schedtest.Node
	s := world([]*schedtest.NodeBuilder{
		node("c").Has("cpu", "8").Label("disk", "ssd").Cordon(),
		node("a").Has("cpu", "500m").Has("memory", "1Mi").Label("disk", "ssd"),
		node("b").Has("cpu", "500m").Taint("k", "v", corev1.TaintEffectNoSchedule),
	})
	p := newPodInfo(schedtest.Pod("p").CPU("1").Memory("1Gi").Select("disk", "ssd").Obj())
	want := `a: NodeResourcesFit: Insufficient cpu, Insufficient memory
b: TaintToleration: node(s) had untolerated taint {k: v}; NodeAffinity: node(s) didn't match Pod's node affinity/selector; NodeResourcesFit: Insufficient cpu
c: NodeUnschedulable: node(s) were unschedulable`
	if got := whyEach(s, p); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	for i := range 200 {
		s.setNode(node(fmt.Sprintf("n%03d", i)).Obj())
	}
	lines := strings.Split(whyEach(s, p), "\n")
	if len(lines) != explained+1 || lines[explained] != "and 103 more nodes" {
		t.Errorf("%d lines, the last %q", len(lines), lines[len(lines)-1])
	}
}

// TestExplainIsAskedFor: the annotation on a pod that waits already has it tried
// again, another one does not.
func TestExplainIsAskedFor(t *testing.T) {
	before := schedtest.Pod("p").Obj()
	queue, clock := newTestQueue(before)
	s := &scheduler{queue: queue, snapshot: newSnapshot()}
	take(t, queue, "p")
	queue.park(before.UID, nodeAdded)
	other, asked := before.DeepCopy(), before.DeepCopy()
	other.Annotations = map[string]string{"team": "a"}
	asked.Annotations = map[string]string{names.ExplainScheduling: ""}
	s.onPod(before, other)
	if w := queue.pods[before.UID]; w.place != parked {
		t.Errorf("another annotation: it is %s", w.place)
	}
	s.onPod(other, asked)
	clock.Step(firstBackoff)
	take(t, queue, "p")
	if !asksWhy(asked) || asksWhy(before) {
		t.Error("what is asked is misread")
	}
	asked.Annotations[names.ExplainScheduling] = "false"
	if asksWhy(asked) {
		t.Error(`"false" asks`)
	}
}
