package main

import (
	"net/http"
	"slices"
	"strings"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/member/gossipkey"
)

// getGossipKey says how old the gossip key is and who lags behind.
func (a *clusterAPI) getGossipKey(w http.ResponseWriter, r *http.Request) {
	state, err := gossipkey.Get(r.Context(), a.store, false)
	if err != nil {
		fail(w, err)
		return
	}
	wished, err := gossipkey.LastRequest(r.Context(), a.store)
	if err != nil {
		fail(w, err)
		return
	}
	servers, err := gossipkey.Servers(r.Context(), a.store, false)
	if err != nil {
		fail(w, err)
		return
	}
	status := gossipKeyStatus(state, servers)
	status.Wanted = wished > state.Answers
	reply(w, http.StatusOK, status)
}

func gossipKeyStatus(state gossipkey.State, servers []gossipkey.Server) v1.GossipKeyStatus {
	status := v1.GossipKeyStatus{Phase: string(state.Phase), Number: state.Number, Generation: state.Generation, Used: state.Used, Since: state.Since, Servers: []v1.GossipKeyServer{}}
	lagging := state.Lagging(servers)
	for _, s := range servers {
		status.Servers = append(status.Servers, v1.GossipKeyServer{
			Name: s.Name, Ready: !slices.ContainsFunc(lagging, func(l gossipkey.Server) bool { return l.ID == s.ID }),
		})
	}
	slices.SortFunc(status.Servers, func(x, y v1.GossipKeyServer) int { return strings.Compare(x.Name, y.Name) })
	return status
}

// postGossipKey asks the leader for another key.
func (a *clusterAPI) postGossipKey(w http.ResponseWriter, r *http.Request) {
	if err := gossipkey.RequestRotation(r.Context(), a.store, "an administrator asked for it"); err != nil {
		fail(w, err)
		return
	}
	a.getGossipKey(w, r)
}
