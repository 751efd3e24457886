package core

import (
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

const (
	// eventSeconds is how long an event is kept after its last write.
	eventSeconds = 60 * 60

	maxEventWord    = 128
	maxEventMessage = 1024
)

// Event is the kind Event.
func Event() kind.Kind {
	doc, meta := corev1.Event{}.SwaggerDoc(), metav1.ObjectMeta{}.SwaggerDoc()
	k := kind.Typed[*corev1.Event]{
		GVK:        corev1.SchemeGroupVersion.WithKind("Event"),
		Resource:   "events",
		Singular:   "event",
		ShortNames: []string{"ev"},
		Namespaced: true,

		New:     func() runtime.Object { return &corev1.Event{} },
		NewList: func() runtime.Object { return &corev1.EventList{} },

		Validate:       validateEvent,
		ValidateUpdate: validateEventUpdate,

		Columns: []metav1.TableColumnDefinition{
			cells.Text("Last Seen", doc["lastTimestamp"]),
			cells.Text("Type", doc["type"]),
			cells.Text("Reason", doc["reason"]),
			cells.Text("Object", doc["involvedObject"]),
			cells.Wide(cells.Text("Subobject", doc["involvedObject"])),
			cells.Wide(cells.Text("Source", doc["source"])),
			cells.Text("Message", doc["message"]),
			cells.Wide(cells.Text("First Seen", doc["firstTimestamp"])),
			cells.Wide(cells.Number("Count", doc["count"])),
			cells.Wide(metav1.TableColumnDefinition{Name: "Name", Type: "string", Format: "name", Description: meta["name"]}),
		},
		Row:    eventRow,
		Fields: eventFields,

		TTLSeconds:          func(*corev1.Event) uint64 { return eventSeconds },
		NeverTracked:        func(*corev1.Event) bool { return true },
		CreateOnUpdate:      true,
		UnconditionalUpdate: true,
	}.Kind()
	k.Views = []kind.View{eventView()}
	return k
}

func validateEvent(e *corev1.Event) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&e.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	return append(errs, validateEventBody(e)...)
}

// validateEventBody judges all but the metadata. Events with an eventTime are
// of the newer sort, whose words must all be there.
func validateEventBody(e *corev1.Event) field.ErrorList {
	errs := validateEventPlace(e, field.NewPath("involvedObject", "namespace"))
	if e.EventTime.IsZero() {
		return errs
	}
	return append(errs, validateEventWords(e, field.NewPath("message"))...)
}

// validateEventPlace puts an event into the namespace of what it is about, and
// that of things without a namespace into "default" (node events of older
// clients) or "kube-system".
func validateEventPlace(e *corev1.Event, about *field.Path) field.ErrorList {
	var errs field.ErrorList
	switch {
	case e.InvolvedObject.Namespace == "":
		if e.Namespace != metav1.NamespaceDefault && e.Namespace != metav1.NamespaceSystem {
			errs = append(errs, field.Invalid(about, e.InvolvedObject.Namespace, "does not match event.namespace"))
		}
	case e.InvolvedObject.Namespace != e.Namespace:
		errs = append(errs, field.Invalid(about, e.InvolvedObject.Namespace, "does not match event.namespace"))
	}
	return errs
}

func validateEventWords(e *corev1.Event, message *field.Path) field.ErrorList {
	var errs field.ErrorList
	controller := field.NewPath("reportingController")
	errs = append(errs, check.RequiredText(controller, e.ReportingController, validation.IsQualifiedName)...)
	for _, word := range []struct{ name, value string }{
		{"reportingInstance", e.ReportingInstance},
		{"action", e.Action},
		{"reason", e.Reason},
	} {
		at := field.NewPath(word.name)
		if word.value == "" {
			errs = append(errs, field.Required(at, ""))
		} else if len(word.value) > maxEventWord {
			errs = append(errs, field.TooLong(at, "", maxEventWord))
		}
	}
	if len(e.Message) > maxEventMessage {
		errs = append(errs, field.TooLong(message, "", maxEventMessage))
	}
	return append(errs, check.OneOf(field.NewPath("type"), e.Type, corev1.EventTypeNormal, corev1.EventTypeWarning)...)
}

func validateEventUpdate(e, old *corev1.Event) field.ErrorList {
	errs := apivalidation.ValidateObjectMetaUpdate(&e.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	return append(errs, validateEventBody(e)...)
}

func eventRow(e *corev1.Event, now time.Time) []any {
	first := cells.Since(e.FirstTimestamp, now)
	if e.FirstTimestamp.IsZero() {
		first = cells.Since(metav1.Time{Time: e.EventTime.Time}, now)
	}
	last := cells.Since(e.LastTimestamp, now)
	if e.LastTimestamp.IsZero() {
		last = first
	}
	count := e.Count
	if e.Series != nil {
		last, count = cells.Since(metav1.Time{Time: e.Series.LastObservedTime.Time}, now), e.Series.Count
	} else if count == 0 {
		count = 1 // of the newer sort, not repeated
	}

	object := strings.ToLower(e.InvolvedObject.Kind)
	if e.InvolvedObject.Name != "" {
		object += "/" + e.InvolvedObject.Name
	}
	return []any{
		last,
		e.Type,
		e.Reason,
		object,
		e.InvolvedObject.FieldPath,
		eventSource(e),
		strings.TrimSpace(e.Message),
		first,
		int64(count),
		e.Name,
	}
}

func eventSource(e *corev1.Event) string {
	component, instance := e.Source.Component, e.Source.Host
	if component == "" {
		component = e.ReportingController
	}
	if instance == "" {
		instance = e.ReportingInstance
	}
	if instance == "" {
		return component
	}
	return component + ", " + instance
}

func eventFields(e *corev1.Event) fields.Set {
	source := e.Source.Component
	if source == "" {
		source = e.ReportingController
	}
	return fields.Set{
		"involvedObject.kind":            e.InvolvedObject.Kind,
		"involvedObject.namespace":       e.InvolvedObject.Namespace,
		"involvedObject.name":            e.InvolvedObject.Name,
		"involvedObject.uid":             string(e.InvolvedObject.UID),
		"involvedObject.apiVersion":      e.InvolvedObject.APIVersion,
		"involvedObject.resourceVersion": e.InvolvedObject.ResourceVersion,
		"involvedObject.fieldPath":       e.InvolvedObject.FieldPath,
		"reason":                         e.Reason,
		"reportingComponent":             e.ReportingController,
		"source":                         source,
		"type":                           e.Type,
	}
}
