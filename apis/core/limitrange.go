package core

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// LimitRange is the kind LimitRange.
func LimitRange() kind.Kind {
	return kind.Typed[*corev1.LimitRange]{
		GVK:        corev1.SchemeGroupVersion.WithKind("LimitRange"),
		Resource:   "limitranges",
		Singular:   "limitrange",
		ShortNames: []string{"limits"},
		Namespaced: true,

		New:     func() runtime.Object { return &corev1.LimitRange{} },
		NewList: func() runtime.Object { return &corev1.LimitRangeList{} },

		Default: func(l *corev1.LimitRange) {
			for i := range l.Spec.Limits {
				defaultLimits(&l.Spec.Limits[i])
			}
		},
		Validate: func(l *corev1.LimitRange) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&l.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			return append(errs, validateLimits(l.Spec.Limits)...)
		},
		ValidateUpdate: func(l, old *corev1.LimitRange) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&l.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			return append(errs, validateLimits(l.Spec.Limits)...)
		},

		Columns: []metav1.TableColumnDefinition{cells.Name, {Name: "Created At", Type: "date", Description: metav1.ObjectMeta{}.SwaggerDoc()["creationTimestamp"]}},
		Row: func(l *corev1.LimitRange, _ time.Time) []any {
			created := "<unknown>"
			if !l.CreationTimestamp.IsZero() {
				created = l.CreationTimestamp.UTC().Format(time.RFC3339)
			}
			return []any{l.Name, created}
		},
		CreateOnUpdate:      true,
		UnconditionalUpdate: true,
	}.Kind()
}

// defaultLimits: a container's default limit is the maximum, its default
// request the default limit or else the minimum.
func defaultLimits(item *corev1.LimitRangeItem) {
	if item.Type != corev1.LimitTypeContainer {
		return
	}
	fill := func(into *corev1.ResourceList, from corev1.ResourceList) {
		for name, quantity := range from {
			if _, ok := (*into)[name]; ok {
				continue
			}
			if *into == nil {
				*into = corev1.ResourceList{}
			}
			(*into)[name] = quantity.DeepCopy()
		}
	}
	fill(&item.Default, item.Max)
	fill(&item.DefaultRequest, item.Default)
	fill(&item.DefaultRequest, item.Min)
}

func validateLimits(items []corev1.LimitRangeItem) field.ErrorList {
	var errs field.ErrorList
	seen := map[corev1.LimitType]bool{}
	for i := range items {
		at := field.NewPath("spec", "limits").Index(i)
		if seen[items[i].Type] {
			errs = append(errs, field.Duplicate(at.Child("type"), items[i].Type))
		}
		seen[items[i].Type] = true
		errs = append(errs, validateLimit(&items[i], at)...)
	}
	return errs
}

func validateLimit(item *corev1.LimitRangeItem, at *field.Path) field.ErrorList {
	errs := check.RequiredText(at.Child("type"), string(item.Type), nil)
	lists := map[string]corev1.ResourceList{
		"max": item.Max, "min": item.Min, "default": item.Default, "defaultRequest": item.DefaultRequest, "maxLimitRequestRatio": item.MaxLimitRequestRatio,
	}
	names := map[corev1.ResourceName]bool{}
	for list, resources := range lists {
		for name, quantity := range resources {
			names[name] = true
			errs = append(errs, validateQuantity(name, quantity, at.Child(list).Key(string(name)))...)
		}
	}
	if item.Type == corev1.LimitTypePod {
		if len(item.Default) > 0 {
			errs = append(errs, field.Forbidden(at.Child("default"), "may not be specified when `type` is 'Pod'"))
		}
		if len(item.DefaultRequest) > 0 {
			errs = append(errs, field.Forbidden(at.Child("defaultRequest"), "may not be specified when `type` is 'Pod'"))
		}
	}
	if item.Type == corev1.LimitTypePersistentVolumeClaim {
		_, min := item.Min[corev1.ResourceStorage]
		_, max := item.Max[corev1.ResourceStorage]
		if !min && !max {
			errs = append(errs, field.Required(at.Child("limits"), "either minimum or maximum storage value is required, but neither was provided"))
		}
	}
	for name := range names {
		errs = append(errs, validateLimitOrder(item, name, at)...)
	}
	return errs
}

// validateLimitOrder: min ≤ defaultRequest ≤ default ≤ max, each where given.
func validateLimitOrder(item *corev1.LimitRangeItem, name corev1.ResourceName, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	ordered := []struct {
		list, words string
		in          corev1.ResourceList
	}{
		{"min", "min value", item.Min}, {"defaultRequest", "default request value", item.DefaultRequest},
		{"default", "default value", item.Default}, {"max", "max value", item.Max},
	}
	for i, low := range ordered {
		small, ok := low.in[name]
		if !ok {
			continue
		}
		for _, high := range ordered[i+1:] {
			if great, ok := high.in[name]; ok && small.Cmp(great) > 0 {
				errs = append(errs, field.Invalid(at.Child(low.list).Key(string(name)), small.String(),
					fmt.Sprintf("%s %s is greater than %s %s", low.words, small.String(), high.words, great.String())))
			}
		}
	}
	if ratio, ok := item.MaxLimitRequestRatio[name]; ok {
		if ratio.Cmp(*resource.NewQuantity(1, resource.DecimalSI)) < 0 {
			errs = append(errs, field.Invalid(at.Child("maxLimitRequestRatio").Key(string(name)), ratio.String(), fmt.Sprintf("ratio %s is less than 1", ratio.String())))
		}
	}
	return errs
}
