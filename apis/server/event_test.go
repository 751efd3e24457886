package server_test

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/features"
)

// TestEventsOfBothGroups: an event is one object, whichever group wrote it.
func TestEventsOfBothGroups(t *testing.T) {
	features.Conforms(t, 206, 207)
	s := servertest.Start(t, nil)
	older, newer := s.Client.CoreV1().Events("default"), s.Client.EventsV1().Events("default")
	watch, err := newer.Watch(t.Context(), metav1.ListOptions{FieldSelector: "regarding.name=web"})
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Stop()

	old := must[*corev1.Event](t)(older.Create(t.Context(), &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Name: "older"},
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "web"},
		Reason:         "BackOff", Message: "waits", Type: "Warning", Count: 7,
		Source: corev1.EventSource{Component: "agent"},
	}, metav1.CreateOptions{}))
	event := <-watch.ResultChan()
	if e, ok := event.Object.(*eventsv1.Event); !ok || e.UID != old.UID || e.Regarding.Name != "web" || e.Note != "waits" || e.DeprecatedCount != 7 {
		t.Errorf("watched %T %+v", event.Object, event.Object)
	}

	made := must[*eventsv1.Event](t)(newer.Create(t.Context(), &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: "newer"}, EventTime: metav1.NewMicroTime(time.Unix(1, 0)),
		ReportingController: "example.com/op", ReportingInstance: "op-0", Action: "Try", Reason: "Tried", Type: "Normal", Note: "went well",
		Regarding: corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "other"},
	}, metav1.CreateOptions{}))
	seen := must[*corev1.Event](t)(older.Get(t.Context(), "newer", metav1.GetOptions{}))
	if seen.UID != made.UID || seen.Message != "went well" || seen.InvolvedObject.Name != "other" {
		t.Errorf("as core/v1: %+v", seen)
	}
	list := must[*eventsv1.EventList](t)(newer.List(t.Context(), metav1.ListOptions{FieldSelector: "reportingController=example.com/op"}))
	if len(list.Items) != 1 || list.Items[0].Name != "newer" {
		t.Errorf("by field: %+v", list.Items)
	}

	// Recorders of both sorts tell by a patch that it happened again.
	again := must[*eventsv1.Event](t)(newer.Patch(t.Context(), "newer", types.StrategicMergePatchType,
		[]byte(`{"series":{"count":2,"lastObservedTime":"2026-01-02T03:04:05.000006Z"}}`), metav1.PatchOptions{}))
	if again.Series == nil || again.Series.Count != 2 {
		t.Errorf("after the patch: %+v", again)
	}
	if _, err := newer.Patch(t.Context(), "newer", types.MergePatchType, []byte(`{"note":"no"}`), metav1.PatchOptions{}); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "note: Invalid value") {
		t.Errorf("another note: %v", err)
	}
	// core/v1 lets its writers set it again.
	if _, err := older.Patch(t.Context(), "newer", types.MergePatchType, []byte(`{"message":"yes"}`), metav1.PatchOptions{}); err != nil {
		t.Errorf("another message: %v", err)
	}
	if _, err := newer.Create(t.Context(), &eventsv1.Event{ObjectMeta: metav1.ObjectMeta{Name: "bare"}}, metav1.CreateOptions{}); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "eventTime: Required value") {
		t.Errorf("a bare event: %v", err)
	}

	// Server-side apply through either group.
	applied := `{"apiVersion":"events.k8s.io/v1","kind":"Event","metadata":{"name":"applied"},"eventTime":"2026-01-02T03:04:05.000006Z",
		"reportingController":"example.com/op","reportingInstance":"op-0","action":"Try","reason":"Tried","type":"Normal","note":"mine","regarding":{"namespace":"default","name":"x"}}`
	if _, err := newer.Patch(t.Context(), "applied", types.ApplyPatchType, []byte(applied), metav1.PatchOptions{FieldManager: "a"}); err != nil {
		t.Fatalf("apply: %v", err)
	}
	other := strings.Replace(applied, "mine", "mine too", 1)
	if _, err := newer.Patch(t.Context(), "applied", types.ApplyPatchType, []byte(other), metav1.PatchOptions{FieldManager: "b"}); !apierrors.IsConflict(err) || !strings.Contains(err.Error(), ".note") {
		t.Errorf("apply over another's field: %v; want a conflict about .note", err)
	}
	labelled := `{"apiVersion":"v1","kind":"Event","metadata":{"name":"applied","labels":{"a":"b"}}}`
	if e := must[*corev1.Event](t)(older.Patch(t.Context(), "applied", types.ApplyPatchType, []byte(labelled), metav1.PatchOptions{FieldManager: "b"})); e.Message != "mine" || e.Labels["a"] != "b" {
		t.Errorf("applied to as core/v1: %+v", e)
	}

	// Updates of a series, and many at once.
	again.Series.Count = 100
	again.ResourceVersion = ""
	again.Note = "yes" // as core/v1 wrote it
	if e := must[*eventsv1.Event](t)(newer.Update(t.Context(), again, metav1.UpdateOptions{})); e.Series.Count != 100 {
		t.Errorf("after the update: %+v", e.Series)
	}
	if err := newer.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "a=b"}); err != nil {
		t.Fatal(err)
	}
	list = must[*eventsv1.EventList](t)(s.Client.EventsV1().Events("").List(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=applied"}))
	if len(list.Items) != 0 {
		t.Errorf("after the deletion of all with a label: %+v", list.Items)
	}
	if err := newer.Delete(t.Context(), "older", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := older.Get(t.Context(), "older", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("after its deletion: %v", err)
	}
}
