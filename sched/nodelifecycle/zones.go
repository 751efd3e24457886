package nodelifecycle

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// How fast the pods of lost nodes are evicted where much of a zone is lost, as
// upstream has it: one node of a zone that is lost altogether in ten seconds, one of
// a large zone (more nodes than largeZone) that is lost for more than a half in a
// hundred. Upstream evicts one node in ten seconds elsewhere, too; here all at once.
const (
	lostZonePace  = 10 * time.Second
	largeZonePace = 100 * time.Second
	largeZone     = 50
)

// Zone is how many of a zone's nodes are lost. Nodes that name no zone are one
// together.
type Zone struct {
	Name      string // region and zone, as their labels name them
	Lost, All int
}

// zoneOf names the node's zone.
func zoneOf(node *corev1.Node) string {
	region, zone := node.Labels[corev1.LabelTopologyRegion], node.Labels[corev1.LabelTopologyZone]
	if region == "" || zone == "" {
		return region + zone
	}
	return region + "/" + zone
}

// zones counts nodes by zone.
func zones(nodes []*corev1.Node, lost func(*corev1.Node) bool) map[string]Zone {
	out := map[string]Zone{}
	for _, node := range nodes {
		z := out[zoneOf(node)]
		z.Name = zoneOf(node)
		z.All++
		if lost(node) {
			z.Lost++
		}
		out[z.Name] = z
	}
	return out
}

// pace is how fast the pods of a zone's lost nodes are evicted.
type pace struct {
	held  bool          // not at all
	every time.Duration // from one node to the next; 0: all at once
}

// paces decides how fast pods are evicted, zone by zone. Where more than half of a
// zone's nodes look dead the fault is likely to be on this side, and evicting
// everything everywhere would not help: it waits, or goes slowly. One or two nodes of a
// zone are an ordinary fault, however small it is, as long as most of the cluster is
// there. A zone of which nothing is left has failed, as long as another has not.
func paces(all map[string]Zone) map[string]pace {
	out := make(map[string]pace, len(all))
	w := wholeOf(all)
	for name, z := range all {
		if p := z.pace(w); p != (pace{}) {
			out[name] = p
		}
	}
	return out
}

// whole is what the pace of each zone needs to know of all zones together.
type whole struct {
	none bool // there is no zone that is not lost altogether
	most bool // more than half of all nodes are lost
}

func wholeOf(all map[string]Zone) whole {
	none, lost, nodes := true, 0, 0
	for _, z := range all {
		none = none && z.Lost == z.All
		lost, nodes = lost+z.Lost, nodes+z.All
	}
	return whole{none: none, most: 2*lost > nodes}
}

// fewLost is how many lost nodes of a zone are an ordinary fault, as upstream has it.
const fewLost = 2

// pace decides it for one zone.
func (z Zone) pace(w whole) pace {
	switch {
	case w.none:
		return pace{held: true}
	case z.Lost == z.All:
		return pace{every: lostZonePace}
	case 2*z.Lost <= z.All, z.Lost <= fewLost && !w.most:
		return pace{}
	case z.All > largeZone:
		return pace{every: largeZonePace}
	}
	return pace{held: true}
}

// String says how much is lost of which zone.
func (z Zone) String() string {
	if z.Name == "" {
		return fmt.Sprintf("%d of %d nodes are lost", z.Lost, z.All)
	}
	return fmt.Sprintf("%d of %d nodes of zone %s are lost", z.Lost, z.All, z.Name)
}

// Suspended returns the zones of whose lost nodes no pod is evicted, by what the
// nodes' conditions say.
func Suspended(nodes []*corev1.Node) (out []Zone) {
	all := zones(nodes, func(node *corev1.Node) bool { return readiness(node) == corev1.ConditionUnknown })
	by := paces(all)
	for name, z := range all {
		if by[name].held {
			out = append(out, z)
		}
	}
	slices.SortFunc(out, func(a, b Zone) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// turns are when the lost nodes of a paced zone may be evicted, one after the other.
type turns struct {
	every time.Duration
	last  time.Time            // the last turn that was taken
	of    map[string]time.Time // promised, by node
}

// free is the first turn that is promised to no node.
func (t *turns) free(now time.Time) time.Time {
	at := t.last.Add(t.every)
	if at.Before(now) {
		at = now
	}
	for _, promised := range slices.SortedFunc(maps.Values(t.of), time.Time.Compare) {
		if promised.Sub(at) >= t.every {
			break
		}
		if after := promised.Add(t.every); after.After(at) {
			at = after
		}
	}
	return at
}

// grant reports whether the pods of a node that is lost may be evicted now, and if
// not, after what time to ask again: each node has a turn of its own, so that those
// which wait do not all ask for the next one. A node that was granted it stays so until
// it is heard of; the turn of a node that is heard of before is another's.
func (c *controller) grant(node *corev1.Node, now time.Time) (bool, time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	zone := zoneOf(node)
	every, t := c.census.pace(zone).every, c.turns[zone]
	if every == 0 || c.granted[node.Name] {
		if t != nil {
			delete(t.of, node.Name)
		}
		return true, 0
	}
	if t == nil {
		t = &turns{}
		c.turns[zone] = t
	}
	if t.every != every { // all are woken when the pace changes, and ask again
		t.every, t.of = every, map[string]time.Time{}
	}
	at, promised := t.of[node.Name]
	if !promised {
		at = t.free(now)
		t.of[node.Name] = at
	}
	if left := max(at.Sub(now), t.last.Add(every).Sub(now)); left > 0 {
		return false, left
	}
	delete(t.of, node.Name)
	t.last = now
	c.granted[node.Name] = true
	return true, 0
}

// found takes note that a node is not lost, or gone; mu is held.
func (c *controller) found(node *corev1.Node) {
	delete(c.granted, node.Name)
	if t := c.turns[zoneOf(node)]; t != nil {
		delete(t.of, node.Name)
	}
}

// held reports whether evictions from the node's zone wait.
func (c *controller) held(node *corev1.Node) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.census.pace(zoneOf(node)).held
}
