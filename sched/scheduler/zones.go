package scheduler

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// zones knows in which zones the pods of each controller are, and has searches see
// nodes of all zones.
type zones struct {
	// owners counts the pods of each controller that are not about to go, zone by zone.
	// Nodes that name no zone are one together.
	owners map[types.UID]map[string]int
	// mixed: snapshot.list has the zones mixed.
	mixed bool
}

func (z *zones) add(owner types.UID, zone string, by int) {
	in := z.owners[owner]
	if in == nil {
		in = map[string]int{}
		z.owners[owner] = in
	}
	if addTo(in, zone, by); len(in) == 0 {
		delete(z.owners, owner)
	}
}

// rezone takes note of the zone that the node's labels name by now.
func (s *snapshot) rezone(n *nodeInfo) {
	now := n.labels()[corev1.LabelTopologyZone]
	if now == n.zone {
		return
	}
	for owner, count := range n.owners {
		s.zones.add(owner, n.zone, -count)
		s.zones.add(owner, now, count)
	}
	n.zone, s.zones.mixed = now, false
}

// mix orders the list so that any part of it has of each zone's nodes what is its
// share: a search ends long before it has seen all, and nodes come zone by zone
// where machines are set up so.
func (s *snapshot) mix() {
	if s.zones.mixed {
		return
	}
	s.zones.mixed = true
	sizes := map[string]int{}
	for _, n := range s.list {
		sizes[n.zone]++
	}
	if len(sizes) < 2 {
		return
	}
	type slot struct {
		at float64 // 0 … 1, where in the list
		n  *nodeInfo
	}
	slots, seen := make([]slot, len(s.list)), make(map[string]int, len(sizes))
	for i, n := range s.list {
		slots[i] = slot{(float64(seen[n.zone]) + 0.5) / float64(sizes[n.zone]), n}
		seen[n.zone]++
	}
	slices.SortStableFunc(slots, func(a, b slot) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.n.zone, b.n.zone))
	})
	for i := range slots {
		s.list[i] = slots[i].n
		s.list[i].index = i
	}
}
