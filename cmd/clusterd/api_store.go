package main

import (
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/raftstore"
)

// storeView is one server's store in the answer about all of them. For a server
// that does not answer the pointers are nil.
type storeView struct {
	Name     string  `json:"name"`
	Role     string  `json:"role"`
	State    string  `json:"state"` // Leader, Follower …; unreachable
	Term     *uint64 `json:"term"`
	Applied  *uint64 `json:"applied"`
	Lag      *uint64 `json:"lag"` // entries behind the furthest one
	Revision *int64  `json:"revision"`
	// Hash of the keyspace as of Applied: equal on all who have applied the same.
	Hash         *string `json:"hash"`
	Bytes        *int64  `json:"bytes"` // of live keys and values
	HistoryBytes *int64  `json:"historyBytes"`
	LogBytes     *int64  `json:"logBytes"`
	SnapBytes    *int64  `json:"snapshotBytes"`
	Watchers     *int    `json:"watchers"`
	Format       *int    `json:"format"` // that it writes; nil: it is older than the question
	// Encryption names the content of the server's EncryptionConfiguration.
	Encryption *string `json:"encryption,omitempty"`
}

// getStore answers with the state of this node's store and of the others', which
// it asks. It works without a leader.
func (a *clusterAPI) getStore(w http.ResponseWriter, r *http.Request) {
	answer := struct {
		raftstore.Status
		// Encryption is what the leader says, or this server if there is none.
		Encryption *encryptionView `json:"encryption,omitempty"`
		// Snapshots are those of the schedule.
		Snapshots *snapshotsView `json:"snapshots,omitempty"`
		Servers   []storeView    `json:"servers"`
		Warnings  []string       `json:"warnings,omitempty"`
	}{Status: a.store.Status(), Encryption: a.sealing(), Servers: []storeView{}, Snapshots: a.snapshots(r.Context(), time.Now())}
	if records, err := a.roll(r.Context(), answer.Status); err == nil {
		answer.Warnings = join.Warnings(records, func(id string) bool { return isVoter(answer.Status, id) })
		members := a.memberViews(join.Servers(records), answer.Status)
		a.addProgress(r.Context(), members)
		for _, m := range members {
			answer.Servers = append(answer.Servers, viewOf(m))
			if m.Leader && m.sealing != nil {
				answer.Encryption = m.sealing
			}
		}
		answer.Warnings = append(answer.Warnings, differing(answer.Servers)...)
		answer.Warnings = append(answer.Warnings, sealedOtherwise(members)...)
	}
	if w := answer.Snapshots.warning(); w != "" {
		answer.Warnings = append(answer.Warnings, w)
	}
	reply(w, http.StatusOK, answer)
}

func viewOf(m memberView) storeView {
	v := storeView{Name: m.Name, Role: m.Role, State: "unreachable"}
	if s := m.store; s != nil {
		hash := strconv.FormatUint(s.Keyspace.Hash, 16)
		v.State, v.Term, v.Applied, v.Lag = s.State, &s.Term, m.Applied, m.Lag
		v.Revision, v.Hash, v.Bytes, v.HistoryBytes = &s.Keyspace.Revision, &hash, &s.Keyspace.Bytes, &s.Keyspace.HistoryBytes
		v.LogBytes, v.SnapBytes, v.Watchers = &s.LogBytes, &s.SnapBytes, &s.Watchers
		if s.Format.InUse > 0 {
			v.Format = &s.Format.InUse
		}
	}
	if e := m.sealing; e != nil && e.Config != "" {
		short := shortHash(e.Config)
		v.Encryption = &short
	}
	return v
}

// differing names servers that have applied the same and hold something else.
func differing(servers []storeView) (warnings []string) {
	first := map[uint64]storeView{}
	for _, s := range servers {
		if s.Applied == nil || s.Hash == nil {
			continue
		}
		other, ok := first[*s.Applied]
		if !ok {
			first[*s.Applied] = s
			continue
		}
		if *other.Hash != *s.Hash {
			warnings = append(warnings, fmt.Sprintf("the stores of %s and %s differ at log index %d: restart the one that the others disagree with, it will be given a fresh copy", other.Name, s.Name, *s.Applied))
		}
	}
	return warnings
}

// getStoreTop names the noisiest writers and the largest directories, as this
// node has seen them. It works without a leader.
func (a *clusterAPI) getStoreTop(w http.ResponseWriter, _ *http.Request) {
	top := a.store.Top()
	reply(w, http.StatusOK, struct {
		raftstore.Top
		Writers []writerUse `json:"writers"`
	}{top, writersOf(top, a.budget)})
}
