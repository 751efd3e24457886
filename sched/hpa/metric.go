package hpa

import (
	"fmt"
	"math"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/pods"
)

const (
	// startup is how long a pod's use of CPU may be that of its start.
	startup = 5 * time.Minute
	// firstReady is how long after its start a pod that was never ready may
	// have become unready without having been so.
	firstReady = 30 * time.Second
	// usual is the tolerance of an autoscaler that sets none.
	usual = 0.1
)

// proposal is what one metric asks for.
type proposal struct {
	replicas int32
	name     string
	status   autoscalingv2.MetricStatus
}

func tolerances(b *autoscalingv2.HorizontalPodAutoscalerBehavior) (up, down float64) {
	up, down = usual, usual
	if b != nil && b.ScaleUp != nil && b.ScaleUp.Tolerance != nil {
		up = b.ScaleUp.Tolerance.AsApproximateFloat64()
	}
	if b != nil && b.ScaleDown != nil && b.ScaleDown.Tolerance != nil {
		down = b.ScaleDown.Tolerance.AsApproximateFloat64()
	}
	return up, down
}

func proposalOf(m *autoscalingv2.MetricSpec, a Answer, in Input, up, down float64) (proposal, error) {
	q := question{in: in, up: up, down: down}
	switch {
	case m.Type == autoscalingv2.ResourceMetricSourceType && m.Resource != nil:
		q.resource, q.target = m.Resource.Name, m.Resource.Target
	case m.Type == autoscalingv2.ContainerResourceMetricSourceType && m.ContainerResource != nil:
		q.resource, q.target, q.container = m.ContainerResource.Name, m.ContainerResource.Target, m.ContainerResource.Container
	case m.Type == autoscalingv2.PodsMetricSourceType && m.Pods != nil:
		return q.ofPods(m.Pods, a)
	case m.Type == autoscalingv2.ObjectMetricSourceType && m.Object != nil:
		return q.ofObject(m.Object, a)
	case m.Type == autoscalingv2.ExternalMetricSourceType && m.External != nil:
		return q.ofExternal(m.External, a)
	default:
		return proposal{}, fmt.Errorf("there is no metric of type %q", m.Type)
	}
	replicas, current, err := q.answer()
	if err != nil {
		return proposal{}, fmt.Errorf("failed to get %s %s: %w", q.resource, q.kind(), err)
	}
	p := proposal{replicas: replicas, status: autoscalingv2.MetricStatus{Type: m.Type}}
	p.name = fmt.Sprintf("%s resource %s", q.resource, q.kind())
	if q.container == "" {
		p.status.Resource = &autoscalingv2.ResourceMetricStatus{Name: q.resource, Current: current}
		return p, nil
	}
	p.name = fmt.Sprintf("%s container resource %s", q.resource, q.kind())
	p.status.ContainerResource = &autoscalingv2.ContainerResourceMetricStatus{Name: q.resource, Container: q.container, Current: current}
	return p, nil
}

// question is one metric.
type question struct {
	in Input
	// resource is what pods use of; "": each pod has a value in custom.
	resource  corev1.ResourceName
	custom    map[string]int64 // in thousandths, by the pod's name
	container string           // empty: all of a pod
	target    autoscalingv2.MetricTarget
	up, down  float64
}

func (q question) kind() string {
	if q.target.AverageUtilization != nil {
		return "utilization (percentage of request)"
	}
	return "usage"
}

// groups are pods by what is known of them; amounts are in thousandths.
type groups struct {
	used             map[string]int64 // by name; of pods that count
	unready, missing []string
	requests         map[string]int64 // of all three
}

// answer is the number of replicas with which the average would be the target.
func (q question) answer() (int32, autoscalingv2.MetricValueStatus, error) {
	var none autoscalingv2.MetricValueStatus
	if q.custom == nil && q.in.MetricsErr != nil {
		return 0, none, q.in.MetricsErr
	}
	g, err := q.group()
	if err != nil {
		return 0, none, err
	}
	if len(g.used) == 0 {
		return 0, none, fmt.Errorf("did not receive metrics for targeted pods (pods might be unready)")
	}
	ratio, current := q.ratio(g)
	if len(g.missing) == 0 && (len(g.unready) == 0 || ratio <= 1) {
		if q.tolerated(ratio) {
			return q.in.Replicas, current, nil
		}
		return whole(ratio * float64(len(g.used))), current, nil
	}
	// A pod without a value is taken for what makes the change smaller.
	for _, name := range g.missing {
		switch {
		case ratio < 1:
			g.used[name] = q.full(g, name)
		case ratio > 1:
			g.used[name] = 0
		}
	}
	if ratio > 1 {
		for _, name := range g.unready {
			g.used[name] = 0
		}
	}
	again, _ := q.ratio(g)
	if q.tolerated(again) || ratio < 1 && again > 1 || ratio > 1 && again < 1 {
		return q.in.Replicas, current, nil
	}
	n := whole(again * float64(len(g.used)))
	if again < 1 && n > q.in.Replicas || again > 1 && n < q.in.Replicas {
		return q.in.Replicas, current, nil
	}
	return n, current, nil
}

func whole(n float64) int32 { return int32(min(math.Ceil(n), math.MaxInt32)) }

// full is what a pod without metrics is taken to use when the others use too
// little: all it requested, or the target if that is more.
func (q question) full(g groups, name string) int64 {
	if q.target.AverageUtilization != nil {
		return g.requests[name] * int64(max(100, *q.target.AverageUtilization)) / 100
	}
	return q.target.AverageValue.MilliValue()
}

func (q question) tolerated(ratio float64) bool { return 1-q.down <= ratio && ratio <= 1+q.up }

// ratio is how the average of those that count stands to the target.
func (q question) ratio(g groups) (float64, autoscalingv2.MetricValueStatus) {
	var used, requested int64
	for name, n := range g.used {
		used += n
		requested += g.requests[name]
	}
	average := used / int64(len(g.used))
	format := resource.DecimalSI
	if q.custom == nil && q.resource != corev1.ResourceCPU {
		format = resource.BinarySI
	}
	current := autoscalingv2.MetricValueStatus{AverageValue: resource.NewMilliQuantity(average, format)}
	if q.target.AverageUtilization == nil {
		return float64(average) / float64(q.target.AverageValue.MilliValue()), current
	}
	percent := int32(min(used*100/requested, math.MaxInt32))
	current.AverageUtilization = &percent
	return float64(percent) / float64(*q.target.AverageUtilization), current
}

// group sorts the pods. A pod that ends counts nowhere.
func (q question) group() (groups, error) {
	g := groups{used: map[string]int64{}, requests: map[string]int64{}}
	amounts := map[string]sample{}
	for name, n := range q.custom {
		amounts[name] = sample{amount: n}
	}
	for i := range q.in.Metrics {
		m := &q.in.Metrics[i]
		if n, ok := q.usage(m.Containers); ok && q.custom == nil {
			amounts[m.Name] = sample{n, m.Timestamp.Time, m.Window.Duration}
		}
	}
	for _, pod := range q.in.Pods {
		if !pods.Active(pod) {
			continue
		}
		if q.target.AverageUtilization != nil {
			n, err := q.requested(pod)
			if err != nil {
				return g, err
			}
			g.requests[pod.Name] = n
		}
		s, known := amounts[pod.Name]
		switch {
		case pod.Status.Phase == corev1.PodPending:
			g.unready = append(g.unready, pod.Name)
		case !known:
			g.missing = append(g.missing, pod.Name)
		case q.resource == corev1.ResourceCPU && starting(pod, s, q.in.Now):
			g.unready = append(g.unready, pod.Name)
		default:
			g.used[pod.Name] = s.amount
		}
	}
	return g, nil
}

type sample struct {
	amount int64
	at     time.Time
	window time.Duration
}

// starting: the pod's use of CPU is not yet that of its work.
func starting(pod *corev1.Pod, s sample, now time.Time) bool {
	ready := pods.Condition(pod, corev1.PodReady)
	if ready == nil || pod.Status.StartTime == nil {
		return true
	}
	if pod.Status.StartTime.Add(startup).After(now) {
		return ready.Status == corev1.ConditionFalse || s.at.Before(ready.LastTransitionTime.Add(s.window))
	}
	return ready.Status == corev1.ConditionFalse && pod.Status.StartTime.Add(firstReady).After(ready.LastTransitionTime.Time)
}

// usage sums what containers use; false: one of them does not say.
func (q question) usage(containers []metricsv1beta1.ContainerMetrics) (n int64, ok bool) {
	for _, c := range containers {
		if q.container != "" && c.Name != q.container {
			continue
		}
		amount, known := c.Usage[q.resource]
		if !known {
			return 0, false
		}
		n, ok = n+amount.MilliValue(), true
	}
	return n, ok
}

// requested is what a pod requests as a whole, or the sum of what its containers do,
// sidecars included.
func (q question) requested(pod *corev1.Pod) (n int64, err error) {
	if whole := pod.Spec.Resources; q.container == "" && whole != nil {
		if request, ok := whole.Requests[q.resource]; ok && request.Sign() > 0 {
			return request.MilliValue(), nil
		}
	}
	found := false
	add := func(c *corev1.Container) error {
		if q.container != "" && c.Name != q.container {
			return nil
		}
		request, ok := c.Resources.Requests[q.resource]
		if !ok || request.Sign() <= 0 {
			return fmt.Errorf("missing request for %s in container %s of Pod %s", q.resource, c.Name, pod.Name)
		}
		n, found = n+request.MilliValue(), true
		return nil
	}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		if ptr.Deref(c.RestartPolicy, "") != corev1.ContainerRestartPolicyAlways {
			continue
		}
		if err := add(c); err != nil {
			return 0, err
		}
	}
	for i := range pod.Spec.Containers {
		if err := add(&pod.Spec.Containers[i]); err != nil {
			return 0, err
		}
	}
	if !found {
		return 0, fmt.Errorf("no container %s in Pod %s", q.container, pod.Name)
	}
	return n, nil
}
