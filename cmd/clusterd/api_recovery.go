package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/gossip"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/recovery"
	"github.com/clusterd/clusterd/raftstore"
)

// recoveryPath is where people survey and begin a recovery, and where nodes
// order each other to.
const recoveryPath = v1.Recovery

const surveyTimeout = 3 * time.Second

// makeSurvey asks all members at once. It needs no leader.
func (a *clusterAPI) makeSurvey(ctx context.Context) (recovery.Survey, error) {
	own := a.store.Status()
	records, err := a.roll(ctx, own)
	if err != nil {
		return recovery.Survey{}, err
	}
	records = join.Servers(records) // agents hold nothing
	ctx, cancel := context.WithTimeout(ctx, surveyTimeout)
	defer cancel()
	s := recovery.Survey{Epoch: own.Epoch, Members: make([]recovery.Survivor, len(records))}
	var asking sync.WaitGroup
	for i, rec := range records {
		m := &s.Members[i]
		*m = recovery.Survivor{Name: rec.Name, ID: rec.ID, Address: rec.Addr.String(), Voter: slices.Contains(own.Members, raftstore.Member{ID: rec.ID, Voter: true})}
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
	s.Judge()
	return s, nil
}

func (a *clusterAPI) getRecovery(w http.ResponseWriter, r *http.Request) {
	s, err := a.makeSurvey(r.Context())
	if err != nil {
		fail(w, err)
		return
	}
	reply(w, http.StatusOK, s)
}

// postRecovery looks again, and orders the chosen member to begin a new epoch.
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
	order, from, err := s.NewOrder(wish, time.Now())
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

// recoverHere writes the order down and ends this process, whose next start
// carries it out.
func (a *clusterAPI) recoverHere(order recovery.Order) error {
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
	var order recovery.Order
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
