package nodelifecycle

import (
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/sched/loop"
)

// member is as what a node is counted.
type member struct {
	zone         string
	counts, lost bool
}

// census counts nodes by zone. It is kept change by change: counting all nodes for
// each event of one would be the square of them, at the least at each change of leader.
type census struct {
	zones     map[string]Zone
	gone      int // zones of which all nodes are lost
	lost, all int // nodes
}

func newCensus() census { return census{zones: map[string]Zone{}} }

func (t *census) add(m member, by int) {
	if !m.counts {
		return
	}
	z, known := t.zones[m.zone]
	if known && z.Lost == z.All {
		t.gone--
	}
	z.Name = m.zone
	z.All += by
	t.all += by
	if m.lost {
		z.Lost += by
		t.lost += by
	}
	if z.All == 0 {
		delete(t.zones, m.zone)
		return
	}
	t.zones[m.zone] = z
	if z.Lost == z.All {
		t.gone++
	}
}

func (t *census) whole() whole {
	return whole{none: t.gone == len(t.zones), most: 2*t.lost > t.all}
}

// pace is how fast the pods of the zone's lost nodes are evicted.
func (t *census) pace(zone string) pace {
	z, ok := t.zones[zone]
	if !ok {
		return pace{}
	}
	return z.pace(t.whole())
}

// zonesKey is the key under which announce runs; no node has a namespace.
var zonesKey = loop.Key{Namespace: "zones"}

// maxSaid is of how many nodes of a zone it is said that their pods are not evicted: more
// would be as many writes in the moment when most nodes are lost.
const maxSaid = 10

// announceEvery is how often nodes that are newly lost are looked through for what is to
// be said of them.
const announceEvery = time.Second

// count brings the census in line with what is known of a node; mu is held.
func (c *controller) count(s *seen) {
	now := member{zone: s.zone, counts: s.node}
	now.lost = s.node && (s.dead || s.unknown || s.at == nil)
	was := s.counted
	if now == was {
		return
	}
	type paced struct {
		whole    whole
		was, now pace
	}
	paces := func() paced { return paced{c.census.whole(), c.census.pace(was.zone), c.census.pace(now.zone)} }
	before := paces()
	c.census.add(was, -1)
	c.census.add(now, 1)
	s.counted = now
	if paces() != before {
		c.Enqueue(zonesKey)
	} else if now.lost != was.lost {
		c.EnqueueAfter(zonesKey, announceEvery)
	}
}

// entry returns what is known of a node; mu is held.
func (c *controller) entry(node string) *seen {
	s := c.seen[node]
	if s == nil {
		s = &seen{heartbeat: c.clock.Now()}
		s.at = c.heardOf.PushBack(s)
		c.seen[node] = s
	}
	return s
}

// drop forgets a node; mu is held.
func (c *controller) drop(node string) {
	s := c.seen[node]
	if s == nil {
		return
	}
	s.node = false
	c.count(s)
	if s.at != nil {
		c.heardOf.Remove(s.at)
	}
	delete(c.seen, node)
}

func (c *controller) heard(node string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.entry(node)
	s.heartbeat = c.clock.Now()
	if s.at == nil {
		s.at = c.heardOf.PushBack(s)
	} else {
		c.heardOf.MoveToBack(s.at)
	}
	if s.dead {
		s.dead = false
		c.Enqueue(loop.Key{Name: node})
	}
	c.count(s)
}

// expire counts the nodes that have been silent for Grace by now as lost, all before
// anything is decided about one: after a time in which this process stood still they
// are many. mu is held.
func (c *controller) expire(now time.Time) {
	for at := c.heardOf.Front(); at != nil; at = c.heardOf.Front() {
		s := at.Value.(*seen)
		if s.heartbeat.Add(Grace).After(now) {
			return
		}
		c.heardOf.Remove(at)
		s.at = nil
		c.count(s)
	}
}

// announce says where evictions stop, go on, or go at another pace, and wakes all
// nodes then.
func (c *controller) announce() {
	var stopped, resumed []string
	c.mu.Lock()
	by, all := paces(c.census.zones), maps.Clone(c.census.zones)
	changed := !maps.Equal(by, c.paces)
	c.paces = by
	zone, said := map[string]string{}, map[string]int{}
	for name := range c.waits {
		switch s := c.entry(name); {
		case !s.counted.lost:
			delete(c.waits, name)
		case !by[s.zone].held:
			delete(c.waits, name)
			resumed, zone[name] = append(resumed, name), s.zone
		default:
			said[s.zone]++
		}
	}
	for name, s := range c.seen {
		if s.counted.lost && by[s.zone].held && said[s.zone] < maxSaid && !c.waits[name] {
			said[s.zone]++
			c.waits[name] = true
			stopped, zone[name] = append(stopped, name), s.zone
		}
	}
	c.mu.Unlock()
	for _, name := range stopped {
		if node, err := c.nodes.Get(name); err == nil {
			c.events.Eventf(node, corev1.EventTypeWarning, "EvictionsSuspended",
				"Pods of this node are not evicted: %s, more than half, so that the fault may be on this side. It goes on when fewer are: delete Nodes that will not come back", all[zone[name]])
		}
	}
	for _, name := range resumed {
		if node, err := c.nodes.Get(name); err == nil {
			c.events.Eventf(node, corev1.EventTypeNormal, "EvictionsResumed", "Pods of this node are evicted: %s", all[zone[name]])
		}
	}
	if !changed {
		return
	}
	suspended := 0
	for name, p := range by {
		if p.held {
			suspended++
		}
		klog.Background().Info("evictions from lost nodes", "zone", name, "suspended", p.held, "every", p.every, "lost", all[name].Lost, "nodes", all[name].All)
	}
	evictionsSuspended.Set(float64(suspended))
	c.enqueueAll()
}
