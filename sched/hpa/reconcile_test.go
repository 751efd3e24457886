package hpa

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/schedtest"
)

var now = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

// cpu is a target of utilization.
func cpu(percent int32) autoscalingv2.MetricSpec {
	return autoscalingv2.MetricSpec{Type: "Resource", Resource: &autoscalingv2.ResourceMetricSource{
		Name: "cpu", Target: autoscalingv2.MetricTarget{Type: "Utilization", AverageUtilization: &percent}}}
}

func mem(each string) autoscalingv2.MetricSpec {
	return autoscalingv2.MetricSpec{Type: "Resource", Resource: &autoscalingv2.ResourceMetricSource{
		Name: "memory", Target: autoscalingv2.MetricTarget{Type: "AverageValue", AverageValue: ptr.To(resource.MustParse(each))}}}
}

func container(name string, percent int32) autoscalingv2.MetricSpec {
	return autoscalingv2.MetricSpec{Type: "ContainerResource", ContainerResource: &autoscalingv2.ContainerResourceMetricSource{
		Name: "cpu", Container: name, Target: autoscalingv2.MetricTarget{Type: "Utilization", AverageUtilization: &percent}}}
}

// world is n pods that have run for an hour and request one CPU, each using as
// many thousandths as said; a negative amount: no metrics.
func world(used ...int64) (all []*corev1.Pod, metrics []metricsv1beta1.PodMetrics) {
	for i, n := range used {
		pod := schedtest.Pod(fmt.Sprintf("p%d", i)).CPU("1").On("n").Ready(now.Add(-time.Hour)).Phase(corev1.PodRunning).Obj()
		pod.Status.StartTime = ptr.To(metav1.NewTime(now.Add(-time.Hour)))
		all = append(all, pod)
		if n >= 0 {
			metrics = append(metrics, metricsv1beta1.PodMetrics{
				ObjectMeta: metav1.ObjectMeta{Name: pod.Name}, Timestamp: metav1.NewTime(now), Window: metav1.Duration{Duration: time.Second},
				Containers: []metricsv1beta1.ContainerMetrics{{Name: pod.Spec.Containers[0].Name, Usage: corev1.ResourceList{
					"cpu": *resource.NewMilliQuantity(n, resource.DecimalSI), "memory": *resource.NewQuantity(n<<20, resource.BinarySI)}}},
			})
		}
	}
	return all, metrics
}

func condition(s autoscalingv2.HorizontalPodAutoscalerStatus, kind autoscalingv2.HorizontalPodAutoscalerConditionType) string {
	for _, c := range s.Conditions {
		if c.Type == kind {
			return string(c.Status) + " " + c.Reason
		}
	}
	return ""
}

func TestDecide(t *testing.T) {
	quick := &autoscalingv2.HorizontalPodAutoscalerBehavior{ScaleDown: &autoscalingv2.HPAScalingRules{
		StabilizationWindowSeconds: ptr.To[int32](0), Policies: []autoscalingv2.HPAScalingPolicy{{Type: "Percent", Value: 100, PeriodSeconds: 15}}}}
	disabled := quick.DeepCopy()
	disabled.ScaleDown.SelectPolicy = ptr.To(autoscalingv2.DisabledPolicySelect)
	onePod := quick.DeepCopy()
	onePod.ScaleDown.Policies = []autoscalingv2.HPAScalingPolicy{{Type: "Pods", Value: 1, PeriodSeconds: 60}}
	tolerant := quick.DeepCopy()
	tolerant.ScaleDown.Tolerance = ptr.To(resource.MustParse("0.6"))
	tests := []struct {
		name     string
		replicas int32 // 0: as many as there are pods
		stopped  bool
		used     []int64
		metrics  []autoscalingv2.MetricSpec
		behavior *autoscalingv2.HorizontalPodAutoscalerBehavior
		change   func([]*corev1.Pod)
		err      error
		least    int32
		want     int32
		active   string
		limited  string
		reason   string
		fault    string
	}{
		{name: "on target", used: []int64{500, 500}, want: 2, active: "True ValidMetricFound", limited: "False DesiredWithinRange"},
		{name: "within tolerance", used: []int64{550, 545}, want: 2, active: "True ValidMetricFound", limited: "False DesiredWithinRange"},
		{name: "up", used: []int64{900, 900}, want: 4, reason: "cpu resource utilization (percentage of request) above target", active: "True ValidMetricFound", limited: "False DesiredWithinRange"},
		{name: "up to the maximum", used: []int64{5000, 5000, 5000, 5000, 5000, 5000}, want: 10, active: "True ValidMetricFound", limited: "True TooManyReplicas", reason: "cpu resource utilization (percentage of request) above target"},
		{name: "up at the default rate", used: []int64{5000}, want: 5, active: "True ValidMetricFound", limited: "True ScaleUpLimit", reason: "cpu resource utilization (percentage of request) above target"},
		{name: "down waits for the window", used: []int64{100, 100, 100, 100}, want: 4, active: "True ValidMetricFound", limited: "False DesiredWithinRange", reason: "All metrics below target"},
		{name: "down", used: []int64{100, 100, 100, 100}, behavior: quick, want: 1, active: "True ValidMetricFound", limited: "False DesiredWithinRange", reason: "All metrics below target"},
		{name: "down to the minimum", used: []int64{0, 0, 0, 0}, least: 2, behavior: quick, want: 2, active: "True ValidMetricFound", limited: "True TooFewReplicas", reason: "All metrics below target"},
		{name: "down is disabled", used: []int64{100, 100, 100, 100}, behavior: disabled, want: 4, active: "True ValidMetricFound", limited: "True ScaleDownLimit", reason: "All metrics below target"},
		{name: "down by one pod a minute", used: []int64{100, 100, 100, 100}, behavior: onePod, want: 3, active: "True ValidMetricFound", limited: "True ScaleDownLimit", reason: "All metrics below target"},
		{name: "tolerance of one's own", used: []int64{250, 250, 250, 250}, behavior: tolerant, want: 4, active: "True ValidMetricFound", limited: "False DesiredWithinRange"},
		{name: "stopped", stopped: true, want: 0, active: "False ScalingDisabled"},
		{name: "above the maximum", replicas: 12, want: 10, reason: "Current number of replicas above Spec.MaxReplicas"},
		{name: "below the minimum", replicas: 1, least: 3, want: 3, reason: "Current number of replicas below Spec.MinReplicas"},
		{name: "missing counts as nothing on the way up", used: []int64{900, -1}, want: 2, active: "True ValidMetricFound", limited: "False DesiredWithinRange"},
		{name: "missing counts as busy on the way down", used: []int64{100, 100, -1, -1}, behavior: quick, want: 4, active: "True ValidMetricFound", limited: "False DesiredWithinRange"},
		{name: "pending counts as nothing on the way up", used: []int64{1500, 0}, change: func(p []*corev1.Pod) { p[1].Status.Phase = corev1.PodPending }, want: 3, active: "True ValidMetricFound", limited: "False DesiredWithinRange", reason: "cpu resource utilization (percentage of request) above target"},
		{name: "starting does not count on the way down", used: []int64{200, 5000}, behavior: quick, change: func(p []*corev1.Pod) {
			p[1].Status.StartTime = ptr.To(metav1.NewTime(now.Add(-time.Minute)))
			p[1].Status.Conditions[len(p[1].Status.Conditions)-1].LastTransitionTime = metav1.NewTime(now)
		}, want: 1, active: "True ValidMetricFound", limited: "False DesiredWithinRange", reason: "All metrics below target"},
		{name: "ending does not count", used: []int64{900, 100}, change: func(p []*corev1.Pod) { p[1].DeletionTimestamp = ptr.To(metav1.NewTime(now)) }, want: 2, active: "True ValidMetricFound", limited: "False DesiredWithinRange"},
		{name: "no metrics at all", used: []int64{-1, -1}, want: 2, active: "False FailedGetResourceMetric", fault: "did not receive metrics for targeted pods"},
		{name: "the API fails", used: []int64{900}, err: errors.New("it is down"), want: 1, active: "False FailedGetResourceMetric", fault: "it is down"},
		{name: "no request", used: []int64{900}, change: func(p []*corev1.Pod) { p[0].Spec.Containers[0].Resources.Requests = nil }, want: 1, active: "False FailedGetResourceMetric", fault: "missing request for cpu in container"},
		{name: "memory by value", used: []int64{300, 300}, metrics: []autoscalingv2.MetricSpec{mem("200Mi")}, want: 3, active: "True ValidMetricFound", limited: "False DesiredWithinRange", reason: "memory resource usage above target"},
		{name: "the highest of two", used: []int64{300, 300}, metrics: []autoscalingv2.MetricSpec{cpu(50), mem("100Mi")}, want: 6, active: "True ValidMetricFound", limited: "False DesiredWithinRange", reason: "memory resource usage above target"},
		{name: "a container", used: []int64{900, 900}, metrics: []autoscalingv2.MetricSpec{container("c", 50)}, want: 4, active: "True ValidMetricFound", limited: "False DesiredWithinRange", reason: "cpu container resource utilization (percentage of request) above target"},
		{name: "no such container", used: []int64{900}, metrics: []autoscalingv2.MetricSpec{container("x", 50)}, want: 1, active: "False FailedGetContainerResourceMetric", fault: "no container x"},
		{name: "a type that is not known", used: []int64{900}, metrics: []autoscalingv2.MetricSpec{{Type: "Dice"}}, want: 1, active: "False FailedGetDiceMetric", fault: `no metric of type "Dice"`},
		{name: "an unknown metric forbids to go down", used: []int64{100, 100}, behavior: quick, metrics: []autoscalingv2.MetricSpec{cpu(50), queue("1")}, want: 2, active: "False FailedGetExternalMetric", fault: "not asked for"},
		{name: "an unknown metric does not forbid to go up", used: []int64{900, 900}, metrics: []autoscalingv2.MetricSpec{queue("1"), cpu(50)}, want: 4, active: "True ValidMetricFound", limited: "False DesiredWithinRange", reason: "cpu resource utilization (percentage of request) above target", fault: "not asked for"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			in := Input{Autoscaler: &autoscalingv2.HorizontalPodAutoscaler{}, Replicas: int32(len(test.used)), MetricsErr: test.err, Now: now}
			in.Pods, in.Metrics = world(test.used...)
			if test.replicas > 0 {
				in.Replicas = test.replicas
			}
			if test.stopped {
				in.Replicas = 0
			}
			if test.change != nil {
				test.change(in.Pods)
			}
			spec := &in.Autoscaler.Spec
			spec.MinReplicas, spec.MaxReplicas, spec.Metrics, spec.Behavior = ptr.To(max(1, test.least)), 10, test.metrics, test.behavior
			if spec.Metrics == nil {
				spec.Metrics = []autoscalingv2.MetricSpec{cpu(50)}
			}
			out := Decide(in, History{})
			if out.Replicas != test.want || out.Status.DesiredReplicas != test.want || out.Reason != test.reason {
				t.Errorf("%d replicas because %q, status %d; want %d because %q", out.Replicas, out.Reason, out.Status.DesiredReplicas, test.want, test.reason)
			}
			if got := condition(out.Status, autoscalingv2.ScalingActive); got != test.active {
				t.Errorf("ScalingActive %s, want %s", got, test.active)
			}
			if got := condition(out.Status, autoscalingv2.ScalingLimited); got != test.limited {
				t.Errorf("ScalingLimited %s, want %s", got, test.limited)
			}
			if fmt.Sprint(len(out.Faults) > 0) != fmt.Sprint(test.fault != "") || test.fault != "" && !strings.Contains(out.Faults[0].Message, test.fault) {
				t.Errorf("faults %q, want %q", out.Faults, test.fault)
			}
		})
	}
}

// What was wanted within the window holds against a smaller wish, and no longer.
func TestStabilization(t *testing.T) {
	up, down := rulesOf(nil)
	var h History
	var n int32
	for _, step := range []struct {
		after  time.Duration
		wanted int32
		want   int32
	}{
		{0, 6, 6}, {time.Minute, 2, 6}, {4 * time.Minute, 3, 6}, {5*time.Minute + time.Second, 2, 3}, {10 * time.Minute, 2, 2},
	} {
		n, h = h.stabilize(6, step.wanted, up, down, now.Add(step.after))
		if n != step.want {
			t.Errorf("after %s: %d, want %d", step.after, n, step.want)
		}
	}
}

// Changes within a policy's period count against it.
func TestRates(t *testing.T) {
	rules := func(choice autoscalingv2.ScalingPolicySelect) *autoscalingv2.HPAScalingRules {
		return &autoscalingv2.HPAScalingRules{SelectPolicy: &choice, Policies: []autoscalingv2.HPAScalingPolicy{
			{Type: "Pods", Value: 3, PeriodSeconds: 60}, {Type: "Percent", Value: 10, PeriodSeconds: 60}}}
	}
	fresh := History{}
	after := fresh.Scaled(10, 12, now.Add(-30*time.Second))
	old := fresh.Scaled(10, 12, now.Add(-61*time.Second))
	for _, test := range []struct {
		name     string
		history  History
		current  int32
		choice   autoscalingv2.ScalingPolicySelect
		up, down int32
	}{
		{"fresh, largest", fresh, 10, autoscalingv2.MaxChangePolicySelect, 13, 7},
		{"fresh, smallest", fresh, 10, autoscalingv2.MinChangePolicySelect, 11, 9},
		{"disabled", fresh, 10, autoscalingv2.DisabledPolicySelect, 10, 10},
		{"after a change", after, 12, autoscalingv2.MaxChangePolicySelect, 13, 7},
		{"long after", old, 12, autoscalingv2.MaxChangePolicySelect, 15, 9},
	} {
		up, down := test.history.highest(test.current, rules(test.choice), now), test.history.lowest(test.current, rules(test.choice), now)
		if up != test.up || down != test.down {
			t.Errorf("%s: up to %d, down to %d; want %d, %d", test.name, up, down, test.up, test.down)
		}
	}
}

// TestRequestsOfAWholePod: a pod's own requests outdo its containers', and do not say
// what one container requests.
func TestRequestsOfAWholePod(t *testing.T) {
	cpu := func(q string) *corev1.ResourceRequirements {
		return &corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(q)}}
	}
	for _, test := range []struct {
		name, container string
		whole, main     *corev1.ResourceRequirements
		want            int64
		fails           bool
	}{
		{name: "of its containers", main: cpu("200m"), want: 200},
		{name: "of the whole", whole: cpu("2"), main: cpu("200m"), want: 2000},
		{name: "of the whole alone", whole: cpu("2"), main: &corev1.ResourceRequirements{}, want: 2000},
		{name: "of a container", container: "main", whole: cpu("2"), main: cpu("200m"), want: 200},
		{name: "the whole says nothing of it", whole: &corev1.ResourceRequirements{}, main: cpu("200m"), want: 200},
		{name: "none", main: &corev1.ResourceRequirements{}, fails: true},
	} {
		pod := &corev1.Pod{Spec: corev1.PodSpec{Resources: test.whole, Containers: []corev1.Container{{Name: "main", Resources: *test.main}}}}
		got, err := question{resource: corev1.ResourceCPU, container: test.container}.requested(pod)
		if got != test.want || (err != nil) != test.fails {
			t.Errorf("%s: %d, %v", test.name, got, err)
		}
	}
}
