package hpa

import (
	"math"
	"slices"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"

	"github.com/clusterd/clusterd/apis/autoscaling"
)

// defaultDownWindow is the stabilization window of an autoscaler that sets none.
const defaultDownWindow = 5 * time.Minute

// keep is how long changes are remembered: the longest period of a policy.
const keep = 30 * time.Minute

// withinRange is the reason of a number that nothing limits.
const withinRange = "DesiredWithinRange"

// point is a number of pods at a time.
type point struct {
	n  int32
	at time.Time
}

// History is what earlier decisions leave for later ones. It lives as long as
// the leader; a new one begins with the number of replicas that it finds.
type History struct {
	wanted    []point // what metrics asked for
	ups, down []point // by how much was scaled
}

// Scaled is the history after a change of the target.
func (h History) Scaled(from, to int32, now time.Time) History {
	if to > from {
		h.ups = append(since(h.ups, now.Add(-keep)), point{to - from, now})
	} else {
		h.down = append(since(h.down, now.Add(-keep)), point{from - to, now})
	}
	return h
}

// since returns a copy of the points after t.
func since(points []point, t time.Time) []point {
	return slices.DeleteFunc(slices.Clone(points), func(p point) bool { return !p.at.After(t) })
}

func sum(points []point) (n int32) {
	for _, p := range points {
		n += p.n
	}
	return n
}

func rulesOf(b *autoscalingv2.HorizontalPodAutoscalerBehavior) (up, down *autoscalingv2.HPAScalingRules) {
	up, down = autoscaling.DefaultRules()
	if b != nil && b.ScaleUp != nil {
		up = b.ScaleUp
	}
	if b != nil && b.ScaleDown != nil {
		down = b.ScaleDown
	}
	return up, down
}

func window(rules *autoscalingv2.HPAScalingRules, unset time.Duration) time.Duration {
	if rules.StabilizationWindowSeconds == nil {
		return unset
	}
	return time.Duration(*rules.StabilizationWindowSeconds) * time.Second
}

// stabilize goes up no further than the lowest and down no further than the
// highest wish within the windows.
func (h History) stabilize(current, wanted int32, up, down *autoscalingv2.HPAScalingRules, now time.Time) (int32, History) {
	upWindow, downWindow := window(up, 0), window(down, defaultDownWindow)
	if len(h.wanted) == 0 {
		h.wanted = []point{{current, now}}
	}
	lowest, highest := wanted, wanted
	for _, p := range h.wanted {
		if p.at.After(now.Add(-upWindow)) {
			lowest = min(lowest, p.n)
		}
		if p.at.After(now.Add(-downWindow)) {
			highest = max(highest, p.n)
		}
	}
	h.wanted = append(since(h.wanted, now.Add(-max(upWindow, downWindow))), point{wanted, now})
	return min(max(current, lowest), highest), h
}

// limit keeps a change within the policies and the bounds.
func (h History) limit(current, wanted, least, most int32, up, down *autoscalingv2.HPAScalingRules, now time.Time) (n int32, reason, message string) {
	switch {
	case wanted > current:
		allowed := max(current, h.highest(current, up, now))
		if wanted > min(allowed, most) {
			if allowed < most {
				return allowed, "ScaleUpLimit", "the desired replica count is increasing faster than the maximum scale rate"
			}
			return most, "TooManyReplicas", "the desired replica count is more than the maximum replica count"
		}
	case wanted < current:
		allowed := min(current, h.lowest(current, down, now))
		if wanted < max(allowed, least) {
			if allowed > least {
				return allowed, "ScaleDownLimit", "the desired replica count is decreasing faster than the maximum scale rate"
			}
			return least, "TooFewReplicas", "the desired replica count is less than the minimum replica count"
		}
	}
	return wanted, withinRange, "the desired count is within the acceptable range"
}

// start is how many replicas there were when the period of a policy began.
func (h History) start(current int32, p autoscalingv2.HPAScalingPolicy, now time.Time) float64 {
	begin := now.Add(-time.Duration(p.PeriodSeconds) * time.Second)
	return float64(current - sum(since(h.ups, begin)) + sum(since(h.down, begin)))
}

func (h History) highest(current int32, rules *autoscalingv2.HPAScalingRules, now time.Time) int32 {
	return choose(rules, current, true, func(p autoscalingv2.HPAScalingPolicy) float64 {
		if p.Type == autoscalingv2.PodsScalingPolicy {
			return h.start(current, p, now) + float64(p.Value)
		}
		// Whole numbers first: 1 + 0.1 is no exact number, and Ceil would show it.
		return math.Ceil(h.start(current, p, now) * float64(100+int64(p.Value)) / 100)
	})
}

func (h History) lowest(current int32, rules *autoscalingv2.HPAScalingRules, now time.Time) int32 {
	return choose(rules, current, false, func(p autoscalingv2.HPAScalingPolicy) float64 {
		if p.Type == autoscalingv2.PodsScalingPolicy {
			return h.start(current, p, now) - float64(p.Value)
		}
		return math.Floor(h.start(current, p, now) * float64(100-int64(p.Value)) / 100)
	})
}

// choose takes the policy with the largest or the smallest change.
func choose(rules *autoscalingv2.HPAScalingRules, current int32, up bool, of func(autoscalingv2.HPAScalingPolicy) float64) int32 {
	smallest := false
	if s := rules.SelectPolicy; s != nil {
		if *s == autoscalingv2.DisabledPolicySelect {
			return current
		}
		smallest = *s == autoscalingv2.MinChangePolicySelect
	}
	if len(rules.Policies) == 0 {
		return current
	}
	best := of(rules.Policies[0])
	for _, p := range rules.Policies[1:] {
		if n := of(p); (n > best) == (up != smallest) {
			best = n
		}
	}
	return int32(max(math.MinInt32, min(best, math.MaxInt32)))
}
