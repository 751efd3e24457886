// Package policy describes the kinds of the policy API group.
package policy

import (
	"time"

	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// PodDisruptionBudget is the kind PodDisruptionBudget.
func PodDisruptionBudget() kind.Kind {
	return kind.Typed[*policyv1.PodDisruptionBudget]{
		GVK:        policyv1.SchemeGroupVersion.WithKind("PodDisruptionBudget"),
		Resource:   "poddisruptionbudgets",
		Singular:   "poddisruptionbudget",
		ShortNames: []string{"pdb"},
		Namespaced: true,

		New:     func() runtime.Object { return &policyv1.PodDisruptionBudget{} },
		NewList: func() runtime.Object { return &policyv1.PodDisruptionBudgetList{} },

		PrepareCreate: func(b *policyv1.PodDisruptionBudget) {
			b.Status = policyv1.PodDisruptionBudgetStatus{}
			b.Generation = 1
		},
		PrepareUpdate: func(b, old *policyv1.PodDisruptionBudget) {
			b.Status = old.Status
			b.Generation = old.Generation
			if !equality.Semantic.DeepEqual(b.Spec, old.Spec) {
				b.Generation++
			}
		},
		Validate: func(b *policyv1.PodDisruptionBudget) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&b.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			return append(errs, validateSpec(&b.Spec, field.NewPath("spec"))...)
		},
		ValidateUpdate: func(b, old *policyv1.PodDisruptionBudget) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&b.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			return append(errs, validateSpec(&b.Spec, field.NewPath("spec"))...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Min Available", policyv1.PodDisruptionBudgetSpec{}.SwaggerDoc()["minAvailable"]),
			cells.Text("Max Unavailable", policyv1.PodDisruptionBudgetSpec{}.SwaggerDoc()["maxUnavailable"]),
			cells.Number("Allowed Disruptions", policyv1.PodDisruptionBudgetStatus{}.SwaggerDoc()["disruptionsAllowed"]),
			cells.Age,
		},
		Row: func(b *policyv1.PodDisruptionBudget, now time.Time) []any {
			return []any{b.Name, share(b.Spec.MinAvailable), share(b.Spec.MaxUnavailable), int64(b.Status.DisruptionsAllowed), cells.Since(b.CreationTimestamp, now)}
		},

		Status: &kind.TypedStatus[*policyv1.PodDisruptionBudget]{
			PrepareUpdate: func(b, old *policyv1.PodDisruptionBudget) {
				b.Spec = old.Spec
				b.Generation = old.Generation
			},
			ValidateUpdate: func(b, old *policyv1.PodDisruptionBudget) field.ErrorList {
				errs := apivalidation.ValidateObjectMetaUpdate(&b.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
				return append(errs, validateStatus(&b.Status, field.NewPath("status"))...)
			},
		},
	}.Kind()
}

func validateSpec(spec *policyv1.PodDisruptionBudgetSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if spec.MinAvailable != nil && spec.MaxUnavailable != nil {
		errs = append(errs, field.Invalid(at, *spec, "minAvailable and maxUnavailable cannot be both set"))
	}
	errs = append(errs, validateShare(spec.MinAvailable, at.Child("minAvailable"))...)
	errs = append(errs, validateShare(spec.MaxUnavailable, at.Child("maxUnavailable"))...)
	errs = append(errs, check.LabelSelector(at.Child("selector"), spec.Selector)...)
	return append(errs, check.OneOfOrNil(at.Child("unhealthyPodEvictionPolicy"), spec.UnhealthyPodEvictionPolicy, policyv1.AlwaysAllow, policyv1.IfHealthyBudget)...)
}

// validateShare wants a number of pods, or at most all of them in percent.
func validateShare(n *intstr.IntOrString, at *field.Path) field.ErrorList {
	if n == nil {
		return nil
	}
	if n.Type == intstr.Int {
		return check.NonNegative(at, int64(n.IntVal))
	}
	if errs := check.Text(at, n.StrVal, validation.IsValidPercent); len(errs) > 0 {
		return errs
	}
	if percent, err := intstr.GetScaledValueFromIntOrPercent(n, 100, false); err != nil || percent > 100 {
		return field.ErrorList{field.Invalid(at, n, "must not be greater than 100%")}
	}
	return nil
}

func validateStatus(status *policyv1.PodDisruptionBudgetStatus, at *field.Path) field.ErrorList {
	errs := metav1validation.ValidateConditions(status.Conditions, at.Child("conditions"))
	for _, count := range []struct {
		field string
		n     int32
	}{
		{"disruptionsAllowed", status.DisruptionsAllowed},
		{"currentHealthy", status.CurrentHealthy},
		{"desiredHealthy", status.DesiredHealthy},
		{"expectedPods", status.ExpectedPods},
	} {
		errs = append(errs, check.NonNegative(at.Child(count.field), int64(count.n))...)
	}
	return errs
}

func share(n *intstr.IntOrString) string {
	if n == nil {
		return "N/A"
	}
	return n.String()
}
