package scheduler

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
)

// Filter is one rule that a node must satisfy for a pod.
type Filter struct {
	Name string
	// prepare looks at the pod once and returns the check of one node, or nil
	// if the rule does not concern the pod. A check returns the reasons for a
	// refusal, in words that are counted over nodes and shown to the user; none
	// means that the node passes.
	prepare func(s *snapshot, p *podInfo) func(n *nodeInfo) []string
	// reads are the parts of Nodes that the rule looks at (nodeParts): as the rule is
	// asked again when one of them has changed, a part that is missing here leaves pods
	// waiting. TestFiltersReadWhatTheyDeclare holds both together.
	reads change
	// wokenBy are the other changes of the cluster that may turn a refusal around.
	wokenBy change
}

// wakes are all changes that may turn the rule's refusal around.
func (f *Filter) wakes() change { return f.reads | f.wokenBy }

// filters is THE list of rules, cheap and telling ones first: the first rule
// that refuses a node explains it.
var filters = []Filter{
	{Name: "NodeUnschedulable", prepare: filterUnschedulable, reads: nodeSpec, wokenBy: nodeAdded},
	{Name: "TaintToleration", prepare: filterTaints, reads: nodeSpec, wokenBy: nodeAdded},
	{Name: "NodeAffinity", prepare: filterNodeAffinity, reads: nodeLabels, wokenBy: nodeAdded},
	{Name: "NodePorts", prepare: filterPorts, wokenBy: nodeAdded | podGone},
	{Name: volumeRestrictions, prepare: filterVolumeUsers, wokenBy: podGone},
	{Name: "VolumeBinding", prepare: filterVolumes, reads: nodeLabels, wokenBy: nodeAdded | volumeChanged},
	{Name: "NodeVolumeLimits", prepare: filterVolumeLimits, wokenBy: nodeAdded | volumeChanged | podGone},
	{Name: "NodeResourcesFit", prepare: filterResources, reads: nodeAllocatable, wokenBy: nodeAdded | podGone},
	{Name: interPodAffinity, prepare: filterPodAffinity, reads: nodeLabels, wokenBy: nodeAdded | podGone | podPlaced},
	{Name: topologySpread, prepare: filterSpread, reads: nodeSpec | nodeLabels, wokenBy: nodeAdded | nodeRemoved | podGone | podPlaced},
	// The search for devices is the dearest rule of all. What a pod leaves behind
	// helps no pod until its claims are deallocated, which is a deviceChanged.
	{Name: dynamicResources, prepare: filterDevices, reads: nodeLabels, wokenBy: nodeAdded | deviceChanged},
}

// change is a set of kinds of changes of the cluster.
type change uint16

const (
	nodeAdded       change = 1 << iota
	nodeRemoved            // a domain less: spread constraints may be met now
	nodeSpec               // unschedulable or taints
	nodeLabels             // labels
	nodeAllocatable        // allocatable resources
	podGone                // a bound pod ended or went: room
	podPlaced              // a pod was bound or its labels changed
	volumeChanged          // a claim, a volume or a storage class changed
	deviceChanged          // a claim, a class or a slice of devices, or a rule for their taints, changed
	groupChanged           // the pod's group, or what it needs
	anything        change = 1<<iota - 1
)

// nodeParts are the parts of a Node that rules look at, with the change that says that
// one is not what it was. A rule that looks at another one adds it here.
var nodeParts = []struct {
	change change
	same   func(a, b *corev1.Node) bool
}{
	{nodeSpec, func(a, b *corev1.Node) bool {
		return a.Spec.Unschedulable == b.Spec.Unschedulable && apiequality.Semantic.DeepEqual(a.Spec.Taints, b.Spec.Taints)
	}},
	{nodeLabels, func(a, b *corev1.Node) bool { return maps.Equal(a.Labels, b.Labels) }},
	{nodeAllocatable, func(a, b *corev1.Node) bool {
		return apiequality.Semantic.DeepEqual(a.Status.Allocatable, b.Status.Allocatable)
	}},
}

// nodeChange says what of a node changed that a rule looks at. Heartbeats come to 0.
func nodeChange(old, node *corev1.Node) (c change) {
	switch {
	case node == nil:
		return nodeRemoved
	case old == nil:
		return nodeAdded
	}
	for _, part := range nodeParts {
		if !part.same(old, node) {
			c |= part.change
		}
	}
	return c
}

// verdict is what filtering came to.
type verdict struct {
	fit []*nodeInfo
	// reasons counts nodes by reason.
	reasons map[string]int
	nodes   int
	wokenBy change
	// blocked is why no node at all can help; "": one may.
	blocked string
}

// sample is how many nodes that fit are enough to choose from. Searches go
// round, so that each begins where the last one ended: equal pods see different
// nodes and all nodes get their share, while a pod costs the same on 100 nodes
// and on 5 000. (kube-scheduler takes a share of the nodes, at least 100.)
const sample = 100

// runFilters finds nodes that p fits; it advances where the next search begins.
func runFilters(s *snapshot, p *podInfo) verdict {
	v := verdict{reasons: map[string]int{}, wokenBy: nodeAdded}
	type prepared struct {
		*Filter
		check func(*nodeInfo) []string
	}
	way := s.profile(p)
	var wokenBy change
	if p.storage, v.blocked, wokenBy = s.storage.need(s, p.pod); v.blocked == "" && way.allocates() {
		p.devices, v.blocked = s.devices.need(s, p)
		wokenBy = deviceChanged
	}
	if v.blocked != "" {
		v.wokenBy |= wokenBy
		v.nodes = s.known()
		return v
	}
	var checks []prepared
	for i := range way.filters {
		if check := way.filters[i].prepare(s, p); check != nil {
			checks = append(checks, prepared{&way.filters[i], check})
		}
	}
	s.mix()
	enough := way.wanted(p, len(s.list))
	var same run
nodes:
	for i := range s.list {
		if len(v.fit) == enough {
			s.next = (s.next + i) % len(s.list)
			break
		}
		n := s.list[(s.next+i)%len(s.list)]
		if n.out {
			continue
		}
		v.nodes++
		for _, c := range checks {
			reasons := c.check(n)
			if len(reasons) == 0 {
				continue
			}
			same.add(v.reasons, reasons)
			v.wokenBy |= c.wakes()
			continue nodes
		}
		v.fit = append(v.fit, n)
	}
	same.end(v.reasons)
	if len(v.fit) == 0 && asksExtended(p) {
		v.wokenBy |= deviceChanged | nodeAllocatable
	}
	switch d := p.devices; {
	case d == nil:
	case d.fault != nil:
		v.fit, v.nodes, v.blocked = nil, s.known(), d.fault.Error()
		v.wokenBy |= deviceChanged
	case len(v.fit) == 0:
		d.tellApart(v.reasons)
	}
	return v
}

// run counts refusals that follow each other and are one and the same list: most are,
// and to look each up among the reasons costs more than to find it.
type run struct {
	reasons []string
	length  int
}

func (r *run) add(into map[string]int, reasons []string) {
	if r.length == 0 || len(r.reasons) != len(reasons) || &r.reasons[0] != &reasons[0] {
		r.end(into)
		r.reasons = reasons
	}
	r.length++
}

func (r *run) end(into map[string]int) {
	if r.length == 0 {
		return
	}
	for _, reason := range r.reasons {
		into[reason] += r.length
	}
	r.length = 0
}

// known counts the nodes that there are.
func (s *snapshot) known() (count int) {
	for _, n := range s.list {
		if !n.out {
			count++
		}
	}
	return count
}

// explain says why no node was good enough, in the words users of Kubernetes
// know: "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) were
// unschedulable."
func (v verdict) explain() string {
	if v.nodes == 0 {
		return "no nodes available to schedule pods"
	}
	if v.blocked != "" {
		return fmt.Sprintf("0/%d nodes are available: %s.", v.nodes, v.blocked)
	}
	parts := make([]string, 0, len(v.reasons))
	for reason, n := range v.reasons {
		parts = append(parts, fmt.Sprintf("%d %s", n, reason))
	}
	slices.SortFunc(parts, cmp.Compare[string])
	return fmt.Sprintf("0/%d nodes are available: %s.", v.nodes, strings.Join(parts, ", "))
}
