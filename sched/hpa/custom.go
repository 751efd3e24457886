package hpa

import (
	"errors"
	"fmt"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/sched/internal/pods"
)

// Answer is what an API of metrics said of one metric.
type Answer struct {
	Values []Value
	Err    error // no Values
}

// Value is one value. Pod is the name of the pod it is of, for metrics of pods.
type Value struct {
	Pod   string
	Milli int64 // thousandths
}

var errNotAsked = errors.New("it was not asked for")

func (a Answer) check() error {
	if a.Err == nil && len(a.Values) == 0 {
		return errNotAsked
	}
	return a.Err
}

// ofPods compares the average over the pods with the target, as for a resource: a
// pod without a value counts as what makes the change smaller.
func (q question) ofPods(m *autoscalingv2.PodsMetricSource, a Answer) (proposal, error) {
	if err := a.check(); err != nil {
		return proposal{}, fmt.Errorf("unable to get metric %s: %w", m.Metric.Name, err)
	}
	q.target, q.custom = m.Target, map[string]int64{}
	for _, v := range a.Values {
		q.custom[v.Pod] = v.Milli
	}
	replicas, current, err := q.answer()
	if err != nil {
		return proposal{}, fmt.Errorf("unable to get metric %s: %w", m.Metric.Name, err)
	}
	return proposal{replicas: replicas, name: "pods metric " + m.Metric.Name, status: autoscalingv2.MetricStatus{
		Type: autoscalingv2.PodsMetricSourceType, Pods: &autoscalingv2.PodsMetricStatus{Metric: m.Metric, Current: current}}}, nil
}

// ofObject compares the value of one object with the target.
func (q question) ofObject(m *autoscalingv2.ObjectMetricSource, a Answer) (proposal, error) {
	of := m.DescribedObject
	if err := a.check(); err != nil {
		return proposal{}, fmt.Errorf("unable to get metric %s of %s %s: %w", m.Metric.Name, of.Kind, of.Name, err)
	}
	replicas, current := q.bySum(m.Target, a)
	return proposal{replicas: replicas, name: fmt.Sprintf("%s metric %s", of.Kind, m.Metric.Name), status: autoscalingv2.MetricStatus{
		Type: autoscalingv2.ObjectMetricSourceType, Object: &autoscalingv2.ObjectMetricStatus{Metric: m.Metric, DescribedObject: of, Current: current}}}, nil
}

// ofExternal compares the sum of all values with the target.
func (q question) ofExternal(m *autoscalingv2.ExternalMetricSource, a Answer) (proposal, error) {
	if err := a.check(); err != nil {
		return proposal{}, fmt.Errorf("unable to get external metric %s: %w", selected(m.Metric), err)
	}
	replicas, current := q.bySum(m.Target, a)
	return proposal{replicas: replicas, name: "external metric " + selected(m.Metric), status: autoscalingv2.MetricStatus{
		Type: autoscalingv2.ExternalMetricSourceType, External: &autoscalingv2.ExternalMetricStatus{Metric: m.Metric, Current: current}}}, nil
}

func selected(m autoscalingv2.MetricIdentifier) string {
	if m.Selector == nil {
		return m.Name
	}
	return m.Name + "(" + metav1.FormatLabelSelector(m.Selector) + ")"
}

// bySum answers for a metric that is no pod's. A target per pod (averageValue) asks
// for as many replicas as share the sum; one for all (value) scales those that are
// ready by how the sum stands to it.
func (q question) bySum(target autoscalingv2.MetricTarget, a Answer) (int32, autoscalingv2.MetricValueStatus) {
	var sum int64
	for _, v := range a.Values {
		sum += v.Milli
	}
	if target.AverageValue != nil {
		each := target.AverageValue.MilliValue()
		replicas := q.in.Replicas
		if q.in.Exist == 0 || !q.tolerated(float64(sum)/(float64(each)*float64(q.in.Exist))) {
			replicas = whole(float64(sum) / float64(each))
		}
		average := (sum + int64(max(1, q.in.Exist)) - 1) / int64(max(1, q.in.Exist))
		return replicas, autoscalingv2.MetricValueStatus{AverageValue: resource.NewMilliQuantity(average, resource.DecimalSI)}
	}
	current := autoscalingv2.MetricValueStatus{Value: resource.NewMilliQuantity(sum, resource.DecimalSI)}
	ratio := float64(sum) / float64(target.Value.MilliValue())
	switch {
	case q.in.Replicas == 0:
		return whole(ratio), current
	case q.tolerated(ratio):
		return q.in.Replicas, current
	}
	ready := 0
	for _, pod := range q.in.Pods {
		if pod.Status.Phase == corev1.PodRunning && pods.Ready(pod) {
			ready++
		}
	}
	return whole(ratio * float64(ready)), current
}
