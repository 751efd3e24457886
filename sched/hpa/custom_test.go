package hpa

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func each(amount string) autoscalingv2.MetricTarget {
	return autoscalingv2.MetricTarget{Type: "AverageValue", AverageValue: ptr.To(resource.MustParse(amount))}
}

func total(amount string) autoscalingv2.MetricTarget {
	return autoscalingv2.MetricTarget{Type: "Value", Value: ptr.To(resource.MustParse(amount))}
}

func external(target autoscalingv2.MetricTarget) autoscalingv2.MetricSpec {
	return autoscalingv2.MetricSpec{Type: "External", External: &autoscalingv2.ExternalMetricSource{
		Metric: autoscalingv2.MetricIdentifier{Name: "queue", Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"topic": "mail"}}}, Target: target}}
}

// queue is an external metric with a target for each pod.
func queue(amount string) autoscalingv2.MetricSpec { return external(each(amount)) }

func object(target autoscalingv2.MetricTarget) autoscalingv2.MetricSpec {
	return autoscalingv2.MetricSpec{Type: "Object", Object: &autoscalingv2.ObjectMetricSource{
		DescribedObject: autoscalingv2.CrossVersionObjectReference{APIVersion: "v1", Kind: "Service", Name: "web"},
		Metric:          autoscalingv2.MetricIdentifier{Name: "requests"}, Target: target}}
}

func jobs(amount string) autoscalingv2.MetricSpec {
	return autoscalingv2.MetricSpec{Type: "Pods", Pods: &autoscalingv2.PodsMetricSource{Metric: autoscalingv2.MetricIdentifier{Name: "jobs"}, Target: each(amount)}}
}

// perPod are values of pods p0, p1, …, in thousandths.
func perPod(amounts ...int64) (a Answer) {
	for i, n := range amounts {
		a.Values = append(a.Values, Value{Pod: fmt.Sprintf("p%d", i), Milli: n})
	}
	return a
}

// TestCustomMetrics: metrics that are not of resources, from their values to a
// number of replicas.
func TestCustomMetrics(t *testing.T) {
	quick := &autoscalingv2.HorizontalPodAutoscalerBehavior{ScaleDown: &autoscalingv2.HPAScalingRules{
		StabilizationWindowSeconds: ptr.To[int32](0), Policies: []autoscalingv2.HPAScalingPolicy{{Type: "Percent", Value: 100, PeriodSeconds: 15}}}}
	unready := func(pods []*corev1.Pod) {
		for i := range pods[0].Status.Conditions {
			pods[0].Status.Conditions[i].Status = corev1.ConditionFalse
		}
	}
	for _, test := range []struct {
		name    string
		pods    int
		metric  autoscalingv2.MetricSpec
		answer  Answer
		change  func([]*corev1.Pod)
		want    int32
		current string
		reason  string
		fault   string
	}{
		{name: "pods on target", pods: 2, metric: jobs("2"), answer: perPod(1500, 2500), want: 2, current: "2"},
		{name: "pods above", pods: 2, metric: jobs("2"), answer: perPod(3000, 3000), want: 3, current: "3", reason: "pods metric jobs above target"},
		{name: "pods below", pods: 4, metric: jobs("2"), answer: perPod(1000, 1000, 1000, 1000), want: 2, current: "1", reason: "All metrics below target"},
		{name: "a pod without a value counts as nothing on the way up", pods: 2, metric: jobs("2"), answer: perPod(3000), want: 2, current: "3"},
		{name: "a pod without a value counts as on target on the way down", pods: 2, metric: jobs("2"), answer: perPod(1000), want: 2, current: "1"},
		{name: "a pending pod counts as nothing on the way up", pods: 2, metric: jobs("2"), answer: perPod(3000, 0), want: 2, current: "3",
			change: func(p []*corev1.Pod) { p[1].Status.Phase = corev1.PodPending }},
		{name: "values of pods of others", pods: 1, metric: jobs("2"), answer: Answer{Values: []Value{{Pod: "x", Milli: 9000}}}, want: 1, fault: "unable to get metric jobs: did not receive metrics"},
		{name: "no answer about pods", pods: 1, metric: jobs("2"), answer: Answer{Err: errors.New("gone")}, want: 1, fault: "unable to get metric jobs: gone"},
		{name: "an object for all", pods: 2, metric: object(total("10")), answer: perPod(20000), want: 4, current: "20", reason: "Service metric requests above target"},
		{name: "an object for all, of those that are ready", pods: 2, metric: object(total("10")), answer: perPod(30000), change: unready, want: 3, current: "30", reason: "Service metric requests above target"},
		{name: "an object for each", pods: 2, metric: object(each("10")), answer: perPod(35000), want: 4, current: "17500m", reason: "Service metric requests above target"},
		{name: "an object within tolerance", pods: 2, metric: object(total("10")), answer: perPod(10900), want: 2, current: "10900m"},
		{name: "no answer about an object", pods: 2, metric: object(total("10")), answer: Answer{Err: errors.New("gone")}, want: 2, fault: "unable to get metric requests of Service web: gone"},
		{name: "external, summed", pods: 2, metric: external(each("5")), answer: Answer{Values: []Value{{Milli: 7000}, {Milli: 8000}}}, want: 3, current: "7500m", reason: "external metric queue(topic=mail) above target"},
		{name: "external, below", pods: 4, metric: external(total("10")), answer: Answer{Values: []Value{{Milli: 2500}}}, want: 1, current: "2500m", reason: "All metrics below target"},
		{name: "up from none", metric: queue("5"), answer: Answer{Values: []Value{{Milli: 11000}}}, want: 3, current: "11", reason: "external metric queue(topic=mail) above target"},
		{name: "down to none", pods: 1, metric: queue("5"), answer: Answer{Values: []Value{{Milli: 0}}}, want: 0, current: "0", reason: "All metrics below target"},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := Input{Autoscaler: &autoscalingv2.HorizontalPodAutoscaler{}, Replicas: int32(test.pods), Exist: int32(test.pods), Now: now,
				Answers: map[int]Answer{0: test.answer}, MetricsErr: errors.New("metrics of resources were not to be read")}
			in.Pods, _ = world(make([]int64, test.pods)...)
			if test.change != nil {
				test.change(in.Pods)
			}
			spec := &in.Autoscaler.Spec
			spec.MinReplicas, spec.MaxReplicas, spec.Behavior = ptr.To[int32](0), 10, quick
			spec.Metrics = []autoscalingv2.MetricSpec{test.metric}
			out := Decide(in, History{})
			if out.Replicas != test.want || out.Reason != test.reason {
				t.Errorf("%d replicas because %q, want %d because %q", out.Replicas, out.Reason, test.want, test.reason)
			}
			if fmt.Sprint(len(out.Faults) > 0) != fmt.Sprint(test.fault != "") || test.fault != "" && !strings.Contains(out.Faults[0].Message, test.fault) {
				t.Errorf("faults %q, want %q", out.Faults, test.fault)
			}
			if got := shownCurrent(out.Status); got != test.current {
				t.Errorf("current %q, want %q", got, test.current)
			}
		})
	}
}

// shownCurrent is the one value that a status holds.
func shownCurrent(s autoscalingv2.HorizontalPodAutoscalerStatus) string {
	for _, m := range s.CurrentMetrics {
		var v autoscalingv2.MetricValueStatus
		switch {
		case m.Pods != nil:
			v = m.Pods.Current
		case m.Object != nil:
			v = m.Object.Current
		case m.External != nil:
			v = m.External.Current
		}
		for _, q := range []*resource.Quantity{v.Value, v.AverageValue} {
			if q != nil {
				return q.String()
			}
		}
	}
	return ""
}
