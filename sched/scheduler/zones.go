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
	// ids number the zones that nodes have named; those that name none are one zone, 0.
	ids map[string]int
	// owners counts the pods of each controller that are not about to go, by the zone's
	// number: each decision asks for those of a hundred nodes.
	owners map[types.UID][]int
	// mixed: snapshot.list has the zones mixed.
	mixed bool
}

func newZones() zones {
	return zones{ids: map[string]int{"": 0}, owners: map[types.UID][]int{}}
}

func (z *zones) id(zone string) int {
	id, known := z.ids[zone]
	if !known {
		id = len(z.ids)
		z.ids[zone] = id
	}
	return id
}

func (z *zones) add(owner types.UID, id, by int) {
	in := z.owners[owner]
	for len(in) <= id {
		in = append(in, 0)
	}
	in[id] += by
	z.owners[owner] = in
	if in[id] == 0 && !slices.ContainsFunc(in, func(n int) bool { return n != 0 }) {
		delete(z.owners, owner)
	}
}

// rezone takes note of the zone that the node's labels name by now.
func (s *snapshot) rezone(n *nodeInfo) {
	now := n.labels()[corev1.LabelTopologyZone]
	if now == n.zone {
		return
	}
	id := s.zones.id(now)
	for owner, count := range n.owners {
		s.zones.add(owner, id, count)
		s.zones.add(owner, n.zoneID, -count)
	}
	n.zone, n.zoneID, s.zones.mixed = now, id, false
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
