package scheduler

import (
	"fmt"

	configv1 "k8s.io/kube-scheduler/config/v1"
	"sigs.k8s.io/yaml"
)

// podAffinityArgs say how much terms of placed pods count for the pods of a profile.
type podAffinityArgs struct {
	required int // the weight of a required affinity term
	// ignore has terms of placed pods count for pods only that have preferences of
	// this kind themselves.
	ignore bool
}

// scorePodAffinity sums the weights of the pod's preferred (anti-)affinity terms
// over the pods in a node's domains, and those of the terms that placed pods have
// and that match the pod.
func scorePodAffinity(s *snapshot, p *podInfo) func(*nodeInfo) int64 {
	args := s.profile(p).args.podAffinity
	if args.ignore && len(p.preferred) == 0 {
		return nil
	}
	type wish struct {
		topology string
		weight   int // of each that is counted
		counts   map[string]int
	}
	var wishes []wish
	add := func(topology string, weight int, counts map[string]int) {
		if len(counts) > 0 {
			wishes = append(wishes, wish{topology, weight, counts})
		}
	}
	for i := range p.preferred {
		w := &p.preferred[i]
		add(w.topology, w.weight, s.meeting(w.term).in(w.topology))
	}
	if args.required > 0 {
		s.attracting.concerning(s, p, func(e *held) { add(e.topology, args.required, e.in(e.topology)) })
	}
	s.preferring.concerning(s, p, func(e *held) { add(e.topology, 1, e.in(e.topology)) })
	if len(wishes) == 0 {
		return nil
	}
	return func(n *nodeInfo) (sum int64) {
		for i := range wishes {
			if value, ok := topologyValue(n, wishes[i].topology); ok {
				sum += int64(wishes[i].weight) * int64(wishes[i].counts[value])
			}
		}
		return sum
	}
}

// readPodAffinity reads an InterPodAffinityArgs.
func readPodAffinity(raw []byte) (podAffinityArgs, error) {
	var args configv1.InterPodAffinityArgs
	if err := yaml.UnmarshalStrict(raw, &args); err != nil {
		return podAffinityArgs{}, err
	}
	out := defaultPodAffinity
	out.ignore = args.IgnorePreferredTermsOfExistingPods
	if w := args.HardPodAffinityWeight; w != nil {
		if *w < 0 || *w > 100 {
			return podAffinityArgs{}, fmt.Errorf("hardPodAffinityWeight %d: between 0 and 100 is required", *w)
		}
		out.required = int(*w)
	}
	return out, nil
}

// defaultPodAffinity is what counts where a profile says nothing.
var defaultPodAffinity = podAffinityArgs{required: 1}
