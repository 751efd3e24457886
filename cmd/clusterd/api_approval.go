package main

import (
	"errors"
	"fmt"
	"net/http"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
)

func (a *clusterAPI) getAsking(w http.ResponseWriter, r *http.Request) {
	machines, err := join.AskingMachines(r.Context(), a.store)
	if err != nil {
		fail(w, err)
		return
	}
	list := v1.AskingList{Machines: []v1.AskingMachine{}}
	for _, m := range machines {
		list.Machines = append(list.Machines, askingMachine(m))
	}
	reply(w, http.StatusOK, list)
}

func askingMachine(m join.Asking) v1.AskingMachine {
	return v1.AskingMachine{ID: m.ID, Name: m.Name, Addr: m.Addr.String(), Peer: m.Peer, Version: m.Version, Since: m.Since}
}

func (a *clusterAPI) postApproval(w http.ResponseWriter, r *http.Request) {
	var req v1.Approval
	if !decode(w, r, smallRequest, &req) {
		return
	}
	role := pki.Role(req.Role)
	if role != pki.Server && role != pki.Agent {
		refuse(w, http.StatusBadRequest, fmt.Sprintf("role %q: give %s or %s", req.Role, v1.TokenServer, v1.TokenAgent))
		return
	}
	m, err := join.Approve(r.Context(), a.store, req.Code, role, a.clock.Now())
	switch {
	case errors.Is(err, join.ErrNotAsking):
		refuse(w, http.StatusNotFound, fmt.Sprintf("no machine asks with the code %q. Read it once more from the machine; if it is right, the machine does not speak with this cluster but with something in between, or has asked more than 15 minutes ago. `clusterctl members pending` lists who waits", req.Code))
	case err != nil:
		fail(w, err)
	default:
		reply(w, http.StatusOK, askingMachine(m))
	}
}

func (a *clusterAPI) deleteAsking(w http.ResponseWriter, r *http.Request) {
	switch err := join.Deny(r.Context(), a.store, r.PathValue("id")); {
	case errors.Is(err, join.ErrNotAsking):
		refuse(w, http.StatusNotFound, fmt.Sprintf("no machine with the id %q waits; `clusterctl members pending` lists them", r.PathValue("id")))
	case err != nil:
		fail(w, err)
	default:
		reply(w, http.StatusOK, map[string]any{})
	}
}
