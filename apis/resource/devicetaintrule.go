package resource

import (
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// DeviceTaintRule is the kind DeviceTaintRule: a taint of all devices that it
// selects.
func DeviceTaintRule() kind.Kind {
	return kind.Typed[*resourcev1.DeviceTaintRule]{
		GVK:      resourcev1.SchemeGroupVersion.WithKind("DeviceTaintRule"),
		Resource: "devicetaintrules",
		Singular: "devicetaintrule",

		New:     func() runtime.Object { return &resourcev1.DeviceTaintRule{} },
		NewList: func() runtime.Object { return &resourcev1.DeviceTaintRuleList{} },

		PrepareCreate: func(r *resourcev1.DeviceTaintRule) {
			r.Status = resourcev1.DeviceTaintRuleStatus{}
			r.Generation = 1
			stamp(&r.Spec.Taint, metav1.Now())
		},
		PrepareUpdate: func(r, old *resourcev1.DeviceTaintRule) {
			r.Status = old.Status
			// It is the time of the effect: another key or value does not change it.
			is, was := &r.Spec.Taint, old.Spec.Taint
			switch {
			case is.Effect == was.Effect && is.TimeAdded == nil:
				is.TimeAdded = was.TimeAdded
			case is.Effect != was.Effect && is.TimeAdded.Equal(was.TimeAdded):
				is.TimeAdded = nil
			}
			stamp(is, metav1.Now())
			r.Generation = old.Generation
			if !equality.Semantic.DeepEqual(r.Spec, old.Spec) {
				r.Generation++
			}
		},
		Validate: func(r *resourcev1.DeviceTaintRule) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&r.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			return append(errs, validateTaintRule(&r.Spec)...)
		},
		ValidateUpdate: func(r, old *resourcev1.DeviceTaintRule) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&r.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			return append(errs, validateTaintRule(&r.Spec)...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Key", resourcev1.DeviceTaint{}.SwaggerDoc()["key"]),
			cells.Text("Value", resourcev1.DeviceTaint{}.SwaggerDoc()["value"]),
			cells.Text("Effect", resourcev1.DeviceTaint{}.SwaggerDoc()["effect"]),
			cells.Text("TimeAdded", resourcev1.DeviceTaint{}.SwaggerDoc()["timeAdded"]),
			cells.Age,
		},
		Row: func(r *resourcev1.DeviceTaintRule, now time.Time) []any {
			taint, added := r.Spec.Taint, ""
			if taint.TimeAdded != nil {
				added = cells.Since(*taint.TimeAdded, now)
			}
			return []any{r.Name, taint.Key, taint.Value, string(taint.Effect), added, cells.Since(r.CreationTimestamp, now)}
		},

		Status: &kind.TypedStatus[*resourcev1.DeviceTaintRule]{
			PrepareUpdate: func(r, old *resourcev1.DeviceTaintRule) {
				r.Spec = old.Spec
				r.Generation = old.Generation
			},
			ValidateUpdate: func(r, old *resourcev1.DeviceTaintRule) field.ErrorList {
				at := field.NewPath("status", "conditions")
				errs := apivalidation.ValidateObjectMetaUpdate(&r.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
				errs = append(errs, metav1validation.ValidateConditions(r.Status.Conditions, at)...)
				return append(errs, atMost(at, len(r.Status.Conditions), resourcev1.DeviceTaintRuleStatusMaxConditions)...)
			},
		},
	}.Kind()
}

func validateTaintRule(spec *resourcev1.DeviceTaintRuleSpec) field.ErrorList {
	var errs field.ErrorList
	if s := spec.DeviceSelector; s != nil {
		at := field.NewPath("spec", "deviceSelector")
		if s.Driver != nil {
			errs = append(errs, validateDriver(*s.Driver, at.Child("driver"))...)
		}
		if s.Pool != nil {
			errs = append(errs, validatePool(*s.Pool, at.Child("pool"))...)
		}
		if s.Device != nil {
			errs = append(errs, check.RequiredText(at.Child("device"), *s.Device, validation.IsDNS1123Label)...)
		}
	}
	return append(errs, validateTaint(spec.Taint, field.NewPath("spec", "taint"))...)
}

func validateTaint(taint resourcev1.DeviceTaint, at *field.Path) field.ErrorList {
	errs := check.RequiredText(at.Child("key"), taint.Key, validation.IsQualifiedName)
	errs = append(errs, check.Text(at.Child("value"), taint.Value, validation.IsValidLabelValue)...)
	return append(errs, check.OneOf(at.Child("effect"), taint.Effect, resourcev1.DeviceTaintEffectNone, resourcev1.DeviceTaintEffectNoExecute, resourcev1.DeviceTaintEffectNoSchedule)...)
}
