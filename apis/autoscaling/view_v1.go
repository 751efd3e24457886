package autoscaling

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
	utiljson "k8s.io/apimachinery/pkg/util/json"

	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/apis/quantity"
)

// restAnnotation holds, in objects seen as autoscaling/v1, what that version
// has no fields for: who writes such an object back loses nothing.
const restAnnotation = names.AutoscalingV2

// rest is the value of restAnnotation.
type rest struct {
	Metrics    []autoscalingv2.MetricSpec                       `json:"metrics,omitempty"`
	Behavior   *autoscalingv2.HorizontalPodAutoscalerBehavior   `json:"behavior,omitempty"`
	Current    []autoscalingv2.MetricStatus                     `json:"currentMetrics,omitempty"`
	Conditions []autoscalingv2.HorizontalPodAutoscalerCondition `json:"conditions,omitempty"`
}

// addV1 adds the functions between autoscaling/v1 and the hub.
func addV1(s *runtime.Scheme) error {
	pairs := []struct {
		from, to any
		f        conversion.ConversionFunc
	}{
		{(*autoscalingv1.HorizontalPodAutoscaler)(nil), (*hpa)(nil), func(a, b any, _ conversion.Scope) error {
			return fromV1(a.(*autoscalingv1.HorizontalPodAutoscaler), b.(*hpa))
		}},
		{(*hpa)(nil), (*autoscalingv1.HorizontalPodAutoscaler)(nil), func(a, b any, _ conversion.Scope) error {
			return toV1(a.(*hpa), b.(*autoscalingv1.HorizontalPodAutoscaler))
		}},
		{(*autoscalingv1.HorizontalPodAutoscalerList)(nil), (*autoscalingv2.HorizontalPodAutoscalerList)(nil), func(a, b any, _ conversion.Scope) error {
			in, out := a.(*autoscalingv1.HorizontalPodAutoscalerList), b.(*autoscalingv2.HorizontalPodAutoscalerList)
			out.ListMeta, out.Items = in.ListMeta, make([]hpa, len(in.Items))
			for i := range in.Items {
				if err := fromV1(&in.Items[i], &out.Items[i]); err != nil {
					return err
				}
			}
			return nil
		}},
		{(*autoscalingv2.HorizontalPodAutoscalerList)(nil), (*autoscalingv1.HorizontalPodAutoscalerList)(nil), func(a, b any, _ conversion.Scope) error {
			in, out := a.(*autoscalingv2.HorizontalPodAutoscalerList), b.(*autoscalingv1.HorizontalPodAutoscalerList)
			out.ListMeta, out.Items = in.ListMeta, make([]autoscalingv1.HorizontalPodAutoscaler, len(in.Items))
			for i := range in.Items {
				if err := toV1(&in.Items[i], &out.Items[i]); err != nil {
					return err
				}
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

// isCPU: the metric is the utilization of CPU, which autoscaling/v1 can say.
func isCPU(m autoscalingv2.MetricSpec) bool {
	return m.Type == autoscalingv2.ResourceMetricSourceType && m.Resource != nil && m.Resource.Name == corev1.ResourceCPU && m.Resource.Target.AverageUtilization != nil
}

func toV1(in *hpa, out *autoscalingv1.HorizontalPodAutoscaler) error {
	in = in.DeepCopy()
	*out = autoscalingv1.HorizontalPodAutoscaler{ObjectMeta: in.ObjectMeta}
	out.Spec.ScaleTargetRef = autoscalingv1.CrossVersionObjectReference(in.Spec.ScaleTargetRef)
	out.Spec.MinReplicas, out.Spec.MaxReplicas = in.Spec.MinReplicas, in.Spec.MaxReplicas
	out.Status = autoscalingv1.HorizontalPodAutoscalerStatus{
		ObservedGeneration: in.Status.ObservedGeneration, LastScaleTime: in.Status.LastScaleTime,
		CurrentReplicas: in.Status.CurrentReplicas, DesiredReplicas: in.Status.DesiredReplicas,
	}
	more := rest{Behavior: in.Spec.Behavior, Conditions: in.Status.Conditions}
	for _, m := range in.Spec.Metrics {
		if out.Spec.TargetCPUUtilizationPercentage == nil && isCPU(m) {
			out.Spec.TargetCPUUtilizationPercentage = m.Resource.Target.AverageUtilization
			continue
		}
		more.Metrics = append(more.Metrics, m)
	}
	for _, m := range in.Status.CurrentMetrics {
		if r := m.Resource; r != nil && r.Name == corev1.ResourceCPU && out.Status.CurrentCPUUtilizationPercentage == nil {
			out.Status.CurrentCPUUtilizationPercentage = r.Current.AverageUtilization
		}
	}
	more.Current = in.Status.CurrentMetrics
	if len(more.Metrics) == 0 && more.Behavior == nil && len(more.Current) == 0 && len(more.Conditions) == 0 {
		return nil
	}
	text, err := json.Marshal(more)
	if err != nil {
		return fmt.Errorf("show %s as autoscaling/v1: %w", in.Name, err)
	}
	if out.Annotations == nil {
		out.Annotations = map[string]string{}
	}
	out.Annotations[restAnnotation] = string(text)
	return nil
}

func fromV1(in *autoscalingv1.HorizontalPodAutoscaler, out *hpa) error {
	in = in.DeepCopy()
	*out = hpa{ObjectMeta: in.ObjectMeta}
	var more rest
	if text, ok := in.Annotations[restAnnotation]; ok {
		// By the letter, as what the quantities in it are told by.
		err := quantity.InJSON([]byte(text), reflect.TypeFor[rest]())
		if err == nil {
			err = utiljson.Unmarshal([]byte(text), &more)
		}
		if err != nil {
			return fmt.Errorf("metadata.annotations[%s]: %w; remove it or write it as it was read", restAnnotation, err)
		}
		out.Annotations = maps.Clone(in.Annotations)
		delete(out.Annotations, restAnnotation)
		if len(out.Annotations) == 0 {
			out.Annotations = nil
		}
	}
	out.Spec.ScaleTargetRef = autoscalingv2.CrossVersionObjectReference(in.Spec.ScaleTargetRef)
	out.Spec.MinReplicas, out.Spec.MaxReplicas, out.Spec.Behavior = in.Spec.MinReplicas, in.Spec.MaxReplicas, more.Behavior
	if cpu := in.Spec.TargetCPUUtilizationPercentage; cpu != nil {
		out.Spec.Metrics = append(out.Spec.Metrics, utilization(*cpu))
	}
	out.Spec.Metrics = append(out.Spec.Metrics, more.Metrics...)
	out.Status = autoscalingv2.HorizontalPodAutoscalerStatus{
		ObservedGeneration: in.Status.ObservedGeneration, LastScaleTime: in.Status.LastScaleTime,
		CurrentReplicas: in.Status.CurrentReplicas, DesiredReplicas: in.Status.DesiredReplicas,
		CurrentMetrics: more.Current, Conditions: more.Conditions,
	}
	// Decoding runs the defaults of the version that was read, which is this
	// one's: the hub's are due here.
	setDefaults(out)
	return nil
}
