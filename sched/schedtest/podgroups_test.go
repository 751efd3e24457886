package schedtest_test

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/schedtest"
)

func (l *line) gang(name string, n int32, change func(*schedulingv1beta1.PodGroup)) *schedulingv1beta1.PodGroup {
	l.t.Helper()
	g := schedtest.Gang(name, n)
	g.Namespace, g.UID, g.Generation = "", "", 0
	if change != nil {
		change(g)
	}
	made, err := l.client.SchedulingV1beta1().PodGroups(ns).Create(l.t.Context(), g, metav1.CreateOptions{})
	if err != nil {
		l.t.Fatal(err)
	}
	return made
}

func (l *line) members(group string, from, to int, cpu string) {
	l.t.Helper()
	for i := from; i < to; i++ {
		p := schedtest.Pod(fmt.Sprintf("%s-%d", group, i)).Group(group).CPU(cpu).Obj()
		p.Namespace, p.UID = "", ""
		if _, err := l.client.CoreV1().Pods(ns).Create(l.t.Context(), p, metav1.CreateOptions{}); err != nil {
			l.t.Fatal(err)
		}
	}
}

// bound counts the pods of a group with a node; why is what a waiting one says.
func (l *line) bound(group string) (n int, why string) {
	l.t.Helper()
	list, err := l.client.CoreV1().Pods(ns).List(l.t.Context(), metav1.ListOptions{})
	if err != nil {
		l.t.Fatal(err)
	}
	for i := range list.Items {
		p := &list.Items[i]
		if !strings.HasPrefix(p.Name, group+"-") {
			continue
		}
		if p.Spec.NodeName != "" {
			n++
		} else if c := pods.Condition(p, corev1.PodScheduled); c != nil {
			why = c.Message
		}
	}
	return n, why
}

// until waits for a number of bound pods of the group and for what its condition says.
func (l *line) until(group string, bound int, status metav1.ConditionStatus, message string) {
	l.t.Helper()
	schedtest.Eventually(l.t, func() string {
		g, err := l.client.SchedulingV1beta1().PodGroups(ns).Get(l.t.Context(), group, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		n, why := l.bound(group)
		c := meta.FindStatusCondition(g.Status.Conditions, schedulingv1beta1.PodGroupInitiallyScheduled)
		if n != bound || c == nil || c.Status != status || !strings.Contains(c.Message, message) {
			return fmt.Sprintf("%s: %d bound (%s), condition %+v; want %d, %s, %q", group, n, why, c, bound, status, message)
		}
		return ""
	})
}

// wait waits until a pod of the group says why it has no node, which is written after
// what the group says.
func (l *line) wait(group, because string) {
	l.t.Helper()
	schedtest.Eventually(l.t, func() string {
		if _, why := l.bound(group); !strings.Contains(why, because) {
			return fmt.Sprintf("the pods of %s wait because %q", group, why)
		}
		return ""
	})
}

// TestPodGroups: gangs on three nodes of four CPUs, with the real API server. Pods
// that come piece by piece wait for the rest and say so; of two gangs that both want
// most of the cluster one runs, the other holds nothing and says why; it comes when
// the first is gone; a more important one takes its place; a deleted group stays
// while its pods are there.
func TestPodGroups(t *testing.T) {
	l := newLine(t)
	groups := l.client.SchedulingV1beta1().PodGroups(ns)
	l.gang("one", 4, nil)
	l.members("one", 0, 2, "2")
	l.until("one", 0, metav1.ConditionFalse, `2 of the 4 pods that PodGroup "one" needs at the same time are there`)
	l.wait("one", "2 of the 4 pods")
	l.members("one", 2, 4, "2")
	l.until("one", 4, metav1.ConditionTrue, "4 pods have nodes")

	l.gang("two", 4, nil)
	l.members("two", 0, 4, "2")
	l.until("two", 0, metav1.ConditionFalse, "2 of 4 found one")
	l.wait("two", "Insufficient cpu")
	if err := l.client.CoreV1().Pods(ns).DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{FieldSelector: "metadata.name!=two-0,metadata.name!=two-1,metadata.name!=two-2,metadata.name!=two-3"}); err != nil {
		t.Fatal(err)
	}
	l.until("two", 4, metav1.ConditionTrue, "4 pods have nodes")

	if _, err := l.client.SchedulingV1().PriorityClasses().Create(t.Context(), &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: "urgent"}, Value: 1000}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	made := l.gang("three", 3, func(g *schedulingv1beta1.PodGroup) { g.Spec.PriorityClassName = "urgent" })
	if made.Spec.Priority == nil || *made.Spec.Priority != 1000 {
		t.Errorf("priority %v, want that of the class", made.Spec.Priority)
	}
	for i := range 3 {
		p := schedtest.Pod(fmt.Sprintf("three-%d", i)).Group("three").CPU("3").Obj()
		p.Namespace, p.UID, p.Spec.PriorityClassName = "", "", "urgent"
		if _, err := l.client.CoreV1().Pods(ns).Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	l.until("three", 3, metav1.ConditionTrue, "3 pods have nodes")

	if err := groups.Delete(t.Context(), "three", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if g, err := groups.Get(t.Context(), "three", metav1.GetOptions{}); err != nil || g.DeletionTimestamp == nil {
		t.Errorf("the group of pods that run: %v, want it to stay until they have ended", err)
	}
	for i := range 3 {
		if err := l.client.CoreV1().Pods(ns).Delete(t.Context(), fmt.Sprintf("three-%d", i), metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	schedtest.Eventually(t, func() string {
		if _, err := groups.Get(t.Context(), "three", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Sprintf("the group is still there: %v", err)
		}
		return ""
	})
}
