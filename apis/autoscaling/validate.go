package autoscaling

import (
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/api/validation/path"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/check"
)

// Bounds of behavior, in seconds.
const (
	maxWindow = 3600
	maxPeriod = 1800
)

func validateSpec(spec *autoscalingv2.HorizontalPodAutoscalerSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if spec.MinReplicas != nil && *spec.MinReplicas < 1 {
		errs = append(errs, field.Invalid(at.Child("minReplicas"), *spec.MinReplicas, "must be greater than or equal to 1"))
	}
	if spec.MaxReplicas < 1 {
		errs = append(errs, field.Invalid(at.Child("maxReplicas"), spec.MaxReplicas, "must be greater than 0"))
	}
	if spec.MinReplicas != nil && spec.MaxReplicas < *spec.MinReplicas {
		errs = append(errs, field.Invalid(at.Child("maxReplicas"), spec.MaxReplicas, "must be greater than or equal to `minReplicas`"))
	}
	errs = append(errs, validateReference(spec.ScaleTargetRef, at.Child("scaleTargetRef"))...)
	for i := range spec.Metrics {
		errs = append(errs, validateMetric(&spec.Metrics[i], at.Child("metrics").Index(i))...)
	}
	if b := spec.Behavior; b != nil {
		errs = append(errs, validateRules(b.ScaleUp, at.Child("behavior", "scaleUp"))...)
		errs = append(errs, validateRules(b.ScaleDown, at.Child("behavior", "scaleDown"))...)
	}
	return errs
}

func validateReference(ref autoscalingv2.CrossVersionObjectReference, at *field.Path) field.ErrorList {
	errs := check.RequiredText(at.Child("kind"), ref.Kind, path.IsValidPathSegmentName)
	errs = append(errs, check.RequiredText(at.Child("name"), ref.Name, path.IsValidPathSegmentName)...)
	if _, err := schema.ParseGroupVersion(ref.APIVersion); err != nil {
		errs = append(errs, field.Invalid(at.Child("apiVersion"), ref.APIVersion, err.Error()))
	}
	return errs
}

func validateMetric(m *autoscalingv2.MetricSpec, at *field.Path) field.ErrorList {
	errs := check.OneOf(at.Child("type"), m.Type, autoscalingv2.ObjectMetricSourceType, autoscalingv2.PodsMetricSourceType,
		autoscalingv2.ResourceMetricSourceType, autoscalingv2.ContainerResourceMetricSourceType, autoscalingv2.ExternalMetricSourceType)
	for _, source := range []struct {
		of    autoscalingv2.MetricSourceType
		field string
		set   bool
	}{
		{autoscalingv2.ObjectMetricSourceType, "object", m.Object != nil},
		{autoscalingv2.PodsMetricSourceType, "pods", m.Pods != nil},
		{autoscalingv2.ResourceMetricSourceType, "resource", m.Resource != nil},
		{autoscalingv2.ContainerResourceMetricSourceType, "containerResource", m.ContainerResource != nil},
		{autoscalingv2.ExternalMetricSourceType, "external", m.External != nil},
	} {
		switch {
		case source.of == m.Type && !source.set:
			errs = append(errs, field.Required(at.Child(source.field), "must populate information for the given metric source"))
		case source.of != m.Type && source.set:
			errs = append(errs, field.Forbidden(at.Child(source.field), "must populate the given metric source only"))
		}
	}
	if s := m.Object; s != nil {
		errs = append(errs, validateReference(s.DescribedObject, at.Child("object", "describedObject"))...)
		errs = append(errs, validateIdentifier(s.Metric, at.Child("object", "metric"))...)
		errs = append(errs, validateTarget(s.Target, at.Child("object", "target"), autoscalingv2.ValueMetricType, autoscalingv2.AverageValueMetricType)...)
	}
	if s := m.Pods; s != nil {
		errs = append(errs, validateIdentifier(s.Metric, at.Child("pods", "metric"))...)
		errs = append(errs, validateTarget(s.Target, at.Child("pods", "target"), autoscalingv2.AverageValueMetricType)...)
	}
	if s := m.Resource; s != nil {
		errs = append(errs, check.RequiredText(at.Child("resource", "name"), string(s.Name), nil)...)
		errs = append(errs, validateTarget(s.Target, at.Child("resource", "target"), autoscalingv2.UtilizationMetricType, autoscalingv2.AverageValueMetricType)...)
	}
	if s := m.ContainerResource; s != nil {
		errs = append(errs, check.RequiredText(at.Child("containerResource", "name"), string(s.Name), nil)...)
		errs = append(errs, check.RequiredText(at.Child("containerResource", "container"), s.Container, nil)...)
		errs = append(errs, validateTarget(s.Target, at.Child("containerResource", "target"), autoscalingv2.UtilizationMetricType, autoscalingv2.AverageValueMetricType)...)
	}
	if s := m.External; s != nil {
		errs = append(errs, validateIdentifier(s.Metric, at.Child("external", "metric"))...)
		errs = append(errs, validateTarget(s.Target, at.Child("external", "target"), autoscalingv2.ValueMetricType, autoscalingv2.AverageValueMetricType)...)
	}
	return errs
}

func validateIdentifier(id autoscalingv2.MetricIdentifier, at *field.Path) field.ErrorList {
	errs := check.RequiredText(at.Child("name"), id.Name, path.IsValidPathSegmentName)
	return append(errs, check.LabelSelector(at.Child("selector"), id.Selector)...)
}

// validateTarget wants exactly one value, of one of the allowed types.
func validateTarget(t autoscalingv2.MetricTarget, at *field.Path, allowed ...autoscalingv2.MetricTargetType) field.ErrorList {
	errs := check.OneOf(at.Child("type"), t.Type, autoscalingv2.UtilizationMetricType, autoscalingv2.ValueMetricType, autoscalingv2.AverageValueMetricType)
	if t.AverageUtilization != nil && *t.AverageUtilization < 1 {
		errs = append(errs, field.Invalid(at.Child("averageUtilization"), *t.AverageUtilization, "must be greater than 0"))
	}
	errs = append(errs, positive(t.Value, at.Child("value"))...)
	errs = append(errs, positive(t.AverageValue, at.Child("averageValue"))...)
	set := 0
	for _, value := range []struct {
		of    autoscalingv2.MetricTargetType
		field string
		set   bool
	}{
		{autoscalingv2.UtilizationMetricType, "averageUtilization", t.AverageUtilization != nil},
		{autoscalingv2.ValueMetricType, "value", t.Value != nil},
		{autoscalingv2.AverageValueMetricType, "averageValue", t.AverageValue != nil},
	} {
		if !value.set {
			continue
		}
		ok := false
		for _, a := range allowed {
			ok = ok || a == value.of
		}
		if !ok {
			errs = append(errs, field.Forbidden(at.Child(value.field), "may not be set for this type of metric"))
			continue
		}
		if set++; set > 1 {
			errs = append(errs, field.Forbidden(at.Child(value.field), "may not be set together with another target value"))
		}
	}
	if set == 0 {
		errs = append(errs, field.Required(at.Child(valueField(allowed[0])), "must set a positive target value"))
	}
	return errs
}

func valueField(t autoscalingv2.MetricTargetType) string {
	switch t {
	case autoscalingv2.UtilizationMetricType:
		return "averageUtilization"
	case autoscalingv2.AverageValueMetricType:
		return "averageValue"
	}
	return "value"
}

func positive(q *resource.Quantity, at *field.Path) field.ErrorList {
	if q != nil && q.Sign() != 1 {
		return field.ErrorList{field.Invalid(at, q.String(), "must be positive")}
	}
	return nil
}

func validateRules(rules *autoscalingv2.HPAScalingRules, at *field.Path) field.ErrorList {
	if rules == nil {
		return nil
	}
	var errs field.ErrorList
	if w := rules.StabilizationWindowSeconds; w != nil && *w < 0 {
		errs = append(errs, field.Invalid(at.Child("stabilizationWindowSeconds"), *w, "must be greater than or equal to zero"))
	} else if w != nil && *w > maxWindow {
		errs = append(errs, field.Invalid(at.Child("stabilizationWindowSeconds"), *w, "must be less than or equal to 3600"))
	}
	errs = append(errs, check.OneOfOrNil(at.Child("selectPolicy"), rules.SelectPolicy, autoscalingv2.MaxChangePolicySelect, autoscalingv2.MinChangePolicySelect, autoscalingv2.DisabledPolicySelect)...)
	if len(rules.Policies) == 0 {
		errs = append(errs, field.Required(at.Child("policies"), "must specify at least one Policy"))
	}
	if t := rules.Tolerance; t != nil && t.Sign() < 0 {
		errs = append(errs, field.Invalid(at.Child("tolerance"), t.String(), "must be greater or equal to 0"))
	}
	for i, p := range rules.Policies {
		at := at.Child("policies").Index(i)
		errs = append(errs, check.OneOf(at.Child("type"), p.Type, autoscalingv2.PodsScalingPolicy, autoscalingv2.PercentScalingPolicy)...)
		if p.Value < 1 {
			errs = append(errs, field.Invalid(at.Child("value"), p.Value, "must be greater than zero"))
		}
		if p.PeriodSeconds < 1 {
			errs = append(errs, field.Invalid(at.Child("periodSeconds"), p.PeriodSeconds, "must be greater than zero"))
		} else if p.PeriodSeconds > maxPeriod {
			errs = append(errs, field.Invalid(at.Child("periodSeconds"), p.PeriodSeconds, "must be less than or equal to 1800"))
		}
	}
	return errs
}
