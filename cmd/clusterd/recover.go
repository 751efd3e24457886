package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/gossip"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/raftstore"
)

// recoveryPath is where people survey and begin a recovery, and where nodes
// tell each other to.
const recoveryPath = v1.Recovery

// survivor is one member as a survey finds it.
type survivor struct {
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

// survey is what the members say of the state they hold.
type survey struct {
	Epoch   raftstore.Epoch `json:"epoch"`
	Members []survivor      `json:"members"`
	// Recommended is the name of the one with the newest log.
	Recommended string `json:"recommended,omitempty"`
	// Obstacle says why there is nothing to recover; "" if there is.
	Obstacle string `json:"obstacle,omitempty"`
}

const surveyTimeout = 3 * time.Second

// makeSurvey asks all members at once. It needs no leader.
func (a *clusterAPI) makeSurvey(ctx context.Context) (survey, error) {
	own := a.store.Status()
	records, err := a.roll(ctx, own)
	if err != nil {
		return survey{}, err
	}
	records = join.Servers(records) // agents hold nothing
	ctx, cancel := context.WithTimeout(ctx, surveyTimeout)
	defer cancel()
	s := survey{Epoch: own.Epoch, Members: make([]survivor, len(records))}
	var asking sync.WaitGroup
	for i, rec := range records {
		m := &s.Members[i]
		*m = survivor{Name: rec.Name, ID: rec.ID, Address: rec.Addr.String(), Voter: slices.Contains(own.Members, raftstore.Member{ID: rec.ID, Voter: true})}
		seen, known := a.members.Get(rec.ID)
		if known {
			m.Address = seen.Addr.String()
		}
		asking.Go(func() {
			status := own
			if rec.ID != own.ID {
				if !known {
					m.Problem = "not seen since this node started"
					return
				}
				if err := a.peers.call(ctx, rec.Name, http.MethodGet, storePath, nil, &status); err != nil {
					m.Problem = "does not answer"
					if seen.State != gossip.Alive {
						m.Problem = string(seen.State)
					}
					return
				}
			}
			m.Answered, m.Epoch, m.Leader = true, status.Epoch, status.Leader
			m.Term, m.LastTerm, m.LastIndex, m.Applied = status.Term, status.LastTerm, status.LastIndex, status.Keyspace.Index
		})
	}
	asking.Wait()
	s.judge()
	return s, nil
}

// judge recommends the newest log, by raft's own rule (the last entry's term,
// then its index), and finds what stands against a recovery.
func (s *survey) judge() {
	voters, answering := 0, 0
	var newest *survivor
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
func newer(a, b *survivor) int {
	vote := func(m *survivor) int {
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

func (a *clusterAPI) getRecovery(w http.ResponseWriter, r *http.Request) {
	s, err := a.makeSurvey(r.Context())
	if err != nil {
		fail(w, err)
		return
	}
	reply(w, http.StatusOK, s)
}

// postRecovery looks again, and tells the chosen member to begin a new epoch.
// The others that are kept learn of it when they ask why they have no leader.
func (a *clusterAPI) postRecovery(w http.ResponseWriter, r *http.Request) {
	var wish v1.RecoveryRequest
	if !decode(w, r, 1<<20, &wish) {
		return
	}
	s, err := a.makeSurvey(r.Context())
	if err != nil {
		fail(w, err)
		return
	}
	order, from, err := s.order(wish, time.Now())
	if err != nil {
		refuse(w, http.StatusConflict, err.Error())
		return
	}
	if from.ID == a.store.Status().ID {
		err = a.recoverHere(order)
	} else {
		err = a.peers.call(r.Context(), from.Name, http.MethodPost, recoveryPath, order, nil)
	}
	if err != nil {
		refuse(w, http.StatusConflict, fmt.Sprintf("%s did not begin the new epoch: %v", from.Name, err))
		return
	}
	reply(w, http.StatusAccepted, order)
}

// order checks that a wish fits what is so now.
func (s *survey) order(wish v1.RecoveryRequest, now time.Time) (order recoveryOrder, from survivor, err error) {
	if s.Obstacle != "" {
		return order, from, errors.New(s.Obstacle)
	}
	order = recoveryOrder{Epoch: raftstore.NewEpoch(s.Epoch.Number), Asked: now.UTC()}
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

// recoverHere writes the order down and ends this process, whose next start
// carries it out.
func (a *clusterAPI) recoverHere(order recoveryOrder) error {
	st := a.store.Status()
	switch {
	case len(order.Keep) == 0 || !slices.Contains(order.Keep, st.ID):
		return errors.New("the order is not for this node")
	case order.Epoch.Number != st.Epoch.Number+1:
		return fmt.Errorf("the order begins epoch %s, and this node is in %s", order.Epoch, st.Epoch)
	case st.Leader != "":
		return errors.New("this node follows a leader: the cluster works")
	}
	return a.restart(order)
}

// postRecoveryOrder takes an order from another node.
func (a *clusterAPI) postRecoveryOrder(w http.ResponseWriter, r *http.Request) {
	var order recoveryOrder
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20)).Decode(&order); err != nil {
		refuse(w, http.StatusBadRequest, "the order cannot be read: "+err.Error())
		return
	}
	if err := a.recoverHere(order); err != nil {
		refuse(w, http.StatusConflict, err.Error())
		return
	}
	reply(w, http.StatusAccepted, order)
}

// jsonBody is v as a request's body; none for nil.
func jsonBody(v any) (*bytes.Reader, error) {
	if v == nil {
		return bytes.NewReader(nil), nil
	}
	b, err := json.Marshal(v)
	return bytes.NewReader(b), err
}
