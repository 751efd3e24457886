package scheduler

import (
	"math/rand/v2"
)

// maxScore is the best a rule can give a node.
const maxScore = 100

// Score is one rule that prefers some nodes to others.
type Score struct {
	Name   string
	weight int64
	// prepare looks at the pod once and returns the value of one node, or nil
	// if the rule has no opinion about the pod.
	prepare prepareScore
	// scale maps the values of all candidates to 0 … maxScore; nil: they are.
	scale func(values []int64)
}

type prepareScore func(s *snapshot, p *podInfo) func(n *nodeInfo) int64

// scores is THE list of preferences; those of one name are turned on and weighed
// together. Spreading one owner's pods outweighs the rest together with a few percent
// of load: replicas exist to fail apart.
var scores = []Score{
	{Name: resourcesFit, weight: 1, prepare: scoreLeastAllocated},
	{Name: "NodeResourcesBalancedAllocation", weight: 1, prepare: scoreBalanced},
	{Name: ownerSpread, weight: 3, prepare: scoreOwnerSpread, scale: fewerIsBetter},
	{Name: ownerSpread, weight: 3, prepare: scoreOwnerZones, scale: fewerIsBetter},
	{Name: "TaintToleration", weight: 3, prepare: scoreTaints, scale: fewerIsBetter},
	{Name: "NodeAffinity", weight: 2, prepare: scoreNodeAffinity, scale: moreIsBetter},
	{Name: interPodAffinity, weight: 2, prepare: scorePodAffinity, scale: moreIsBetter},
	{Name: topologySpread, weight: 2, prepare: scoreSpread, scale: fewerIsBetter},
	{Name: "ImageLocality", weight: 1, prepare: scoreImageLocality},
	{Name: dynamicResources, weight: 2, prepare: scoreDevices, scale: moreIsBetter},
}

// moreIsBetter maps the least value to 0 and the greatest to maxScore.
func moreIsBetter(values []int64) {
	least, most := bounds(values)
	for i := range values {
		if most == least {
			values[i] = 0
			continue
		}
		values[i] = maxScore * (values[i] - least) / (most - least)
	}
}

// fewerIsBetter maps 0 to maxScore and the greatest value to 0.
func fewerIsBetter(values []int64) {
	_, most := bounds(values)
	for i := range values {
		if most == 0 {
			values[i] = maxScore
			continue
		}
		values[i] = maxScore * (most - values[i]) / most
	}
}

func bounds(values []int64) (least, most int64) {
	least, most = values[0], values[0]
	for _, v := range values[1:] {
		least, most = min(least, v), max(most, v)
	}
	return least, most
}

// best returns the node with the highest weighted sum; equal ones share by
// chance, so that a burst of alike pods does not pile up on one node.
func best(s *snapshot, p *podInfo, fit []*nodeInfo) *nodeInfo {
	if len(fit) == 1 {
		return fit[0]
	}
	sums := total(s, p, fit)
	chosen, ties := 0, 1
	for i := 1; i < len(fit); i++ {
		switch {
		case sums[i] > sums[chosen]:
			chosen, ties = i, 1
		case sums[i] == sums[chosen]:
			ties++
			if rand.IntN(ties) == 0 {
				chosen = i
			}
		}
	}
	return fit[chosen]
}

func total(s *snapshot, p *podInfo, fit []*nodeInfo) []int64 {
	sums := make([]int64, len(fit))
	values := make([]int64, len(fit))
	for _, score := range s.profile(p).scores {
		value := score.prepare(s, p)
		if value == nil {
			continue
		}
		for j, n := range fit {
			values[j] = value(n)
		}
		if score.scale != nil {
			score.scale(values)
		}
		for j := range fit {
			sums[j] += score.weight * values[j]
		}
	}
	return sums
}
