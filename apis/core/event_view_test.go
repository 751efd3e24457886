package core

import (
	"math/rand" //nolint:depguard // what upstream's fuzzer takes
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/apitesting/fuzzer"
	metafuzzer "k8s.io/apimachinery/pkg/apis/meta/fuzzer"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func viewedEvent() *corev1.Event {
	return &corev1.Event{
		ObjectMeta:          metav1.ObjectMeta{Name: "e", Namespace: "hello", ResourceVersion: "1"},
		InvolvedObject:      corev1.ObjectReference{Namespace: "hello"},
		EventTime:           metav1.NewMicroTime(time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)),
		ReportingController: "example.com/sched",
		ReportingInstance:   "n1",
		Action:              "Binding",
		Reason:              "Scheduled",
		Type:                "Normal",
	}
}

func TestValidateViewedEvent(t *testing.T) {
	tests := []struct {
		name string
		edit func(*corev1.Event)
		want []string
	}{
		{"whole", func(*corev1.Event) {}, nil},
		{"of a pod elsewhere", func(e *corev1.Event) { e.InvolvedObject.Namespace = "other" }, []string{`regarding.namespace: Invalid value: "other": does not match event.namespace`}},
		{"empty", func(e *corev1.Event) { *e = corev1.Event{ObjectMeta: e.ObjectMeta, InvolvedObject: e.InvolvedObject} }, []string{
			"eventTime: Required value", "reportingController: Required value", "reportingInstance: Required value", "action: Required value", "reason: Required value", "type: Required value",
		}},
		{"fields of core/v1", func(e *corev1.Event) {
			e.FirstTimestamp, e.LastTimestamp, e.Count, e.Source.Component = metav1.Unix(1, 0), metav1.Unix(2, 0), 3, "x"
		}, []string{
			"deprecatedFirstTimestamp: Invalid value", "deprecatedLastTimestamp: Invalid value", "deprecatedCount: Invalid value: 3: needs to be unset", "deprecatedSource: Invalid value",
		}},
		{"series of one", func(e *corev1.Event) { e.Series = &corev1.EventSeries{Count: 1} }, []string{
			"series.count: Invalid value: 1: should be at least 2", "series.lastObservedTime: Required value",
		}},
		{"long note", func(e *corev1.Event) { e.Message = string(make([]byte, maxEventMessage+1)) }, []string{"note: Too long"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			e := viewedEvent()
			test.edit(e)
			checktest.Faults(t, validateViewedEvent(e), test.want...)
		})
	}
}

func TestViewedEventUpdate(t *testing.T) {
	old, e := viewedEvent(), viewedEvent()
	e.Labels = map[string]string{"a": "b"}
	e.Series = &corev1.EventSeries{Count: 2, LastObservedTime: metav1.NowMicro()}
	checktest.Faults(t, validateViewedEventUpdate(e, old))

	e.Series.Count, e.Message, e.InvolvedObject.Name, e.Count = 1, "other", "other", 4
	checktest.Faults(t, validateViewedEventUpdate(e, old),
		"series.count: Invalid value: 1: should be at least 2", "regarding: Invalid value", "note: Invalid value", "deprecatedCount: Invalid value: 4: field is immutable")

	// An event that core/v1 wrote may be labelled.
	old = &corev1.Event{ObjectMeta: viewedEvent().ObjectMeta, Count: 7}
	e = old.DeepCopy()
	e.Labels = map[string]string{"a": "b"}
	checktest.Faults(t, validateViewedEventUpdate(e, old))
}

// Whatever an event holds, it is the same after a look through the other
// group, in both directions.
func TestEventViewLosesNothing(t *testing.T) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, eventsv1.AddToScheme, addEventConversions} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	random := fuzzer.FuzzerFor(metafuzzer.Funcs, rand.NewSource(1), serializer.NewCodecFactory(scheme))
	through := func(in, view, back any) {
		t.Helper()
		for _, step := range [][2]any{{in, view}, {view, back}} {
			if err := scheme.Convert(step[0], step[1], nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	for range 200 {
		var hub, hubAgain corev1.EventList
		var view, viewAgain eventsv1.EventList
		random.Fill(&hub)
		random.Fill(&view)
		// The stamp is the scheme's business.
		hub.TypeMeta, view.TypeMeta = metav1.TypeMeta{}, metav1.TypeMeta{}
		for i := range hub.Items {
			hub.Items[i].TypeMeta = metav1.TypeMeta{}
		}
		for i := range view.Items {
			view.Items[i].TypeMeta = metav1.TypeMeta{}
		}
		through(&hub, new(eventsv1.EventList), &hubAgain)
		through(&view, new(corev1.EventList), &viewAgain)
		if diff := cmp.Diff(hub, hubAgain, cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("core/v1 (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff(view, viewAgain, cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("events.k8s.io/v1 (-want +got):\n%s", diff)
		}
	}
}
