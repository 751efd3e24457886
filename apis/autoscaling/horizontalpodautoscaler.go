package autoscaling

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

type hpa = autoscalingv2.HorizontalPodAutoscaler

// HorizontalPodAutoscaler is the kind HorizontalPodAutoscaler.
func HorizontalPodAutoscaler() kind.Kind {
	k := kind.Typed[*hpa]{
		GVK:        autoscalingv2.SchemeGroupVersion.WithKind("HorizontalPodAutoscaler"),
		Resource:   "horizontalpodautoscalers",
		Singular:   "horizontalpodautoscaler",
		ShortNames: []string{"hpa"},
		Categories: []string{"all"},
		Namespaced: true,

		New:     func() runtime.Object { return &hpa{} },
		NewList: func() runtime.Object { return &autoscalingv2.HorizontalPodAutoscalerList{} },

		Default: setDefaults,
		PrepareCreate: func(a *hpa) {
			a.Status = autoscalingv2.HorizontalPodAutoscalerStatus{}
			a.Generation = 1
		},
		PrepareUpdate: func(a, old *hpa) {
			a.Status = old.Status
			a.Generation = old.Generation
			if !equality.Semantic.DeepEqual(a.Spec, old.Spec) {
				a.Generation++
			}
		},
		Validate: func(a *hpa) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&a.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			return append(errs, validateSpec(&a.Spec, field.NewPath("spec"))...)
		},
		ValidateUpdate: func(a, old *hpa) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&a.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			return append(errs, validateSpec(&a.Spec, field.NewPath("spec"))...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Reference", autoscalingv2.HorizontalPodAutoscalerSpec{}.SwaggerDoc()["scaleTargetRef"]),
			cells.Text("Targets", autoscalingv2.HorizontalPodAutoscalerSpec{}.SwaggerDoc()["metrics"]),
			cells.Text("MinPods", autoscalingv2.HorizontalPodAutoscalerSpec{}.SwaggerDoc()["minReplicas"]),
			cells.Number("MaxPods", autoscalingv2.HorizontalPodAutoscalerSpec{}.SwaggerDoc()["maxReplicas"]),
			cells.Number("Replicas", autoscalingv2.HorizontalPodAutoscalerStatus{}.SwaggerDoc()["currentReplicas"]),
			cells.Age,
		},
		Row: func(a *hpa, now time.Time) []any {
			least := "<unset>"
			if a.Spec.MinReplicas != nil {
				least = strconv.Itoa(int(*a.Spec.MinReplicas))
			}
			ref := a.Spec.ScaleTargetRef
			return []any{a.Name, ref.Kind + "/" + ref.Name, targets(a), least, int64(a.Spec.MaxReplicas), int64(a.Status.CurrentReplicas), cells.Since(a.CreationTimestamp, now)}
		},

		Status: &kind.TypedStatus[*hpa]{
			PrepareUpdate: func(a, old *hpa) {
				a.Spec = old.Spec
				a.Generation = old.Generation
			},
			ValidateUpdate: func(a, old *hpa) field.ErrorList {
				errs := apivalidation.ValidateObjectMetaUpdate(&a.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
				at := field.NewPath("status")
				errs = append(errs, check.NonNegative(at.Child("currentReplicas"), int64(a.Status.CurrentReplicas))...)
				return append(errs, check.NonNegative(at.Child("desiredReplicas"), int64(a.Status.DesiredReplicas))...)
			},
		},

		UnconditionalUpdate: true,
	}.Kind()
	k.Views = []kind.View{{Version: "v1", AddConversions: addV1}}
	return k
}

// defaultUtilization is the target of an autoscaler without metrics.
const defaultUtilization = 80

func setDefaults(a *hpa) {
	if a.Spec.MinReplicas == nil {
		a.Spec.MinReplicas = ptr.To[int32](1)
	}
	if len(a.Spec.Metrics) == 0 {
		a.Spec.Metrics = []autoscalingv2.MetricSpec{utilization(defaultUtilization)}
	}
	if b := a.Spec.Behavior; b != nil {
		up, down := DefaultRules()
		b.ScaleUp, b.ScaleDown = fill(b.ScaleUp, up), fill(b.ScaleDown, down)
	}
}

// DefaultRules are the rules of an autoscaler that sets none: up by four pods or to the
// double every 15 s, down at once after the stabilization window.
func DefaultRules() (up, down *autoscalingv2.HPAScalingRules) {
	up = &autoscalingv2.HPAScalingRules{
		StabilizationWindowSeconds: ptr.To[int32](0),
		SelectPolicy:               ptr.To(autoscalingv2.MaxChangePolicySelect),
		Policies: []autoscalingv2.HPAScalingPolicy{
			{Type: autoscalingv2.PodsScalingPolicy, Value: 4, PeriodSeconds: 15},
			{Type: autoscalingv2.PercentScalingPolicy, Value: 100, PeriodSeconds: 15},
		},
	}
	down = &autoscalingv2.HPAScalingRules{
		SelectPolicy: ptr.To(autoscalingv2.MaxChangePolicySelect),
		Policies:     []autoscalingv2.HPAScalingPolicy{{Type: autoscalingv2.PercentScalingPolicy, Value: 100, PeriodSeconds: 15}},
	}
	return up, down
}

// fill takes from defaults what rules leave out.
func fill(rules, defaults *autoscalingv2.HPAScalingRules) *autoscalingv2.HPAScalingRules {
	if rules == nil {
		return defaults
	}
	if rules.StabilizationWindowSeconds == nil {
		rules.StabilizationWindowSeconds = defaults.StabilizationWindowSeconds
	}
	if rules.SelectPolicy == nil {
		rules.SelectPolicy = defaults.SelectPolicy
	}
	if rules.Policies == nil {
		rules.Policies = defaults.Policies
	}
	return rules
}

// utilization is the one metric that autoscaling/v1 can name.
func utilization(percent int32) autoscalingv2.MetricSpec {
	return autoscalingv2.MetricSpec{
		Type: autoscalingv2.ResourceMetricSourceType,
		Resource: &autoscalingv2.ResourceMetricSource{
			Name:   corev1.ResourceCPU,
			Target: autoscalingv2.MetricTarget{Type: autoscalingv2.UtilizationMetricType, AverageUtilization: &percent},
		},
	}
}

// shown is how many metrics the table tells.
const shown = 2

// targets is the column of each metric's value and target.
func targets(a *hpa) string {
	if len(a.Spec.Metrics) == 0 {
		return "<none>"
	}
	var all []string
	for i, m := range a.Spec.Metrics {
		if i == shown {
			break
		}
		var current autoscalingv2.MetricStatus
		if i < len(a.Status.CurrentMetrics) && a.Status.CurrentMetrics[i].Type == m.Type {
			current = a.Status.CurrentMetrics[i]
		}
		all = append(all, pair(m, current))
	}
	text := strings.Join(all, ", ")
	if more := len(a.Spec.Metrics) - shown; more > 0 {
		text += fmt.Sprintf(" + %d more...", more)
	}
	return text
}

func pair(m autoscalingv2.MetricSpec, s autoscalingv2.MetricStatus) string {
	var now autoscalingv2.MetricValueStatus
	switch {
	case m.Resource != nil:
		if s.Resource != nil {
			now = s.Resource.Current
		}
		return string(m.Resource.Name) + ": " + compared(now, m.Resource.Target)
	case m.ContainerResource != nil:
		if s.ContainerResource != nil {
			now = s.ContainerResource.Current
		}
		return string(m.ContainerResource.Name) + ": " + compared(now, m.ContainerResource.Target)
	case m.Pods != nil:
		if s.Pods != nil {
			now = s.Pods.Current
		}
		return compared(now, m.Pods.Target)
	case m.Object != nil:
		if s.Object != nil {
			now = s.Object.Current
		}
		return compared(now, m.Object.Target)
	case m.External != nil:
		if s.External != nil {
			now = s.External.Current
		}
		return compared(now, m.External.Target)
	}
	return "<unknown type>"
}

func compared(now autoscalingv2.MetricValueStatus, target autoscalingv2.MetricTarget) string {
	quantity := func(q *resource.Quantity) string {
		if q == nil {
			return "<unknown>"
		}
		return q.String()
	}
	switch {
	case target.AverageUtilization != nil:
		current := "<unknown>"
		if now.AverageUtilization != nil {
			current = fmt.Sprintf("%d%%", *now.AverageUtilization)
		}
		return fmt.Sprintf("%s/%d%%", current, *target.AverageUtilization)
	case target.AverageValue != nil:
		average := ""
		if target.Type != autoscalingv2.AverageValueMetricType {
			average = " (avg)"
		}
		return quantity(now.AverageValue) + "/" + target.AverageValue.String() + average
	}
	return quantity(now.Value) + "/" + quantity(target.Value)
}
