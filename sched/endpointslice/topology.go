package endpointslice

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/clusterd/clusterd/apis/core"
)

// overload is by how much a zone's endpoints may be asked for more than the others',
// for the sake of staying in the zone: upstream's bound.
const overload = 0.2

// shares are which part of the processors of all nodes each zone has.
type shares map[string]float64

// sharesOf counts the processors of nodes that are Ready. why says why they are of no
// use for hints.
func sharesOf(nodes []*corev1.Node) (out shares, why string) {
	out, total := shares{}, 0.0
	for _, node := range nodes {
		if !core.NodeReady(node) {
			continue
		}
		zone, cpu := node.Labels[corev1.LabelTopologyZone], node.Status.Allocatable[corev1.ResourceCPU]
		if zone == "" || cpu.IsZero() {
			return nil, fmt.Sprintf("node %q has no label %s, or tells no processors", node.Name, corev1.LabelTopologyZone)
		}
		out[zone] += cpu.AsApproximateFloat64()
		total += cpu.AsApproximateFloat64()
	}
	if len(out) < 2 {
		return nil, "the nodes are of one zone"
	}
	for zone := range out {
		out[zone] /= total
	}
	return out, ""
}

// auto reports whether the Service asks that its endpoints be shared out to zones by
// their processors. It comes before trafficDistribution.
func auto(service *corev1.Service) bool {
	mode, ok := service.Annotations[corev1.AnnotationTopologyMode]
	if !ok {
		mode = service.Annotations[corev1.DeprecatedAnnotationTopologyAwareHints]
	}
	return mode == "Auto" || mode == "auto"
}

// share gives each ready endpoint the zone that it is for: its own, as long as every
// zone has endpoints for its part of the processors; those that a zone has beyond its
// part go to zones that lack some. Nothing is remembered, so that the same pods
// always come to the same. why says why none was given one.
func (s shares) share(endpoints []discoveryv1.Endpoint) (why string) {
	at := map[string][]int{}
	ready := 0
	for i := range endpoints {
		e := &endpoints[i]
		if !*e.Conditions.Ready {
			continue
		}
		if e.Zone == nil || s[*e.Zone] == 0 {
			return fmt.Sprintf("the zone of endpoint %q is not known, or has no node that is Ready", e.TargetRef.Name)
		}
		ready++
		at[*e.Zone] = append(at[*e.Zone], i)
	}
	if ready < len(s) {
		return fmt.Sprintf("%d endpoints that are ready are too few for %d zones", ready, len(s))
	}
	least, needed := map[string]int{}, 0
	for zone, part := range s {
		// A little less than the share, or rounding would ask for one more.
		least[zone] = int(math.Ceil(part*float64(ready)/(1+overload) - 1e-9))
		needed += least[zone]
	}
	if needed > ready {
		return fmt.Sprintf("with %d endpoints that are ready those of some zone would be asked for over %d%% more than others", ready, int(100*overload))
	}
	names := slices.Sorted(maps.Keys(s))
	var lacking []string // a zone as often as it lacks an endpoint
	for _, zone := range names {
		for range least[zone] - len(at[zone]) {
			lacking = append(lacking, zone)
		}
	}
	give := func(i int, zone string) {
		endpoints[i].Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}}}
	}
	for _, zone := range names {
		slices.SortFunc(at[zone], func(a, b int) int {
			return cmp.Compare(endpoints[a].TargetRef.Name, endpoints[b].TargetRef.Name)
		})
		for _, i := range at[zone] {
			give(i, zone)
		}
	}
	for len(lacking) > 0 {
		// From the zone that has the most beyond its part, of those that can spare one:
		// some can, as all together need no more than there are.
		richest, most := "", math.Inf(-1)
		for _, zone := range names {
			if beyond := float64(len(at[zone])) - s[zone]*float64(ready); len(at[zone]) > least[zone] && beyond > most+1e-9 {
				richest, most = zone, beyond
			}
		}
		last := len(at[richest]) - 1
		give(at[richest][last], lacking[0])
		at[richest], lacking = at[richest][:last], lacking[1:]
	}
	return ""
}

// shareOut gives endpoints of Services that ask for it zones, group by group, and says
// why they have none.
func shareOut(service *corev1.Service, nodes []*corev1.Node, wanted map[group][]discoveryv1.Endpoint) (why string) {
	by, why := sharesOf(nodes)
	if why != "" {
		return why
	}
	inOrder := slices.SortedFunc(maps.Keys(wanted), func(a, b group) int {
		return cmp.Or(cmp.Compare(a.family, b.family), cmp.Compare(a.ports, b.ports))
	})
	for _, g := range inOrder { // the first reason: it is the same as long as nothing changes
		if w := by.share(wanted[g]); why == "" {
			why = w
		}
	}
	if why != "" { // all or none: traffic of one port would else go where the other's does not
		for _, endpoints := range wanted {
			for i := range endpoints {
				endpoints[i].Hints = nil
			}
		}
	}
	return why
}

// weighs reports whether a change of a node changes the zones' shares.
func weighs(old, node *corev1.Node) bool {
	if old == nil || node == nil {
		return true
	}
	a, b := old.Status.Allocatable[corev1.ResourceCPU], node.Status.Allocatable[corev1.ResourceCPU]
	return core.NodeReady(old) != core.NodeReady(node) || a.Cmp(b) != 0
}

// particulars are what differs between reasons of one kind: numbers, and names in
// quotation marks.
var particulars = regexp.MustCompile(`"[^"]*"|[0-9]+`)

// tellHints says by an event why a Service that asks for hints has none, or that it
// has, once for each kind of reason: numbers change with each endpoint.
func (c *controller) tellHints(service *corev1.Service, why string) {
	kind := particulars.ReplaceAllString(why, "")
	c.mu.Lock()
	before, known := c.hints[service.UID]
	c.hints[service.UID] = kind
	c.mu.Unlock()
	switch {
	case why != "" && (!known || before != kind):
		c.events.Eventf(service, corev1.EventTypeWarning, "TopologyAwareHintsDisabled", "Endpoints are for nodes of all zones: %s (spec.trafficDistribution: PreferSameZone asks for the own zone always)", why)
	case why == "" && known && before != "":
		c.events.Event(service, corev1.EventTypeNormal, "TopologyAwareHintsEnabled", "Endpoints are for the nodes of zones, by their processors")
	}
}
