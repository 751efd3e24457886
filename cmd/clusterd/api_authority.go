package main

import (
	"context"
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

// getAuthority answers how far the CA rotation is.
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
	status.Authorities = authorityInfos(trust)
	if state.Phase != authority.Stable {
		for _, p := range state.Of {
			status.Of = append(status.Of, string(p))
		}
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

// authorityInfos are the authorities by what they are for: the servers' first, which is for all
// that has none of its own.
func authorityInfos(trust *pki.Trust) []v1.AuthorityInfo {
	infos := []v1.AuthorityInfo{}
	for _, p := range pki.Purposes {
		if !trust.Owns(p) {
			continue
		}
		purposes := []string{string(p)}
		for _, other := range pki.OwnPurposes {
			if p == pki.ForPeers && !trust.Owns(other) {
				purposes = append(purposes, string(other))
			}
		}
		for i, ca := range trust.For(p).All() {
			infos = append(infos, v1.AuthorityInfo{ID: ca.ID(), Purposes: purposes, Signs: i == 0, Expires: ca.Cert.NotAfter})
		}
	}
	return infos
}

// owned are the purposes that have authorities of their own.
func owned(trust *pki.Trust, own bool) []pki.Purpose {
	return slices.DeleteFunc(slices.Clone(pki.Purposes), func(p pki.Purpose) bool { return trust.Owns(p) != own })
}

// postAuthority starts a rotation of one purpose's CA, or of all.
func (a *clusterAPI) postAuthority(w http.ResponseWriter, r *http.Request) {
	a.beginRotation(w, r, func(req v1.AuthorityRequest) ([]pki.Purpose, string) {
		p, trust := pki.Purpose(req.Purpose), a.trust.Load()
		switch {
		case p == "":
			return owned(trust, true), ""
		case !slices.Contains(pki.Purposes, p):
			return nil, fmt.Sprintf("purpose %q: give one of %s, or none for all", p, strings.Join(v1.AuthorityPurposes, ", "))
		case !trust.Owns(p):
			return nil, fmt.Sprintf("purpose %q has no authority of its own: clusterctl ca split gives each purpose one; clusterctl ca rotate without a purpose rotates the one there is", p)
		}
		return []pki.Purpose{p}, ""
	})
}

// postAuthoritySplit gives each purpose without an authority of its own one.
func (a *clusterAPI) postAuthoritySplit(w http.ResponseWriter, r *http.Request) {
	a.beginRotation(w, r, func(req v1.AuthorityRequest) ([]pki.Purpose, string) {
		of := owned(a.trust.Load(), false)
		switch {
		case req.Purpose != "":
			return nil, fmt.Sprintf("purpose %q: all that have no authority of their own get one at once", req.Purpose)
		case len(of) == 0:
			return nil, "each purpose has an authority of its own already: see clusterctl ca status"
		}
		return of, ""
	})
}

func (a *clusterAPI) beginRotation(w http.ResponseWriter, r *http.Request, choose func(v1.AuthorityRequest) ([]pki.Purpose, string)) {
	req, ok := authorityRequest(w, r)
	if !ok {
		return
	}
	grace := defaultGrace
	if req.Grace != "" {
		var err error
		if grace, err = time.ParseDuration(req.Grace); err != nil || grace < 0 || grace > maxGrace {
			refuse(w, http.StatusBadRequest, fmt.Sprintf("grace %q: give a duration such as 24h, of at most %s", req.Grace, maxGrace))
			return
		}
	}
	of, why := choose(req)
	if why != "" {
		refuse(w, http.StatusBadRequest, why)
		return
	}
	if err := a.rotation.Begin(r.Context(), of, grace, req.Finish); err != nil {
		failAuthority(w, err)
		return
	}
	a.getAuthority(w, r)
}

// authorityRequest reads the body, which may be none. ok is false if it was refused.
func authorityRequest(w http.ResponseWriter, r *http.Request) (req v1.AuthorityRequest, ok bool) {
	if r.ContentLength == 0 {
		return req, true
	}
	ok = decode(w, r, smallRequest, &req)
	return req, ok
}

// postAuthorityFinish ends the overlap period of the rotation that is meant.
func (a *clusterAPI) postAuthorityFinish(w http.ResponseWriter, r *http.Request) {
	req, ok := authorityRequest(w, r)
	if !ok {
		return
	}
	var of []pki.Purpose
	for _, p := range req.Of {
		of = append(of, pki.Purpose(p))
	}
	if err := authority.Finish(r.Context(), a.store, of); err != nil {
		failAuthority(w, err)
		return
	}
	a.getAuthority(w, r)
}

func failAuthority(w http.ResponseWriter, err error) {
	if errors.Is(err, authority.ErrUnderWay) || errors.Is(err, authority.ErrNone) || errors.Is(err, authority.ErrOther) || errors.Is(err, authority.ErrBehind) {
		refuse(w, http.StatusConflict, err.Error())
		return
	}
	fail(w, err)
}
