package core

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
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
			return append(errs, validateLimits(l.Spec.Limits, nil)...)
		},
		ValidateUpdate: func(l, old *corev1.LimitRange) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&l.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			return append(errs, validateLimits(l.Spec.Limits, old.Spec.Limits)...)
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

// validateLimits checks what a LimitRange bounds; old are items that are stored, perhaps
// by a version that did not check types and names.
func validateLimits(items, old []corev1.LimitRangeItem) field.ErrorList {
	var errs field.ErrorList
	had := map[corev1.LimitType]*corev1.LimitRangeItem{}
	for i := range old {
		had[old[i].Type] = &old[i]
	}
	seen := map[corev1.LimitType]bool{}
	for i := range items {
		at := field.NewPath("spec", "limits").Index(i)
		if seen[items[i].Type] {
			errs = append(errs, field.Duplicate(at.Child("type"), items[i].Type))
		}
		seen[items[i].Type] = true
		errs = append(errs, validateLimit(&items[i], had[items[i].Type], at)...)
	}
	return errs
}

func validateLimit(item, old *corev1.LimitRangeItem, at *field.Path) field.ErrorList {
	errs := check.RequiredText(at.Child("type"), string(item.Type), validation.IsQualifiedName)
	if len(errs) == 0 && old == nil && !strings.Contains(string(item.Type), "/") && !slices.Contains(limitTypes, item.Type) {
		errs = append(errs, field.Invalid(at.Child("type"), item.Type, "must be a standard limit type or fully qualified: Pod, Container, PersistentVolumeClaim, or one of a domain"))
	}
	names, known := map[corev1.ResourceName]bool{}, map[corev1.ResourceName]bool{}
	if old != nil {
		for _, list := range limitLists(old) {
			for name := range list.of {
				known[name] = true
			}
		}
	}
	for _, list := range limitLists(item) {
		for name, amount := range list.of {
			at := at.Child(list.name).Key(string(name))
			if names[name] = true; !known[name] {
				errs = append(errs, validateLimitName(item.Type, name, at)...)
			}
			errs = append(errs, validateQuantity(name, amount, at)...)
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

var limitTypes = []corev1.LimitType{corev1.LimitTypePod, corev1.LimitTypeContainer, corev1.LimitTypePersistentVolumeClaim}

type limitList struct {
	name string
	of   corev1.ResourceList
}

func limitLists(item *corev1.LimitRangeItem) []limitList {
	return []limitList{
		{"max", item.Max}, {"min", item.Min}, {"default", item.Default}, {"defaultRequest", item.DefaultRequest}, {"maxLimitRequestRatio", item.MaxLimitRequestRatio},
	}
}

// validateLimitName wants the name of something that what is bounded can ask for.
func validateLimitName(of corev1.LimitType, name corev1.ResourceName, at *field.Path) field.ErrorList {
	switch {
	case of == corev1.LimitTypePod || of == corev1.LimitTypeContainer:
		return validateContainerResourceName(name, at)
	case len(validation.IsQualifiedName(string(name))) > 0:
		return check.Text(at, string(name), validation.IsQualifiedName)
	case !boundable(name):
		return field.ErrorList{field.Invalid(at, name, "must be a standard resource type or fully qualified")}
	}
	return nil
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
	request, asked := item.DefaultRequest[name]
	limit, limited := item.Default[name]
	if asked && limited && !overcommits(name) && request.Cmp(limit) != 0 {
		errs = append(errs, field.Invalid(at.Child("defaultRequest").Key(string(name)), request.String(), fmt.Sprintf("default value %s must equal to defaultRequest value %s in %s", limit.String(), request.String(), name)))
	}
	if ratio, ok := item.MaxLimitRequestRatio[name]; ok {
		if ratio.Cmp(*resource.NewQuantity(1, resource.DecimalSI)) < 0 {
			errs = append(errs, field.Invalid(at.Child("maxLimitRequestRatio").Key(string(name)), ratio.String(), fmt.Sprintf("ratio %s is less than 1", ratio.String())))
		}
		min, max := item.Min[name], item.Max[name]
		if most := max.AsApproximateFloat64() / min.AsApproximateFloat64(); min.Sign() > 0 && max.Sign() > 0 && ratio.AsApproximateFloat64() > most {
			errs = append(errs, field.Invalid(at.Child("maxLimitRequestRatio").Key(string(name)), ratio.String(), fmt.Sprintf("ratio %s is greater than max/min = %f", ratio.String(), most)))
		}
	}
	return errs
}
