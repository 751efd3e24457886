package core

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func TestValidateEvent(t *testing.T) {
	tests := []struct {
		name string
		edit func(*corev1.Event)
		want []string
	}{
		{"of a pod", func(*corev1.Event) {}, nil},
		{"of a pod elsewhere", func(e *corev1.Event) { e.Namespace = "other" }, []string{`involvedObject.namespace: Invalid value: "hello": does not match event.namespace`}},
		{"of a node", func(e *corev1.Event) { e.Namespace, e.InvolvedObject.Namespace = "default", "" }, nil},
		{"of a node, elsewhere", func(e *corev1.Event) { e.InvolvedObject.Namespace = "" }, []string{`involvedObject.namespace: Invalid value: "": does not match event.namespace`}},
		{"newer sort, empty", func(e *corev1.Event) { e.EventTime = metav1.NowMicro() }, []string{
			"reportingController: Required value", "reportingInstance: Required value", "action: Required value", "reason: Required value", "type: Required value",
		}},
		{"newer sort", func(e *corev1.Event) {
			e.EventTime, e.ReportingController, e.ReportingInstance = metav1.NowMicro(), "example.com/sched", "n1"
			e.Action, e.Reason, e.Type = "Binding", "Scheduled", "Normal"
		}, nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			e := &corev1.Event{ObjectMeta: metav1.ObjectMeta{Name: "e", Namespace: "hello"}, InvolvedObject: corev1.ObjectReference{Namespace: "hello"}}
			test.edit(e)
			checktest.Faults(t, validateEvent(e), test.want...)
		})
	}
}

func TestEventRowOfNewerSort(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	e := &corev1.Event{
		ObjectMeta:          metav1.ObjectMeta{Name: "e"},
		InvolvedObject:      corev1.ObjectReference{Kind: "Pod", Name: "web"},
		EventTime:           metav1.NewMicroTime(now.Add(-time.Hour)),
		Type:                "Normal",
		Reason:              "Scheduled",
		Message:             "assigned\n",
		ReportingController: "sched",
		ReportingInstance:   "n1",
	}
	want := []any{"60m", "Normal", "Scheduled", "pod/web", "", "sched, n1", "assigned", "60m", int64(1), "e"}
	if diff := cmp.Diff(want, eventRow(e, now)); diff != "" {
		t.Errorf("single (-want +got):\n%s", diff)
	}
	e.Series = &corev1.EventSeries{Count: 9, LastObservedTime: metav1.NewMicroTime(now.Add(-time.Minute))}
	want[0], want[8] = "60s", int64(9)
	if diff := cmp.Diff(want, eventRow(e, now)); diff != "" {
		t.Errorf("series (-want +got):\n%s", diff)
	}
}

func TestEventFieldsFallBack(t *testing.T) {
	e := &corev1.Event{ReportingController: "sched"}
	if got := eventFields(e); got["source"] != "sched" || got["reportingComponent"] != "sched" {
		t.Errorf("got %v", got)
	}
}
