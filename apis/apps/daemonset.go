package apps

import (
	"time"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// DaemonSet is the kind DaemonSet.
func DaemonSet() kind.Kind {
	return kind.Typed[*appsv1.DaemonSet]{
		GVK:        appsv1.SchemeGroupVersion.WithKind("DaemonSet"),
		Resource:   "daemonsets",
		Singular:   "daemonset",
		ShortNames: []string{"ds"},
		Categories: []string{"all"},
		Namespaced: true,

		New:     func() runtime.Object { return &appsv1.DaemonSet{} },
		NewList: func() runtime.Object { return &appsv1.DaemonSetList{} },

		Default: defaultDaemonSet,
		PrepareCreate: func(d *appsv1.DaemonSet) {
			d.Generation = 1
			d.Status = appsv1.DaemonSetStatus{}
		},
		PrepareUpdate: func(d, old *appsv1.DaemonSet) {
			d.Status = old.Status
			d.Generation = old.Generation
			if !equality.Semantic.DeepEqual(d.Spec, old.Spec) {
				d.Generation++
			}
		},
		Validate: func(d *appsv1.DaemonSet) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&d.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			errs = append(errs, core.ValidateTemplateCost(d, &d.Spec.Template, nil, field.NewPath("spec", "template"))...)
			return append(errs, validateDaemonSetSpec(&d.Spec, field.NewPath("spec"))...)
		},
		ValidateUpdate: func(d, old *appsv1.DaemonSet) field.ErrorList {
			spec := field.NewPath("spec")
			errs := apivalidation.ValidateObjectMetaUpdate(&d.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			errs = append(errs, core.ValidateTemplateCost(d, &d.Spec.Template, &old.Spec.Template, spec.Child("template"))...)
			errs = append(errs, validateDaemonSetSpec(&d.Spec, spec)...)
			return append(errs, apivalidation.ValidateImmutableField(d.Spec.Selector, old.Spec.Selector, spec.Child("selector"))...)
		},
		Warnings: func(d *appsv1.DaemonSet) []string {
			return core.PodSpecWarnings(&d.Spec.Template.Spec, "spec.template.spec")
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Number("Desired", appsv1.DaemonSetStatus{}.SwaggerDoc()["desiredNumberScheduled"]),
			cells.Number("Current", appsv1.DaemonSetStatus{}.SwaggerDoc()["currentNumberScheduled"]),
			cells.Number("Ready", appsv1.DaemonSetStatus{}.SwaggerDoc()["numberReady"]),
			cells.Number("Up-to-date", appsv1.DaemonSetStatus{}.SwaggerDoc()["updatedNumberScheduled"]),
			cells.Number("Available", appsv1.DaemonSetStatus{}.SwaggerDoc()["numberAvailable"]),
			cells.Text("Node Selector", "NodeSelector of the pods in the template."),
			cells.Age,
			cells.Wide(cells.Text("Containers", "Names of each container in the template.")),
			cells.Wide(cells.Text("Images", "Images referenced by each container in the template.")),
			cells.Wide(cells.Text("Selector", appsv1.DaemonSetSpec{}.SwaggerDoc()["selector"])),
		},
		Row: func(d *appsv1.DaemonSet, now time.Time) []any {
			names, images := cells.Containers(d.Spec.Template.Spec.Containers)
			s := &d.Status
			return []any{
				d.Name, int64(s.DesiredNumberScheduled), int64(s.CurrentNumberScheduled), int64(s.NumberReady),
				int64(s.UpdatedNumberScheduled), int64(s.NumberAvailable),
				cells.None(labels.Set(d.Spec.Template.Spec.NodeSelector).String()), cells.Since(d.CreationTimestamp, now),
				names, images, metav1.FormatLabelSelector(d.Spec.Selector),
			}
		},

		Status: &kind.TypedStatus[*appsv1.DaemonSet]{
			PrepareUpdate: func(d, old *appsv1.DaemonSet) {
				d.Spec = old.Spec
				d.Generation = old.Generation
			},
			ValidateUpdate: validateDaemonSetStatusUpdate,
		},

		UnconditionalUpdate: true,
	}.Kind()
}

func defaultDaemonSet(d *appsv1.DaemonSet) {
	spec := &d.Spec
	strategy := &spec.UpdateStrategy
	if strategy.Type == "" {
		strategy.Type = appsv1.RollingUpdateDaemonSetStrategyType
	}
	if strategy.Type == appsv1.RollingUpdateDaemonSetStrategyType {
		setDefault(&strategy.RollingUpdate, appsv1.RollingUpdateDaemonSet{})
		setDefault(&strategy.RollingUpdate.MaxUnavailable, intstr.FromInt32(1))
		setDefault(&strategy.RollingUpdate.MaxSurge, intstr.FromInt32(0))
	}
	setDefault(&spec.RevisionHistoryLimit, defaultHistory)
	core.DefaultPodTemplate(&spec.Template)
}

func validateDaemonSetSpec(spec *appsv1.DaemonSetSpec, at *field.Path) field.ErrorList {
	errs := validateSelected(spec.Selector, &spec.Template, "daemonset", at)
	errs = append(errs, check.NonNegative(at.Child("minReadySeconds"), int64(spec.MinReadySeconds))...)
	if limit := spec.RevisionHistoryLimit; limit != nil {
		errs = append(errs, check.NonNegative(at.Child("revisionHistoryLimit"), int64(*limit))...)
	}
	strategy, at := &spec.UpdateStrategy, at.Child("updateStrategy")
	switch strategy.Type {
	case appsv1.OnDeleteDaemonSetStrategyType:
	case appsv1.RollingUpdateDaemonSetStrategyType:
		if strategy.RollingUpdate == nil {
			return append(errs, field.Required(at.Child("rollingUpdate"), ""))
		}
		errs = append(errs, validateDaemonRoll(strategy.RollingUpdate, at.Child("rollingUpdate"))...)
	default:
		errs = append(errs, field.NotSupported(at.Child("type"), strategy.Type,
			[]appsv1.DaemonSetUpdateStrategyType{appsv1.OnDeleteDaemonSetStrategyType, appsv1.RollingUpdateDaemonSetStrategyType}))
	}
	return errs
}

// validateDaemonRoll wants exactly one of the two bounds: a node's pod is
// either stopped before its successor starts, or after.
func validateDaemonRoll(r *appsv1.RollingUpdateDaemonSet, at *field.Path) field.ErrorList {
	errs := append(
		validateShare(r.MaxUnavailable, at.Child("maxUnavailable")),
		validateShare(r.MaxSurge, at.Child("maxSurge"))...)
	if len(errs) > 0 {
		return errs
	}
	for _, share := range []struct {
		name  string
		value *intstr.IntOrString
	}{{"maxUnavailable", r.MaxUnavailable}, {"maxSurge", r.MaxSurge}} {
		if n, err := intstr.GetScaledValueFromIntOrPercent(share.value, 100, true); err == nil && share.value.Type == intstr.String && n > 100 {
			errs = append(errs, field.Invalid(at.Child(share.name), *share.value, "must not be greater than 100%"))
		}
	}
	switch none, surge := isNone(r.MaxUnavailable), !isNone(r.MaxSurge); {
	case !none && surge:
		errs = append(errs, field.Invalid(at.Child("maxSurge"), *r.MaxSurge, "may not be set when maxUnavailable is non-zero"))
	case none && !surge:
		errs = append(errs, field.Required(at.Child("maxUnavailable"), "cannot be 0 when maxSurge is 0"))
	}
	return errs
}

func validateDaemonSetStatusUpdate(d, old *appsv1.DaemonSet) field.ErrorList {
	errs := apivalidation.ValidateObjectMetaUpdate(&d.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	at, status := field.NewPath("status"), &d.Status
	errs = append(errs, check.NonNegative(at.Child("observedGeneration"), status.ObservedGeneration)...)
	errs = append(errs, nonNegative(at, []count{
		{"currentNumberScheduled", status.CurrentNumberScheduled},
		{"numberMisscheduled", status.NumberMisscheduled},
		{"desiredNumberScheduled", status.DesiredNumberScheduled},
		{"numberReady", status.NumberReady},
		{"updatedNumberScheduled", status.UpdatedNumberScheduled},
		{"numberAvailable", status.NumberAvailable},
		{"numberUnavailable", status.NumberUnavailable},
	})...)
	return append(errs, validateCollisions(status.CollisionCount, old.Status.CollisionCount, at.Child("collisionCount"))...)
}
