// Package silence finds the nodes that have given no sign of life for too long. Tracker, which
// holds values and no clock, decides; Suspects feeds it on the leader, and asks other
// servers before a node is given up.
package silence

import "time"

const (
	// After is how long a node may give no sign of life before it is suspected, unless
	// its Tracker has another time.
	After = 2 * time.Second
	// Again is how long after a suspicion the next one follows while a node is
	// silent: it may be well, and unreachable from here alone, and then die.
	Again = 5 * time.Second
	// forgetAfter bounds how long a node is remembered that is silent.
	forgetAfter = 10 * time.Minute
)

// Tracker knows nodes by an id. The zero value knows none. It is not safe for
// concurrent use. All times are those of one process, with a monotonic reading.
type Tracker struct {
	// After takes the place of the constant, unless it is 0. It does not change while
	// nodes are known.
	After time.Duration
	nodes map[string]*node
	last  time.Time // of Tick
}

type node struct {
	name    string
	heard   time.Time // its last sign of life
	suspect time.Time // when it is suspected next, if it stays silent
}

func (t *Tracker) after() time.Duration {
	if t.After > 0 {
		return t.After
	}
	return After
}

// Heard notes that the node gave a sign of life at that time. Earlier ones than
// the last change nothing.
func (t *Tracker) Heard(id, name string, at time.Time) {
	n := t.nodes[id]
	if n == nil {
		if t.nodes == nil {
			t.nodes = map[string]*node{}
		}
		t.nodes[id] = &node{name: name, heard: at, suspect: at.Add(t.after())}
		return
	}
	n.name = name
	if at.After(n.heard) {
		n.heard, n.suspect = at, at.Add(t.after())
	}
}

// Knows reports whether the node was heard and is remembered.
func (t *Tracker) Knows(id string) bool { return t.nodes[id] != nil }

// Suspects returns the names of the nodes that are to be suspected now: once they
// have been silent for that long, and then every Again.
func (t *Tracker) Suspects(now time.Time) (names []string) {
	for id, n := range t.nodes {
		switch {
		case now.Sub(n.heard) > forgetAfter:
			delete(t.nodes, id)
		case now.After(n.suspect):
			n.suspect = now.Add(Again)
			names = append(names, n.name)
		}
	}
	return names
}

// Tick is called at each look at the signs of life, several times within it. When
// the one before is long ago this process stood still and could hear nothing: all
// suspicions are put off by that time.
func (t *Tracker) Tick(now time.Time) {
	pause := now.Sub(t.last)
	first := t.last.IsZero()
	t.last = now
	if first || pause <= t.after()/2 {
		return
	}
	for _, n := range t.nodes {
		n.suspect = n.suspect.Add(pause)
	}
}
