package scheduler

import (
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	configv1 "k8s.io/kube-scheduler/config/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"
)

// pluginArgs are what a profile says of single plugins.
type pluginArgs struct {
	fit         prepareScore // scores how full a node is; nil: the default
	podAffinity podAffinityArgs
	// added has the nodes of the profile's pods meet this too.
	added addedAffinity
	// spread are the constraints of pods that have none themselves; listed: they, if
	// any, stand for the spread by owner.
	spread []corev1.TopologySpreadConstraint
	listed bool
	// A preemption chooses among leastCandidates nodes, or that part of all.
	leastCandidates, percentCandidates int
	// volumeTimeout is how long a pod waits on its node for its volumes.
	volumeTimeout time.Duration
}

// addedAffinity is node affinity of all pods of a profile.
type addedAffinity struct {
	required  *nodeaffinity.NodeSelector
	preferred *nodeaffinity.PreferredSchedulingTerms
}

func defaultArgs() pluginArgs {
	return pluginArgs{podAffinity: defaultPodAffinity, leastCandidates: maxCandidates, volumeTimeout: volumeTimeout}
}

// candidates is how many nodes a preemption chooses among.
func (a *pluginArgs) candidates(nodes int) int {
	return max(1, a.leastCandidates, nodes*a.percentCandidates/100)
}

// readers are the plugins whose arguments are read.
var readers = map[string]func(*pluginArgs, []byte) error{
	resourcesFit:                      (*pluginArgs).readFit,
	interPodAffinity:                  (*pluginArgs).readPodAffinity,
	preemption:                        (*pluginArgs).readPreemption,
	"NodeAffinity":                    (*pluginArgs).readNodeAffinity,
	"NodeResourcesBalancedAllocation": (*pluginArgs).readBalanced,
	topologySpread:                    (*pluginArgs).readSpread,
	"VolumeBinding":                   (*pluginArgs).readVolumeBinding,
	dynamicResources:                  (*pluginArgs).readDevices,
}

// readArgs reads what a profile says of single plugins.
func readArgs(list []configv1.PluginConfig) (pluginArgs, error) {
	args := defaultArgs()
	seen := map[string]bool{}
	for i, c := range list {
		if seen[c.Name] {
			return args, fmt.Errorf("pluginConfig[%d] (%s): it is in the list twice", i, c.Name)
		}
		seen[c.Name] = true
		read := readers[c.Name]
		if read == nil {
			return args, fmt.Errorf("pluginConfig[%d] (%s): there is no such plugin with arguments; leave it out", i, c.Name)
		}
		if err := read(&args, c.Args.Raw); err != nil {
			return args, fmt.Errorf("pluginConfig[%d].args.%w", i, err)
		}
	}
	return args, nil
}

func (a *pluginArgs) readFit(raw []byte) (err error) {
	a.fit, err = readFit(raw)
	return err
}

func (a *pluginArgs) readPodAffinity(raw []byte) (err error) {
	a.podAffinity, err = readPodAffinity(raw)
	return err
}

func (a *pluginArgs) readPreemption(raw []byte) error {
	var args configv1.DefaultPreemptionArgs
	if err := yaml.UnmarshalStrict(raw, &args); err != nil {
		return err
	}
	if p := args.MinCandidateNodesPercentage; p != nil {
		if *p < 0 || *p > 100 {
			return fmt.Errorf("minCandidateNodesPercentage %d: between 0 and 100 is required", *p)
		}
		a.percentCandidates = int(*p)
	}
	if n := args.MinCandidateNodesAbsolute; n != nil {
		if *n < 0 {
			return fmt.Errorf("minCandidateNodesAbsolute %d: it cannot be negative", *n)
		}
		a.leastCandidates = int(*n)
	}
	if a.leastCandidates == 0 && a.percentCandidates == 0 {
		return errors.New("minCandidateNodesAbsolute 0, minCandidateNodesPercentage 0: one of them has to be more")
	}
	return nil
}

func (a *pluginArgs) readNodeAffinity(raw []byte) error {
	var args configv1.NodeAffinityArgs
	if err := yaml.UnmarshalStrict(raw, &args); err != nil {
		return err
	}
	added := args.AddedAffinity
	if added == nil {
		return nil
	}
	var err error
	if r := added.RequiredDuringSchedulingIgnoredDuringExecution; r != nil {
		if a.added.required, err = nodeaffinity.NewNodeSelector(r); err != nil {
			return fmt.Errorf("addedAffinity.requiredDuringSchedulingIgnoredDuringExecution: %w", err)
		}
	}
	if p := added.PreferredDuringSchedulingIgnoredDuringExecution; len(p) > 0 {
		if a.added.preferred, err = nodeaffinity.NewPreferredSchedulingTerms(p); err != nil {
			return fmt.Errorf("addedAffinity.preferredDuringSchedulingIgnoredDuringExecution: %w", err)
		}
	}
	return nil
}

// readBalanced takes what the rule does anyway.
func (a *pluginArgs) readBalanced(raw []byte) error {
	var args configv1.NodeResourcesBalancedAllocationArgs
	if err := yaml.UnmarshalStrict(raw, &args); err != nil {
		return err
	}
	seen := map[string]bool{}
	for i, r := range args.Resources {
		if name := corev1.ResourceName(r.Name); name != corev1.ResourceCPU && name != corev1.ResourceMemory || seen[r.Name] || r.Weight != 1 && r.Weight != 0 {
			return fmt.Errorf("resources[%d] (%s, weight %d): cpu and memory are balanced, each with weight 1; leave resources out", i, r.Name, r.Weight)
		}
		seen[r.Name] = true
	}
	if len(seen) == 1 {
		return errors.New("resources: cpu and memory are balanced with each other; leave resources out, or turn the plugin off")
	}
	return nil
}

func (a *pluginArgs) readSpread(raw []byte) error {
	var args configv1.PodTopologySpreadArgs
	if err := yaml.UnmarshalStrict(raw, &args); err != nil {
		return err
	}
	switch args.DefaultingType {
	case configv1.ListDefaulting:
	case configv1.SystemDefaulting, "":
		if len(args.DefaultConstraints) > 0 {
			return fmt.Errorf("defaultConstraints: they count with defaultingType %s alone", configv1.ListDefaulting)
		}
		return nil
	default:
		return fmt.Errorf("defaultingType %q: %s or %s is required", args.DefaultingType, configv1.SystemDefaulting, configv1.ListDefaulting)
	}
	a.spread, a.listed = args.DefaultConstraints, true
	for i := range a.spread {
		c := &a.spread[i]
		at := fmt.Sprintf("defaultConstraints[%d].", i)
		switch {
		case c.MaxSkew < 1:
			return fmt.Errorf("%smaxSkew %d: 1 or more is required", at, c.MaxSkew)
		case c.TopologyKey == "":
			return fmt.Errorf("%stopologyKey: required", at)
		case c.WhenUnsatisfiable != corev1.DoNotSchedule && c.WhenUnsatisfiable != corev1.ScheduleAnyway:
			return fmt.Errorf("%swhenUnsatisfiable %q: %s or %s is required", at, c.WhenUnsatisfiable, corev1.DoNotSchedule, corev1.ScheduleAnyway)
		case c.LabelSelector != nil || len(c.MatchLabelKeys) > 0:
			return fmt.Errorf("%slabelSelector, matchLabelKeys: leave them out, pods of one controller are spread", at)
		case c.MinDomains != nil && (*c.MinDomains < 1 || c.WhenUnsatisfiable != corev1.DoNotSchedule):
			return fmt.Errorf("%sminDomains %d: 1 or more, with %s", at, *c.MinDomains, corev1.DoNotSchedule)
		case slices.ContainsFunc(a.spread[:i], func(other corev1.TopologySpreadConstraint) bool {
			return other.TopologyKey == c.TopologyKey && other.WhenUnsatisfiable == c.WhenUnsatisfiable
		}):
			return fmt.Errorf("%stopologyKey %q: another constraint has it with %s", at, c.TopologyKey, c.WhenUnsatisfiable)
		}
	}
	return nil
}

func (a *pluginArgs) readVolumeBinding(raw []byte) error {
	var args configv1.VolumeBindingArgs
	if err := yaml.UnmarshalStrict(raw, &args); err != nil {
		return err
	}
	if s := args.BindTimeoutSeconds; s != nil {
		if *s < 0 || *s > 24*3600 {
			return fmt.Errorf("bindTimeoutSeconds %d: between 0 and 86400 is required", *s)
		}
		a.volumeTimeout = time.Duration(*s) * time.Second
	}
	if len(args.Shape) > 0 {
		return errors.New("shape: nodes are not scored by their storage; leave it out")
	}
	return nil
}

// readDevices takes the times that there are by default.
func (a *pluginArgs) readDevices(raw []byte) error {
	var args configv1.DynamicResourcesArgs
	if err := yaml.UnmarshalStrict(raw, &args); err != nil {
		return err
	}
	if t := args.FilterTimeout; t != nil && t.Duration != deviceFilterTimeout {
		return fmt.Errorf("filterTimeout %s: only %s, the default; leave it out (the search for devices of all nodes together has %s)", t.Duration, deviceFilterTimeout, searchTime)
	}
	if t := args.BindingTimeout; t != nil && t.Duration != conditionTimeout {
		return fmt.Errorf("bindingTimeout %s: only %s; leave it out", t.Duration, conditionTimeout)
	}
	return nil
}

// deviceFilterTimeout is kube-scheduler's default.
const deviceFilterTimeout = 10 * time.Second

// ownConstraints are the pod's spread constraints, or those of its profile if it has
// none, with what counts the pods that they are about.
func (s *snapshot) ownConstraints(p *podInfo) (list []corev1.TopologySpreadConstraint, byOwner bool) {
	if own := p.pod.Spec.TopologySpreadConstraints; len(own) > 0 {
		return own, false
	}
	list = s.profile(p).args.spread
	if len(list) == 0 || !replica(p.pod) {
		return nil, false
	}
	return list, true
}

// replica reports whether the pod is one of several that are alike: kube-scheduler
// spreads no others by default.
func replica(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.OwnerReferences, func(r metav1.OwnerReference) bool {
		return ptr.Deref(r.Controller, false) && (r.Kind == "ReplicaSet" || r.Kind == "StatefulSet" || r.Kind == "ReplicationController")
	})
}
