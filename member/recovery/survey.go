// Package recovery decides how a cluster whose quorum is permanently lost continues: which
// member's state is the newest, whether there is something to recover at all, and whether
// an order fits what the members answer now. It asks no member and touches no store.
package recovery

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/raftstore"
)

// Survivor is one member as a survey finds it.
type Survivor struct {
	Name    string `json:"name"`
	ID      string `json:"id"`
	Address string `json:"address"`
	Voter   bool   `json:"voter"`
	// Answered: the fields below are its own words. Else Problem says why not.
	Answered  bool            `json:"answered"`
	Problem   string          `json:"problem,omitempty"`
	Epoch     raftstore.Epoch `json:"epoch"`
	Term      uint64          `json:"term"`
	LastTerm  uint64          `json:"lastTerm"` // of the last entry in its log
	LastIndex uint64          `json:"lastIndex"`
	Applied   uint64          `json:"appliedIndex"`
	Leader    string          `json:"leader,omitempty"` // whom it follows
}

// Survey is what the members answer about the state they hold.
type Survey struct {
	Epoch   raftstore.Epoch `json:"epoch"`
	Members []Survivor      `json:"members"`
	// Recommended is the name of the one with the newest log.
	Recommended string `json:"recommended,omitempty"`
	// Obstacle says why there is nothing to recover; "" if there is.
	Obstacle string `json:"obstacle,omitempty"`
}

// Judge recommends the newest log, by raft's own rule (the last entry's term,
// then its index), and finds what stands against a recovery.
func (s *Survey) Judge() {
	voters, answering := 0, 0
	var newest *Survivor
	for i := range s.Members {
		m := &s.Members[i]
		if m.Voter {
			voters++
		}
		if !m.Answered || m.Epoch != s.Epoch || m.LastIndex == 0 {
			continue
		}
		if m.Voter {
			answering++
		}
		if m.Leader != "" {
			s.Obstacle = fmt.Sprintf("%s follows a leader: the cluster works, and there is nothing to recover", m.Name)
		}
		if newest == nil || newer(m, newest) > 0 {
			newest = m
		}
	}
	if newest != nil {
		s.Recommended = newest.Name
	}
	if need := voters/2 + 1; s.Obstacle == "" && answering >= need {
		s.Obstacle = fmt.Sprintf("%d of %d voters answer, and %d are enough to elect a leader: wait a moment, and look at the logs of clusterd if there is none", answering, voters, need)
	}
}

// newer compares two members by what they hold; of equals a voter is taken,
// then the first by name.
func newer(a, b *Survivor) int {
	vote := func(m *Survivor) int {
		if m.Voter {
			return 1
		}
		return 0
	}
	return cmp.Or(
		cmp.Compare(a.LastTerm, b.LastTerm),
		cmp.Compare(a.LastIndex, b.LastIndex),
		cmp.Compare(a.Applied, b.Applied),
		cmp.Compare(vote(a), vote(b)),
		cmp.Compare(b.Name, a.Name),
	)
}

// NewOrder checks that a wish fits what is so now.
func (s *Survey) NewOrder(wish v1.RecoveryRequest, now time.Time) (order Order, from Survivor, err error) {
	if s.Obstacle != "" {
		return order, from, errors.New(s.Obstacle)
	}
	order = Order{Epoch: raftstore.NewEpoch(s.Epoch.Number), Asked: now.UTC()}
	for _, m := range s.Members {
		wanted := slices.Contains(wish.Keep, m.Name)
		switch {
		case wanted && !m.Answered:
			return order, from, fmt.Errorf("%s no longer answers (%s): look again", m.Name, m.Problem)
		case !wanted && m.Answered && m.Epoch == s.Epoch:
			return order, from, fmt.Errorf("%s answers now and would be left out: look again", m.Name)
		case wanted:
			order.Keep = append(order.Keep, m.ID)
		}
		if m.Name == wish.From {
			from = m
		}
	}
	if from.Name == "" || !slices.Contains(order.Keep, from.ID) {
		return order, from, fmt.Errorf("%q is none of the members that answer: %s", wish.From, strings.Join(wish.Keep, ", "))
	}
	if from.Epoch != s.Epoch || from.LastIndex == 0 {
		return order, from, fmt.Errorf("%s holds no state of epoch %s", from.Name, s.Epoch)
	}
	return order, from, nil
}

// Order is written down before a node begins a new epoch of the store, and
// carried out by its next start, which opens the store only then.
type Order struct {
	Epoch raftstore.Epoch `json:"epoch"`
	// Keep are the ids of the members that take part, this one included, when
	// it is this node's state that goes on. Empty: this node begins with an
	// empty store and is given the state of another.
	Keep  []string  `json:"keep,omitempty"`
	Asked time.Time `json:"asked"`
}
