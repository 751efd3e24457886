package devicetaint

import (
	"math"
	"strings"
	"testing"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/devices"
)

func at(second int64) *metav1.Time { return ptr.To(metav1.NewTime(time.Unix(second, 0))) }

// ruleOf has the taint "k" with the effect on devices of the name.
func ruleOf(name, device string, effect resourcev1.DeviceTaintEffect, added *metav1.Time) *resourcev1.DeviceTaintRule {
	return &resourcev1.DeviceTaintRule{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid-" + name), Generation: 3},
		Spec: resourcev1.DeviceTaintRuleSpec{
			DeviceSelector: &resourcev1.DeviceTaintSelector{Device: &device},
			Taint:          resourcev1.DeviceTaint{Key: "k", Effect: effect, TimeAdded: added},
		},
	}
}

func tolerates(seconds *int64) resourcev1.DeviceToleration {
	return resourcev1.DeviceToleration{Key: "k", Operator: resourcev1.DeviceTolerationOpExists, TolerationSeconds: seconds}
}

// TestWhenPodsGo: the claim has the devices x and y of the pool "p"; x is
// published with the taints of the case.
func TestWhenPodsGo(t *testing.T) {
	const ex, no, none = resourcev1.DeviceTaintEffectNoExecute, resourcev1.DeviceTaintEffectNoSchedule, resourcev1.DeviceTaintEffectNone
	rules := func(r ...*resourcev1.DeviceTaintRule) []*resourcev1.DeviceTaintRule { return r }
	published := func(t ...resourcev1.DeviceTaint) []resourcev1.DeviceTaint { return t }
	some := func(t ...resourcev1.DeviceToleration) []resourcev1.DeviceToleration { return t }
	other := tolerates(nil)
	other.Key = "other"
	milder := tolerates(nil)
	milder.Effect = no
	for name, c := range map[string]struct {
		taints    []resourcev1.DeviceTaint
		rules     []*resourcev1.DeviceTaintRule
		tolerates []resourcev1.DeviceToleration
		want      int64 // 0: they stay
		words     string
	}{
		"none":                          {},
		"published":                     {taints: published(resourcev1.DeviceTaint{Key: "k", Value: "v", Effect: ex, TimeAdded: at(10)}), want: 10, words: "taint k=v of device d/p/x"},
		"published, other effects":      {taints: published(resourcev1.DeviceTaint{Key: "k", Effect: no, TimeAdded: at(10)}, resourcev1.DeviceTaint{Key: "k", Effect: "Later", TimeAdded: at(10)})},
		"rule":                          {rules: rules(ruleOf("r", "x", ex, at(20))), want: 20, words: "taint k of device d/p/x by DeviceTaintRule r"},
		"rule of a device that is gone": {rules: rules(ruleOf("r", "y", ex, at(20))), want: 20},
		"rules of other devices":        {rules: rules(ruleOf("r", "z", ex, at(20)), &resourcev1.DeviceTaintRule{Spec: resourcev1.DeviceTaintRuleSpec{Taint: resourcev1.DeviceTaint{Key: "k", Effect: ex}}})},
		"rules of other effects":        {rules: rules(ruleOf("r", "x", no, at(20)), ruleOf("s", "x", none, at(20)))},
		"the earliest":                  {taints: published(resourcev1.DeviceTaint{Key: "k", Effect: ex, TimeAdded: at(40)}), rules: rules(ruleOf("r", "x", ex, at(30)), ruleOf("s", "y", ex, at(50))), want: 30},
		"without a time":                {rules: rules(ruleOf("r", "x", ex, nil)), want: 5},
		"tolerated":                     {rules: rules(ruleOf("r", "x", ex, at(20))), tolerates: some(tolerates(nil))},
		"tolerated for a while":         {rules: rules(ruleOf("r", "x", ex, at(20))), tolerates: some(tolerates(ptr.To[int64](60))), want: 80},
		"the shortest":                  {rules: rules(ruleOf("r", "x", ex, at(20))), tolerates: some(tolerates(ptr.To[int64](60)), tolerates(ptr.To[int64](7))), want: 27},
		"no limit outdoes limits":       {rules: rules(ruleOf("r", "x", ex, at(20))), tolerates: some(tolerates(ptr.To[int64](60)), tolerates(nil))},
		"less than nothing":             {rules: rules(ruleOf("r", "x", ex, at(20))), tolerates: some(tolerates(ptr.To[int64](-5))), want: 20},
		"another taint is tolerated":    {rules: rules(ruleOf("r", "x", ex, at(20))), tolerates: some(other, milder), want: 20},
	} {
		claim := &resourcev1.ResourceClaim{}
		claim.Status.Allocation = &resourcev1.AllocationResult{Devices: resourcev1.DeviceAllocationResult{Results: []resourcev1.DeviceRequestAllocationResult{
			{Driver: "d", Pool: "p", Device: "x", Tolerations: c.tolerates}, {Driver: "d", Pool: "p", Device: "y", Tolerations: c.tolerates},
		}}}
		got := decide(claim, taintsOf(claim, func(id devices.ID) *resourcev1.Device {
			if id != (devices.ID{Driver: "d", Pool: "p", Device: "x"}) {
				return nil
			}
			return &resourcev1.Device{Name: "x", Taints: c.taints}
		}, c.rules), time.Unix(5, 0))
		if stays := len(got.taints) == 0; stays != (c.want == 0) || !stays && got.when.Unix() != c.want || !strings.Contains(got.reasons(), c.words) {
			t.Errorf("%s: at %v for %q, want %d", name, got.when, got.reasons(), c.want)
		}
	}
	if wait, forever := tolerance(some(tolerates(ptr.To[int64](math.MaxInt64))), &resourcev1.DeviceTaint{Key: "k", Effect: ex}); forever || wait < 100*365*24*time.Hour {
		t.Errorf("the longest time is %v, %v", wait, forever)
	}
}

// TestWhatARuleDoes: the words of the condition.
func TestWhatARuleDoes(t *testing.T) {
	for effect, cases := range map[resourcev1.DeviceTaintEffect][]struct {
		e      effects
		status metav1.ConditionStatus
		want   string
	}{
		resourcev1.DeviceTaintEffectNoExecute: {
			{effects{}, metav1.ConditionFalse, "NotStarted: No pod has a device that the rule selects and does not tolerate the taint."},
			{effects{pods: 2, namespaces: 1}, metav1.ConditionTrue, "PodsPendingEviction: 2 pods in 1 namespace to be evicted."},
			{effects{pods: 1, namespaces: 1, evicted: 1}, metav1.ConditionTrue, "PodsPendingEviction: 1 pod in 1 namespace to be evicted. 1 pod evicted since this leader began."},
			{effects{evicted: 2}, metav1.ConditionFalse, "Completed: 2 pods evicted since this leader began."},
		},
		resourcev1.DeviceTaintEffectNoSchedule: {{effects{pods: 1}, metav1.ConditionFalse, "OtherEffect: Only the effect NoExecute evicts pods."}},
		resourcev1.DeviceTaintEffectNone: {{effects{pods: 3, namespaces: 2, published: 8, allocated: 4}, metav1.ConditionFalse,
			"NoEffect: With the effect NoExecute 3 pods in 2 namespaces would be evicted: the rule selects 8 published devices, 4 allocated. This is found out once for each change of the rule."}},
	} {
		for _, c := range cases {
			got := conditionOf(ruleOf("r", "x", effect, nil), c.e)
			if words := got.Reason + ": " + got.Message; words != c.want || got.Status != c.status || got.Type != "EvictionInProgress" || got.ObservedGeneration != 3 {
				t.Errorf("%s %+v: %+v, want %q", effect, c.e, got, c.want)
			}
		}
	}
}
