package schedtest

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestBindMovesCondition: a pod that waited for a node has its PodScheduled
// condition once when it is bound, as at the real server.
func TestBindMovesCondition(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"}, Status: corev1.PodStatus{
		Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}},
	}}
	pods := New(t, pod).Client.CoreV1().Pods("default")
	if err := pods.Bind(t.Context(), &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"},
		Target:     corev1.ObjectReference{Kind: "Node", Name: "n1"},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	got, err := pods.Get(t.Context(), "a", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if c := got.Status.Conditions; len(c) != 1 || c[0].Status != corev1.ConditionTrue || c[0].Reason != "" || c[0].LastTransitionTime.IsZero() {
		t.Errorf("conditions of the bound pod: %+v", c)
	}
}

// TestWatchBeginsWithItsList: what goes, or comes and goes, between a reflector's list
// and its watch is watched, also by those that begin later.
func TestWatchBeginsWithItsList(t *testing.T) {
	pods := New(t, Pod("a").Obj()).Client.CoreV1().Pods(Namespace)
	first, err := pods.List(t.Context(), metav1.ListOptions{ResourceVersion: "0"})
	if err != nil || len(first.Items) != 1 {
		t.Fatal(first, err)
	}
	if err := pods.Delete(t.Context(), "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	second, err := pods.List(t.Context(), metav1.ListOptions{ResourceVersion: "0"})
	if err != nil || len(second.Items) != 0 {
		t.Fatal(second, err)
	}
	if _, err := pods.Create(t.Context(), Pod("b").Obj(), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := pods.Delete(t.Context(), "b", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for version, want := range map[string]string{
		first.ResourceVersion:  "DELETED a, ADDED b, DELETED b",
		second.ResourceVersion: "ADDED b, DELETED b",
		"":                     "", // it begins with what is there
	} {
		w, err := pods.Watch(t.Context(), metav1.ListOptions{ResourceVersion: version})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for len(w.ResultChan()) > 0 {
			e := <-w.ResultChan()
			got = append(got, fmt.Sprintf("%s %s", e.Type, e.Object.(*corev1.Pod).Name))
		}
		if strings.Join(got, ", ") != want {
			t.Errorf("watched from %q: %q, want %q", version, got, want)
		}
		w.Stop()
	}
}
