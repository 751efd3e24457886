package hpa

import (
	"fmt"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"
	"k8s.io/utils/ptr"
)

// Input is what one decision is made from.
type Input struct {
	Autoscaler *autoscalingv2.HorizontalPodAutoscaler
	// Replicas is what the target's scale asks for, Exist how many it says there are.
	Replicas, Exist int32
	// Pods are those that the scale's selector matches.
	Pods []*corev1.Pod
	// Metrics is what pods use; MetricsErr says why that is not known.
	Metrics    []metricsv1beta1.PodMetrics
	MetricsErr error
	// Answers are those to the metrics of the spec that are not of resources, by
	// their place in it.
	Answers map[int]Answer
	Now     time.Time
}

// Outcome is what should become of the target.
type Outcome struct {
	Replicas int32
	// Reason says in words why Replicas is not what it was.
	Reason string
	// Failed: what pods use is not known, and nothing was decided.
	Failed  bool
	Status  autoscalingv2.HorizontalPodAutoscalerStatus
	Faults  []Fault
	History History
}

// Fault is a metric that gave no answer, for an event.
type Fault struct{ Reason, Message string }

// Decide computes how many replicas the target should have. It is a function of
// its arguments: history comes in, and what it became goes out.
func Decide(in Input, history History) Outcome {
	spec := &in.Autoscaler.Spec
	out := Outcome{Replicas: in.Replicas, Status: *in.Autoscaler.Status.DeepCopy(), History: history}
	out.Status.ObservedGeneration = ptr.To(in.Autoscaler.Generation)
	out.Status.CurrentReplicas = in.Replicas
	c := conditions{&out.Status, in.Now}
	least := ptr.Deref(spec.MinReplicas, 1)
	switch {
	case in.Replicas == 0 && least != 0:
		out.Status.CurrentMetrics = nil
		c.set(autoscalingv2.ScalingActive, false, "ScalingDisabled", "scaling is disabled since the replica count of the target is zero")
	case in.Replicas > spec.MaxReplicas:
		out.Replicas, out.Reason = spec.MaxReplicas, "Current number of replicas above Spec.MaxReplicas"
	case in.Replicas < least:
		out.Replicas, out.Reason = least, "Current number of replicas below Spec.MinReplicas"
	default:
		out.byMetrics(in, c, least)
	}
	out.Status.DesiredReplicas = out.Replicas
	return out
}

func (out *Outcome) byMetrics(in Input, c conditions, least int32) {
	wanted, metric, ok := out.propose(in, c)
	if !ok {
		out.Failed = true
		return
	}
	switch {
	case wanted > in.Replicas:
		out.Reason = metric + " above target"
	case wanted < in.Replicas:
		out.Reason = "All metrics below target"
	}
	up, down := rulesOf(in.Autoscaler.Spec.Behavior)
	steady, history := out.History.stabilize(in.Replicas, wanted, up, down, in.Now)
	out.History = history
	switch {
	case steady == wanted:
		c.set(autoscalingv2.AbleToScale, true, "ReadyForNewScale", "recommended size matches current size")
	case steady > wanted:
		c.set(autoscalingv2.AbleToScale, true, "ScaleDownStabilized", "recent recommendations were higher than current one, applying the highest recent recommendation")
	default:
		c.set(autoscalingv2.AbleToScale, true, "ScaleUpStabilized", "recent recommendations were lower than current one, applying the lowest recent recommendation")
	}
	var reason, message string
	out.Replicas, reason, message = out.History.limit(in.Replicas, steady, least, in.Autoscaler.Spec.MaxReplicas, up, down, in.Now)
	c.set(autoscalingv2.ScalingLimited, reason != withinRange, reason, message)
}

// propose takes the highest number that any metric asks for. A metric without
// an answer forbids to scale down; without any answer nothing is decided.
func (out *Outcome) propose(in Input, c conditions) (wanted int32, metric string, ok bool) {
	up, down := tolerances(in.Autoscaler.Spec.Behavior)
	statuses := make([]autoscalingv2.MetricStatus, 0, len(in.Autoscaler.Spec.Metrics))
	var first *Fault
	known := 0
	for i := range in.Autoscaler.Spec.Metrics {
		m := &in.Autoscaler.Spec.Metrics[i]
		p, err := proposalOf(m, in.Answers[i], in, up, down)
		if err != nil {
			fault := Fault{Reason: "FailedGet" + string(m.Type) + "Metric", Message: err.Error()}
			out.Faults = append(out.Faults, fault)
			if first == nil {
				first = &fault
			}
			statuses = append(statuses, autoscalingv2.MetricStatus{Type: m.Type})
			continue
		}
		if known == 0 || p.replicas > wanted {
			wanted, metric = p.replicas, p.name
		}
		known++
		statuses = append(statuses, p.status)
	}
	out.Status.CurrentMetrics = answered(statuses)
	if first != nil && (known == 0 || wanted < in.Replicas) {
		c.set(autoscalingv2.ScalingActive, false, first.Reason, "the HPA was unable to compute the replica count: "+first.Message)
		return 0, "", false
	}
	if known == 0 {
		c.set(autoscalingv2.ScalingActive, false, "InvalidMetricSourceType", "the HPA has no metrics")
		return 0, "", false
	}
	c.set(autoscalingv2.ScalingActive, true, "ValidMetricFound", fmt.Sprintf("the HPA was able to successfully calculate a replica count from %s", metric))
	return wanted, metric, true
}

// answered drops statuses that say nothing, from the end on: what stays is in
// the order of the metrics.
func answered(all []autoscalingv2.MetricStatus) []autoscalingv2.MetricStatus {
	for len(all) > 0 && equality.Semantic.DeepEqual(all[len(all)-1], autoscalingv2.MetricStatus{Type: all[len(all)-1].Type}) {
		all = all[:len(all)-1]
	}
	if len(all) == 0 {
		return nil
	}
	return all
}

// conditions are those of one status.
type conditions struct {
	status *autoscalingv2.HorizontalPodAutoscalerStatus
	now    time.Time
}

func (c conditions) set(kind autoscalingv2.HorizontalPodAutoscalerConditionType, value bool, reason, message string) {
	status := corev1.ConditionFalse
	if value {
		status = corev1.ConditionTrue
	}
	for i := range c.status.Conditions {
		have := &c.status.Conditions[i]
		if have.Type != kind {
			continue
		}
		if have.Status != status {
			have.LastTransitionTime = metav1.NewTime(c.now)
		}
		have.Status, have.Reason, have.Message = status, reason, message
		return
	}
	c.status.Conditions = append(c.status.Conditions, autoscalingv2.HorizontalPodAutoscalerCondition{
		Type: kind, Status: status, Reason: reason, Message: message, LastTransitionTime: metav1.NewTime(c.now),
	})
}
