package scheduler

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// preemption is the name under which a profile's pods displace others or do not.
const preemption = "DefaultPreemption"

// profile is how pods of one schedulerName are placed. It does not change.
type profile struct {
	name    string
	filters []Filter // in the order of the list of all
	scores  []Score  // with this profile's weights
	// preempts says whether pods of lower priority may go for its pods' sake.
	preempts bool
	// percent of the nodes that a search is to find, at least sample; 0: sample.
	percent int
	args    pluginArgs
}

func defaultProfile() *profile {
	return &profile{name: Name, filters: filters, scores: scores, preempts: true, args: defaultArgs()}
}

// allocates reports whether claims to devices are allocated for the profile's
// pods.
func (p *profile) allocates() bool {
	return slices.ContainsFunc(p.filters, func(f Filter) bool { return f.Name == dynamicResources })
}

// profiles are all there are, by schedulerName.
type profiles map[string]*profile

func profilesOf(list ...*profile) profiles {
	out := profiles{}
	for _, p := range list {
		out[p.name] = p
	}
	return out
}

// of returns the profile of a pod's schedulerName; nil: it is another scheduler's.
func (p profiles) of(pod *corev1.Pod) *profile {
	if pod.Spec.SchedulerName == "" {
		return p[Name]
	}
	return p[pod.Spec.SchedulerName]
}

// wanted is how many fitting nodes a search looks for. A pod with preferences of
// its own chooses among all: the one it prefers may be the last.
func (p *profile) wanted(pod *podInfo, nodes int) int {
	if pod.choosy || p.args.added.preferred != nil || pod.devices != nil && pod.devices.ranked {
		return nodes
	}
	return min(max(sample, nodes*p.percent/100), nodes)
}

// plugins are what a profile is made of; every name of the lists is in them.
type plugins struct {
	filters  map[string]bool
	weights  map[string]int64 // of scores
	preempts bool
}

func defaultPlugins() plugins {
	p := plugins{filters: map[string]bool{}, weights: map[string]int64{}, preempts: true}
	for i := range filters {
		p.filters[filters[i].Name] = true
	}
	for i := range scores {
		p.weights[scores[i].Name] = scores[i].weight
	}
	return p
}

// profile makes the profile of the plugins.
func (p plugins) profile(name string, percent int, args pluginArgs) *profile {
	out := &profile{name: name, percent: percent, preempts: p.preempts, args: args}
	for i := range filters {
		if p.filters[filters[i].Name] {
			out.filters = append(out.filters, filters[i])
		}
	}
	for _, s := range slices.Clone(scores) {
		if s.weight = p.weights[s.Name]; s.weight == 0 || s.Name == ownerSpread && args.listed {
			continue
		}
		if s.Name == resourcesFit && args.fit != nil {
			s.prepare = args.fit
		}
		out.scores = append(out.scores, s)
	}
	return out
}
