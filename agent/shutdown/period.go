package shutdown

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
)

// critical is the priority from which on pods belong to the system
// (system-cluster-critical).
const critical = 2_000_000_000

// Period is how long pods of a priority, and of those above it up to the next Period,
// have to end.
type Period struct {
	Priority int32
	Grace    time.Duration
}

// Periods are those of two classes of pods, as the kubelet has them: all have total,
// of which the critical ones have the last part. No total: none.
func Periods(total, ofCritical time.Duration) []Period {
	if total <= 0 {
		return nil
	}
	return []Period{{0, total - ofCritical}, {critical, ofCritical}}
}

// Parse reads PRIORITY=DURATION, separated by commas, such as "0=20s,2000000000=10s":
// how long pods of that priority and above have to end, up to the next.
func Parse(text string) ([]Period, error) {
	var out []Period
	for part := range strings.SplitSeq(text, ",") {
		priority, grace, ok := strings.Cut(strings.TrimSpace(part), "=")
		p, err := strconv.ParseInt(priority, 10, 32)
		d, err2 := time.ParseDuration(grace)
		if !ok || errors.Join(err, err2) != nil || d < 0 {
			return nil, fmt.Errorf("%q: write it as PRIORITY=DURATION, such as 0=20s", part)
		}
		if slices.ContainsFunc(out, func(o Period) bool { return o.Priority == int32(p) }) {
			return nil, fmt.Errorf("%q: priority %d is there twice: leave one out", part, p)
		}
		out = append(out, Period{int32(p), d})
	}
	sortPeriods(out)
	return out, nil
}

func sortPeriods(periods []Period) {
	slices.SortFunc(periods, func(a, b Period) int { return cmp.Compare(a.Priority, b.Priority) })
}

// total is how long all of them are together.
func total(periods []Period) (sum time.Duration) {
	for _, p := range periods {
		sum += p.Grace
	}
	return sum
}

// fit makes periods no longer together than limit, each by the same part: critical
// pods are not to end without any time because the others have used it up.
func fit(periods []Period, limit time.Duration) []Period {
	limit = max(limit, 0)
	sum := total(periods)
	if sum <= limit {
		return periods
	}
	out := slices.Clone(periods)
	for i := range out {
		out[i].Grace = time.Duration(float64(out[i].Grace) * float64(limit) / float64(sum))
	}
	return out
}

// group is the pods of one Period.
type group struct {
	Period
	pods []*v1.Pod
}

// groups sorts pods by the periods, which are in the order of their priorities. A pod
// belongs to the highest period that is not above its priority, or to the lowest.
func groups(periods []Period, pods []*v1.Pod) []group {
	out := make([]group, len(periods))
	for i, p := range periods {
		out[i].Period = p
	}
	for _, p := range pods {
		var priority int32
		if p.Spec.Priority != nil {
			priority = *p.Spec.Priority
		}
		i := 0
		for i+1 < len(out) && out[i+1].Priority <= priority {
			i++
		}
		out[i].pods = append(out[i].pods, p)
	}
	return out
}
