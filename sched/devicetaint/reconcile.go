package devicetaint

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/clusterd/clusterd/sched/internal/devices"
	"github.com/clusterd/clusterd/sched/internal/seconds"
)

// taint is a taint with NoExecute of a device that a claim has.
type taint struct {
	resourcev1.DeviceTaint
	device devices.ID
	// rule is the one that it comes from; nil: the device's driver.
	rule *resourcev1.DeviceTaintRule
}

func (t *taint) String() string {
	word := t.Key
	if t.Value != "" {
		word += "=" + t.Value
	}
	word = fmt.Sprintf("taint %s of device %s/%s/%s", word, t.device.Driver, t.device.Pool, t.device.Device)
	if t.rule != nil {
		word += fmt.Sprintf(" by DeviceTaintRule %s", t.rule.Name)
	}
	return word
}

// verdict says when the pods that use a claim have to go, and for which taints.
type verdict struct {
	when   time.Time
	taints []*taint // none: they stay
}

// reasons are the taints in words.
func (v *verdict) reasons() string {
	words := make([]string, 0, len(v.taints))
	for _, t := range v.taints {
		words = append(words, t.String())
	}
	return strings.Join(words, ", ")
}

// by reports whether the rule is one of the reasons.
func (v *verdict) by(rule types.UID) bool {
	return slices.ContainsFunc(v.taints, func(t *taint) bool { return t.rule != nil && t.rule.UID == rule })
}

// taintsOf are the taints with NoExecute of the claim's devices: those that
// drivers publish and those of rules. A rule selects a device also if no driver
// publishes it any more.
func taintsOf(claim *resourcev1.ResourceClaim, published func(devices.ID) *resourcev1.Device, rules []*resourcev1.DeviceTaintRule) (out [][]*taint) {
	if claim.Status.Allocation == nil {
		return nil
	}
	results := claim.Status.Allocation.Devices.Results
	out = make([][]*taint, len(results))
	for i := range results {
		id := devices.Of(&results[i])
		if device := published(id); device != nil {
			for _, t := range device.Taints {
				if t.Effect == resourcev1.DeviceTaintEffectNoExecute {
					out[i] = append(out[i], &taint{DeviceTaint: t, device: id})
				}
			}
		}
		for _, rule := range rules {
			if rule.Spec.Taint.Effect == resourcev1.DeviceTaintEffectNoExecute && devices.Selects(rule.Spec.DeviceSelector, id) {
				out[i] = append(out[i], &taint{DeviceTaint: rule.Spec.Taint, device: id, rule: rule})
			}
		}
	}
	return out
}

// decide says when the claim's pods have to go: at the earliest time at which one
// of its devices has a taint that the request for it tolerates no longer. taints
// are those of taintsOf. first is the time of a taint that has none of its own.
func decide(claim *resourcev1.ResourceClaim, taints [][]*taint, first time.Time) (v verdict) {
	for i := range taints {
		for _, t := range taints[i] {
			wait, forever := tolerance(claim.Status.Allocation.Devices.Results[i].Tolerations, &t.DeviceTaint)
			if forever {
				continue
			}
			since := first
			if t.TimeAdded != nil {
				since = t.TimeAdded.Time
			}
			if when := since.Add(wait); len(v.taints) == 0 || when.Before(v.when) {
				v.when = when
			}
			v.taints = append(v.taints, t)
		}
	}
	return v
}

// tolerance is how long the taint is tolerated. The shortest of the tolerations
// with a limit counts; one without a limit outdoes them all.
func tolerance(tolerations []resourcev1.DeviceToleration, t *resourcev1.DeviceTaint) (wait time.Duration, forever bool) {
	shortest, found := int64(math.MaxInt64), false
	for i := range tolerations {
		if !resourceclaim.ToleratesTaint(tolerations[i], *t) {
			continue
		}
		limit := tolerations[i].TolerationSeconds
		if limit == nil {
			return 0, true
		}
		found, shortest = true, min(shortest, max(*limit, 0))
	}
	if !found {
		return 0, false
	}
	return seconds.Duration(shortest), false
}

// effects is what a rule does, or would do.
type effects struct {
	published, allocated int // devices that it selects
	pods, namespaces     int // that have to go, or would have to
	evicted              int // since this leader began
}

// conditionOf says what the rule does; its time is left to the caller.
func conditionOf(rule *resourcev1.DeviceTaintRule, e effects) metav1.Condition {
	c := metav1.Condition{Type: resourcev1.DeviceTaintConditionEvictionInProgress, Status: metav1.ConditionFalse, ObservedGeneration: rule.Generation}
	var words []string
	switch rule.Spec.Taint.Effect {
	case resourcev1.DeviceTaintEffectNoExecute:
		switch {
		case e.pods > 0:
			c.Status, c.Reason = metav1.ConditionTrue, "PodsPendingEviction"
			words = append(words, fmt.Sprintf("%s in %s to be evicted.", count(e.pods, "pod"), count(e.namespaces, "namespace")))
		case e.evicted > 0:
			c.Reason = "Completed"
		default:
			c.Reason = "NotStarted"
			words = append(words, "No pod has a device that the rule selects and does not tolerate the taint.")
		}
	case resourcev1.DeviceTaintEffectNone:
		c.Reason = "NoEffect"
		words = append(words, fmt.Sprintf("With the effect NoExecute %s in %s would be evicted: the rule selects %s, %d allocated. This is found out once for each change of the rule.",
			count(e.pods, "pod"), count(e.namespaces, "namespace"), count(e.published, "published device"), e.allocated))
	default:
		c.Reason = "OtherEffect"
		words = append(words, "Only the effect NoExecute evicts pods.")
	}
	if e.evicted > 0 {
		words = append(words, fmt.Sprintf("%s evicted since this leader began.", count(e.evicted, "pod")))
	}
	c.Message = strings.Join(words, " ")
	return c
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
