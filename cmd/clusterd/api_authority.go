package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/member/authority"
	"github.com/clusterd/clusterd/member/pki"
)

const (
	// defaultGrace is how long people have to get themselves new kubeconfigs.
	defaultGrace = 24 * time.Hour
	maxGrace     = 90 * 24 * time.Hour
)

// getAuthority says how far the exchange of the authority is.
func (a *clusterAPI) getAuthority(w http.ResponseWriter, r *http.Request) {
	status, err := a.authorityStatus(r.Context())
	if err != nil {
		fail(w, err)
		return
	}
	reply(w, http.StatusOK, status)
}

func (a *clusterAPI) authorityStatus(ctx context.Context) (v1.AuthorityStatus, error) {
	state, err := authority.Get(ctx, a.store, false)
	if err != nil {
		return v1.AuthorityStatus{}, err
	}
	members, err := authority.Members(ctx, a.store, false)
	if err != nil {
		return v1.AuthorityStatus{}, err
	}
	trust := a.trust.Load()
	if state.Number > 0 {
		if trust, err = state.Trust(); err != nil {
			return v1.AuthorityStatus{}, err
		}
	}
	status := v1.AuthorityStatus{Phase: string(state.Phase), Number: state.Number, Since: state.Since, Members: []v1.AuthorityMember{}}
	if state.Phase == authority.Reissue && !state.Finish {
		status.Ends = state.Since.Add(state.Grace)
	}
	for i, ca := range trust.All() {
		status.Authorities = append(status.Authorities, v1.AuthorityInfo{ID: ca.ID(), Signs: i == 0, Expires: ca.Cert.NotAfter})
	}
	waiting := state.Waiting(members, time.Now())
	for _, m := range members {
		role := string(pki.Agent)
		if m.Server {
			role = string(pki.Server)
		}
		status.Members = append(status.Members, v1.AuthorityMember{
			Name: m.Name, Role: role, Ready: m.Has >= state.Number,
			Waited: slices.ContainsFunc(waiting, func(w authority.Member) bool { return w.ID == m.ID }),
		})
	}
	slices.SortFunc(status.Members, func(x, y v1.AuthorityMember) int { return strings.Compare(x.Name, y.Name) })
	return status, nil
}

// postAuthority begins an exchange.
func (a *clusterAPI) postAuthority(w http.ResponseWriter, r *http.Request) {
	var req v1.AuthorityRequest
	if r.ContentLength != 0 {
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4096)).Decode(&req); err != nil {
			refuse(w, http.StatusBadRequest, "the request cannot be read: "+err.Error())
			return
		}
	}
	grace := defaultGrace
	if req.Grace != "" {
		var err error
		if grace, err = time.ParseDuration(req.Grace); err != nil || grace < 0 || grace > maxGrace {
			refuse(w, http.StatusBadRequest, fmt.Sprintf("grace %q: give a duration such as 24h, of at most %s", req.Grace, maxGrace))
			return
		}
	}
	if err := a.exchange.begin(r.Context(), grace); err != nil {
		failAuthority(w, err)
		return
	}
	if req.Finish {
		if err := authority.Finish(r.Context(), a.store); err != nil {
			failAuthority(w, err)
			return
		}
	}
	a.getAuthority(w, r)
}

// postAuthorityFinish ends the grace.
func (a *clusterAPI) postAuthorityFinish(w http.ResponseWriter, r *http.Request) {
	if err := authority.Finish(r.Context(), a.store); err != nil {
		failAuthority(w, err)
		return
	}
	a.getAuthority(w, r)
}

func failAuthority(w http.ResponseWriter, err error) {
	if errors.Is(err, authority.ErrUnderWay) || errors.Is(err, authority.ErrNone) {
		refuse(w, http.StatusConflict, err.Error())
		return
	}
	fail(w, err)
}
