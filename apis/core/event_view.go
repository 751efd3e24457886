package core

import (
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/kind"
)

// eventView is events.k8s.io/v1, in which the same events have other names for
// their fields and stricter rules for who writes them.
func eventView() kind.View {
	return kind.View{
		Group:          eventsv1.GroupName,
		Version:        eventsv1.SchemeGroupVersion.Version,
		AddConversions: addEventConversions,
		FieldLabels: map[string]string{
			"regarding.kind":            "involvedObject.kind",
			"regarding.namespace":       "involvedObject.namespace",
			"regarding.name":            "involvedObject.name",
			"regarding.uid":             "involvedObject.uid",
			"regarding.apiVersion":      "involvedObject.apiVersion",
			"regarding.resourceVersion": "involvedObject.resourceVersion",
			"regarding.fieldPath":       "involvedObject.fieldPath",
			"reason":                    "reason",
			"reportingController":       "reportingComponent",
			"type":                      "type",
		},
		Validate: func(obj runtime.Object) field.ErrorList { return validateViewedEvent(obj.(*corev1.Event)) },
		ValidateUpdate: func(obj, old runtime.Object) field.ErrorList {
			return validateViewedEventUpdate(obj.(*corev1.Event), old.(*corev1.Event))
		},
	}
}

// validateViewedEvent: an event written as events.k8s.io/v1 is of the newer
// sort, and has none of the fields that are left for core/v1's sake.
func validateViewedEvent(e *corev1.Event) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&e.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	errs = append(errs, validateEventPlace(e, field.NewPath("regarding", "namespace"))...)
	if e.EventTime.IsZero() {
		errs = append(errs, field.Required(field.NewPath("eventTime"), ""))
	}
	errs = append(errs, validateEventWords(e, field.NewPath("note"))...)
	errs = append(errs, validateEventSeries(e.Series)...)
	for _, gone := range []struct {
		name  string
		unset bool
		value any
	}{
		{"deprecatedFirstTimestamp", e.FirstTimestamp.IsZero(), e.FirstTimestamp},
		{"deprecatedLastTimestamp", e.LastTimestamp.IsZero(), e.LastTimestamp},
		{"deprecatedCount", e.Count == 0, e.Count},
		{"deprecatedSource", e.Source == corev1.EventSource{}, e.Source},
	} {
		if !gone.unset {
			errs = append(errs, field.Invalid(field.NewPath(gone.name), gone.value, "needs to be unset"))
		}
	}
	return errs
}

func validateEventSeries(series *corev1.EventSeries) field.ErrorList {
	if series == nil {
		return nil
	}
	var errs field.ErrorList
	at := field.NewPath("series")
	if series.Count < 2 {
		errs = append(errs, field.Invalid(at.Child("count"), series.Count, "should be at least 2"))
	}
	if series.LastObservedTime.IsZero() {
		errs = append(errs, field.Required(at.Child("lastObservedTime"), ""))
	}
	return errs
}

// validateViewedEventUpdate lets the series grow and the metadata change;
// what happened stays as it was recorded.
func validateViewedEventUpdate(e, old *corev1.Event) field.ErrorList {
	errs := apivalidation.ValidateObjectMetaUpdate(&e.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	if e.Series != nil && (old.Series == nil || *e.Series != *old.Series) {
		errs = append(errs, validateEventSeries(e.Series)...)
	}
	for _, fixed := range []struct {
		name     string
		now, was any
	}{
		{"regarding", e.InvolvedObject, old.InvolvedObject},
		{"reason", e.Reason, old.Reason},
		{"note", e.Message, old.Message},
		{"type", e.Type, old.Type},
		{"eventTime", e.EventTime, old.EventTime},
		{"action", e.Action, old.Action},
		{"related", e.Related, old.Related},
		{"reportingController", e.ReportingController, old.ReportingController},
		{"reportingInstance", e.ReportingInstance, old.ReportingInstance},
		{"deprecatedSource", e.Source, old.Source},
		{"deprecatedFirstTimestamp", e.FirstTimestamp, old.FirstTimestamp},
		{"deprecatedLastTimestamp", e.LastTimestamp, old.LastTimestamp},
		{"deprecatedCount", e.Count, old.Count},
	} {
		errs = append(errs, apivalidation.ValidateImmutableField(fixed.now, fixed.was, field.NewPath(fixed.name))...)
	}
	return errs
}

// addEventConversions adds the functions between events.k8s.io/v1 and the hub.
// Each field of one has its field in the other.
func addEventConversions(s *runtime.Scheme) error {
	pairs := []struct {
		from, to any
		f        conversion.ConversionFunc
	}{
		{(*eventsv1.Event)(nil), (*corev1.Event)(nil), func(a, b any, _ conversion.Scope) error {
			eventFromView(a.(*eventsv1.Event), b.(*corev1.Event))
			return nil
		}},
		{(*corev1.Event)(nil), (*eventsv1.Event)(nil), func(a, b any, _ conversion.Scope) error {
			eventToView(a.(*corev1.Event), b.(*eventsv1.Event))
			return nil
		}},
		{(*eventsv1.EventList)(nil), (*corev1.EventList)(nil), func(a, b any, _ conversion.Scope) error {
			in, out := a.(*eventsv1.EventList), b.(*corev1.EventList)
			out.ListMeta, out.Items = in.ListMeta, make([]corev1.Event, len(in.Items))
			for i := range in.Items {
				eventFromView(&in.Items[i], &out.Items[i])
			}
			return nil
		}},
		{(*corev1.EventList)(nil), (*eventsv1.EventList)(nil), func(a, b any, _ conversion.Scope) error {
			in, out := a.(*corev1.EventList), b.(*eventsv1.EventList)
			out.ListMeta, out.Items = in.ListMeta, make([]eventsv1.Event, len(in.Items))
			for i := range in.Items {
				eventToView(&in.Items[i], &out.Items[i])
			}
			return nil
		}},
	}
	for _, p := range pairs {
		if err := s.AddConversionFunc(p.from, p.to, p.f); err != nil {
			return err
		}
	}
	return nil
}

func eventToView(in *corev1.Event, out *eventsv1.Event) {
	in = in.DeepCopy()
	*out = eventsv1.Event{
		ObjectMeta:          in.ObjectMeta,
		EventTime:           in.EventTime,
		ReportingController: in.ReportingController,
		ReportingInstance:   in.ReportingInstance,
		Action:              in.Action,
		Reason:              in.Reason,
		Regarding:           in.InvolvedObject,
		Related:             in.Related,
		Note:                in.Message,
		Type:                in.Type,

		DeprecatedSource:         in.Source,
		DeprecatedFirstTimestamp: in.FirstTimestamp,
		DeprecatedLastTimestamp:  in.LastTimestamp,
		DeprecatedCount:          in.Count,
	}
	if series := in.Series; series != nil {
		out.Series = &eventsv1.EventSeries{Count: series.Count, LastObservedTime: series.LastObservedTime}
	}
}

func eventFromView(in *eventsv1.Event, out *corev1.Event) {
	in = in.DeepCopy()
	*out = corev1.Event{
		ObjectMeta:          in.ObjectMeta,
		EventTime:           in.EventTime,
		ReportingController: in.ReportingController,
		ReportingInstance:   in.ReportingInstance,
		Action:              in.Action,
		Reason:              in.Reason,
		InvolvedObject:      in.Regarding,
		Related:             in.Related,
		Message:             in.Note,
		Type:                in.Type,
		Source:              in.DeprecatedSource,
		FirstTimestamp:      in.DeprecatedFirstTimestamp,
		LastTimestamp:       in.DeprecatedLastTimestamp,
		Count:               in.DeprecatedCount,
	}
	if series := in.Series; series != nil {
		out.Series = &corev1.EventSeries{Count: series.Count, LastObservedTime: series.LastObservedTime}
	}
}
