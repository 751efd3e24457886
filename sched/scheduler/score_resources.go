package scheduler

import (
	"errors"
	"fmt"
	"math"

	corev1 "k8s.io/api/core/v1"
	configv1 "k8s.io/kube-scheduler/config/v1"
	"sigs.k8s.io/yaml"
)

// resourcesFit is the rule whose strategy a profile may choose.
const resourcesFit = "NodeResourcesFit"

// share is how full a resource would be, 0 … 1, with used of have taken.
func share(used, have int64) float64 {
	if have <= 0 {
		return 1
	}
	return min(1, float64(used)/float64(have))
}

// scoreLeastAllocated prefers nodes with much free CPU and memory.
func scoreLeastAllocated(_ *snapshot, p *podInfo) func(*nodeInfo) int64 {
	return func(n *nodeInfo) int64 {
		free := 2 - share(n.weight.cpu+p.weight.cpu, n.allocatable.cpu) - share(n.weight.memory+p.weight.memory, n.allocatable.memory)
		return int64(free / 2 * maxScore)
	}
}

// scoreBalanced prefers nodes whose CPU and memory fill up evenly: what is
// left of one is of no use without the other. It counts what was asked for,
// not the weights: where those exceed the CPU there is, more memory in use
// would look more even, and pods that ask for nothing would pile up.
func scoreBalanced(_ *snapshot, p *podInfo) func(*nodeInfo) int64 {
	if p.requests.cpu == 0 && p.requests.memory == 0 {
		return nil
	}
	return func(n *nodeInfo) int64 {
		cpu := share(n.requested.cpu+p.requests.cpu, n.allocatable.cpu)
		memory := share(n.requested.memory+p.requests.memory, n.allocatable.memory)
		return int64((1 - math.Abs(cpu-memory)) * maxScore)
	}
}

// strategy values how full a node would be: the mean over resources of what
// value makes of each one's share, by weight.
type strategy struct {
	resources []configv1.ResourceSpec
	value     func(share float64) float64 // 0 … 1 → 0 … maxScore
}

func (s strategy) prepare(_ *snapshot, p *podInfo) func(*nodeInfo) int64 {
	return func(n *nodeInfo) int64 {
		sum, weights := 0.0, int64(0)
		for _, r := range s.resources {
			full, concerned := fullness(corev1.ResourceName(r.Name), p, n)
			if concerned {
				sum += float64(r.Weight) * s.value(full)
				weights += r.Weight
			}
		}
		if weights == 0 {
			return 0
		}
		return int64(sum / float64(weights))
	}
}

// fullness is how full the resource would be with the pod. Pods that ask for no
// processor and memory are taken to need some; another resource concerns only
// the pods that ask for it and the nodes that have it.
func fullness(name corev1.ResourceName, p *podInfo, n *nodeInfo) (full float64, concerned bool) {
	switch name {
	case corev1.ResourceCPU, corev1.ResourceMemory:
		return share(n.weight.of(name)+p.weight.of(name), n.allocatable.of(name)), true
	}
	asked, have := p.requests.of(name), n.allocatable.of(name)
	return share(n.requested.of(name)+asked, have), asked > 0 && have > 0
}

// readFit reads the scoring strategy of a NodeResourcesFitArgs; nil: the default.
func readFit(raw []byte) (prepareScore, error) {
	var args configv1.NodeResourcesFitArgs
	if err := yaml.UnmarshalStrict(raw, &args); err != nil {
		return nil, fmt.Errorf("scoringStrategy: %w", err)
	}
	if len(args.IgnoredResources)+len(args.IgnoredResourceGroups) > 0 {
		return nil, errors.New("ignoredResources, ignoredResourceGroups: not acted on here; leave them out")
	}
	file := args.ScoringStrategy
	if file == nil {
		return nil, nil //nolint:nilnil // nothing was said, which is no error
	}
	s := strategy{resources: file.Resources}
	if len(s.resources) == 0 {
		s.resources = []configv1.ResourceSpec{{Name: string(corev1.ResourceCPU), Weight: 1}, {Name: string(corev1.ResourceMemory), Weight: 1}}
	}
	for i, r := range s.resources {
		if r.Name == "" || r.Weight < 0 || r.Weight > 100 {
			return nil, fmt.Errorf("scoringStrategy.resources[%d]: a name and a weight between 1 and 100 are required, not %q and %d", i, r.Name, r.Weight)
		}
		s.resources[i].Weight = max(1, r.Weight)
	}
	switch file.Type {
	case configv1.LeastAllocated:
		s.value = func(share float64) float64 { return maxScore * (1 - share) }
	case configv1.MostAllocated:
		s.value = func(share float64) float64 { return maxScore * share }
	case configv1.RequestedToCapacityRatio:
		if file.RequestedToCapacityRatio == nil {
			return nil, errors.New("scoringStrategy.requestedToCapacityRatio: required for this type")
		}
		var err error
		if s.value, err = readShape(file.RequestedToCapacityRatio.Shape); err != nil {
			return nil, fmt.Errorf("scoringStrategy.requestedToCapacityRatio.shape%w", err)
		}
	default:
		return nil, fmt.Errorf("scoringStrategy.type %q: LeastAllocated, MostAllocated or RequestedToCapacityRatio is required", file.Type)
	}
	return s.prepare, nil
}

// readShape makes a function of points of utilization (0 … 100) and score (0 … 10),
// with straight lines between them.
func readShape(points []configv1.UtilizationShapePoint) (func(float64) float64, error) {
	if len(points) == 0 {
		return nil, errors.New(": a point is required")
	}
	for i, p := range points {
		if p.Utilization < 0 || p.Utilization > 100 || p.Score < 0 || p.Score > 10 {
			return nil, fmt.Errorf("[%d]: utilization %d and score %d: 0 to 100 and 0 to 10 are required", i, p.Utilization, p.Score)
		}
		if i > 0 && p.Utilization <= points[i-1].Utilization {
			return nil, fmt.Errorf("[%d]: utilization %d does not grow", i, p.Utilization)
		}
	}
	return func(share float64) float64 {
		at, before := share*100, points[0]
		for _, p := range points {
			if at <= float64(p.Utilization) {
				if p.Utilization == before.Utilization {
					return float64(p.Score) * maxScore / 10
				}
				part := (at - float64(before.Utilization)) / float64(p.Utilization-before.Utilization)
				return (float64(before.Score) + part*float64(p.Score-before.Score)) * maxScore / 10
			}
			before = p
		}
		return float64(before.Score) * maxScore / 10
	}, nil
}
