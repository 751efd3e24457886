package autoscaling

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func scaler(change func(*autoscalingv2.HorizontalPodAutoscalerSpec)) *hpa {
	a := &hpa{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "hello", ResourceVersion: "7", Generation: 1}, Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
		ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "apps/v1", Kind: "Deployment", Name: "web"},
		MaxReplicas:    5,
	}}
	if change != nil {
		change(&a.Spec)
	}
	setDefaults(a)
	return a
}

func TestValidate(t *testing.T) {
	type spec = autoscalingv2.HorizontalPodAutoscalerSpec
	cpu := func(target autoscalingv2.MetricTarget) []autoscalingv2.MetricSpec {
		return []autoscalingv2.MetricSpec{{Type: "Resource", Resource: &autoscalingv2.ResourceMetricSource{Name: "cpu", Target: target}}}
	}
	tests := []struct {
		name   string
		change func(*spec)
		want   []string
	}{
		{"defaults", nil, nil},
		{"zero", func(s *spec) { s.MinReplicas = ptr.To[int32](0) }, []string{"spec.minReplicas: Invalid value: 0: must be greater than or equal to 1"}},
		{"no max", func(s *spec) { s.MaxReplicas = 0 }, []string{"spec.maxReplicas: Invalid value: 0: must be greater than 0", "spec.maxReplicas: Invalid value: 0: must be greater than or equal to `minReplicas`"}},
		{"min over max", func(s *spec) { s.MinReplicas = ptr.To[int32](6) }, []string{"spec.maxReplicas: Invalid value: 5: must be greater than or equal to `minReplicas`"}},
		{"no target", func(s *spec) { s.ScaleTargetRef.Name, s.ScaleTargetRef.Kind = "", "" }, []string{"spec.scaleTargetRef.kind: Required value", "spec.scaleTargetRef.name: Required value"}},
		{"two values", func(s *spec) {
			s.Metrics = cpu(autoscalingv2.MetricTarget{Type: "Utilization", AverageUtilization: ptr.To[int32](50), AverageValue: ptr.To(resource.MustParse("1"))})
		}, []string{"spec.metrics[0].resource.target.averageValue: Forbidden"}},
		{"no value", func(s *spec) { s.Metrics = cpu(autoscalingv2.MetricTarget{Type: "Utilization"}) }, []string{"spec.metrics[0].resource.target.averageUtilization: Required value"}},
		{"wrong source", func(s *spec) {
			s.Metrics = cpu(autoscalingv2.MetricTarget{Type: "Utilization", AverageUtilization: ptr.To[int32](50)})
			s.Metrics[0].Type = "Pods"
		}, []string{"spec.metrics[0].pods: Required value", "spec.metrics[0].resource: Forbidden"}},
		{"behavior", func(s *spec) {
			s.Behavior = &autoscalingv2.HorizontalPodAutoscalerBehavior{
				ScaleUp:   &autoscalingv2.HPAScalingRules{Policies: []autoscalingv2.HPAScalingPolicy{{Type: "Nodes", Value: 0, PeriodSeconds: 1801}}},
				ScaleDown: &autoscalingv2.HPAScalingRules{StabilizationWindowSeconds: ptr.To[int32](3601)},
			}
		}, []string{
			`spec.behavior.scaleUp.policies[0].type: Unsupported value: "Nodes"`,
			"spec.behavior.scaleUp.policies[0].value: Invalid value: 0: must be greater than zero",
			"spec.behavior.scaleUp.policies[0].periodSeconds: Invalid value: 1801: must be less than or equal to 1800",
			"spec.behavior.scaleDown.stabilizationWindowSeconds: Invalid value: 3601: must be less than or equal to 3600",
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			checktest.Faults(t, HorizontalPodAutoscaler().Validate(scaler(test.change)), test.want...)
		})
	}
}

func TestUpdates(t *testing.T) {
	kind := HorizontalPodAutoscaler()
	old := scaler(nil)
	a := scaler(func(s *autoscalingv2.HorizontalPodAutoscalerSpec) { s.MaxReplicas = 9 })
	a.Status.CurrentReplicas = 4
	kind.PrepareUpdate(a, old)
	if a.Generation != 2 || a.Status.CurrentReplicas != 0 {
		t.Errorf("generation %d, replicas %d; want 2, 0", a.Generation, a.Status.CurrentReplicas)
	}
	kind.Status.PrepareUpdate(a, old)
	if a.Spec.MaxReplicas != 5 || a.Generation != 1 {
		t.Error("a status update changed the spec")
	}
}

// TestTargets: the column shows what is known of each type of metric.
func TestTargets(t *testing.T) {
	quantity := func(s string) *resource.Quantity { return ptr.To(resource.MustParse(s)) }
	each := autoscalingv2.MetricTarget{Type: "AverageValue", AverageValue: quantity("2")}
	a := scaler(func(s *autoscalingv2.HorizontalPodAutoscalerSpec) {
		s.Metrics = []autoscalingv2.MetricSpec{
			{Type: "Pods", Pods: &autoscalingv2.PodsMetricSource{Target: each}},
			{Type: "Object", Object: &autoscalingv2.ObjectMetricSource{Target: autoscalingv2.MetricTarget{Type: "Value", Value: quantity("9")}}},
		}
	})
	if got := targets(a); got != "<unknown>/2, <unknown>/9" {
		t.Errorf("before anything is known: %q", got)
	}
	a.Status.CurrentMetrics = []autoscalingv2.MetricStatus{
		{Type: "Pods", Pods: &autoscalingv2.PodsMetricStatus{Current: autoscalingv2.MetricValueStatus{AverageValue: quantity("1500m")}}},
		{Type: "Object", Object: &autoscalingv2.ObjectMetricStatus{Current: autoscalingv2.MetricValueStatus{Value: quantity("7")}}},
	}
	if got := targets(a); got != "1500m/2, 7/9" {
		t.Errorf("got %q", got)
	}
	a.Spec.Metrics = []autoscalingv2.MetricSpec{{Type: "External", External: &autoscalingv2.ExternalMetricSource{Target: each}}}
	a.Status.CurrentMetrics = []autoscalingv2.MetricStatus{{Type: "External", External: &autoscalingv2.ExternalMetricStatus{Current: autoscalingv2.MetricValueStatus{AverageValue: quantity("1")}}}}
	if got := targets(a); got != "1/2" {
		t.Errorf("got %q", got)
	}
}

// What autoscaling/v1 cannot say comes back whole.
func TestV1RoundTrip(t *testing.T) {
	memory := autoscalingv2.MetricSpec{Type: "Resource", Resource: &autoscalingv2.ResourceMetricSource{
		Name: corev1.ResourceMemory, Target: autoscalingv2.MetricTarget{Type: "AverageValue", AverageValue: ptr.To(resource.MustParse("1Gi"))}}}
	tests := map[string]*hpa{
		"plain": scaler(nil),
		"all": scaler(func(s *autoscalingv2.HorizontalPodAutoscalerSpec) {
			s.Metrics = []autoscalingv2.MetricSpec{utilization(50), memory}
			s.Behavior = &autoscalingv2.HorizontalPodAutoscalerBehavior{}
		}),
	}
	tests["all"].Annotations = map[string]string{"a": "b"}
	tests["all"].Status.Conditions = []autoscalingv2.HorizontalPodAutoscalerCondition{{Type: autoscalingv2.AbleToScale, Status: corev1.ConditionTrue}}
	for name, a := range tests {
		t.Run(name, func(t *testing.T) {
			var view autoscalingv1.HorizontalPodAutoscaler
			if err := toV1(a, &view); err != nil {
				t.Fatal(err)
			}
			if view.Spec.TargetCPUUtilizationPercentage == nil {
				t.Error("the view has no target")
			}
			var back hpa
			if err := fromV1(&view, &back); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(a, &back); diff != "" {
				t.Errorf("through v1 (-want +got):\n%s", diff)
			}
		})
	}
	// A client that writes v1 alone gets the defaults of the hub.
	var a hpa
	if err := fromV1(&autoscalingv1.HorizontalPodAutoscaler{}, &a); err != nil || *a.Spec.MinReplicas != 1 || *a.Spec.Metrics[0].Resource.Target.AverageUtilization != 80 {
		t.Errorf("%+v, %v", a.Spec, err)
	}
	for text, ok := range map[string]bool{
		"{": false, `{"metrics":[{"pods":{"target":{"averageValue":"1e-2000000000"}}}]}`: false,
		// A name in other letters is another name: nothing is parsed.
		`{"metrics":[{"pods":{"target":{"AverageValue":"1e-2000000000"}}}]}`: true,
	} {
		v1 := &autoscalingv1.HorizontalPodAutoscaler{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{restAnnotation: text}}}
		if err := fromV1(v1, &a); (err == nil) != ok {
			t.Errorf("annotation %s: %v", text, err)
		}
	}
}
