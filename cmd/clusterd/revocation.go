package main

import (
	"context"
	"crypto/x509"
	"net/http"
	"slices"
	"time"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/slack"
)

// revocationLook is how often it is looked whether certificates were revoked, for
// the sake of what they have open; each request is judged by itself.
const revocationLook = 500 * time.Millisecond

// keepRevoked closes what revoked certificates have open, and gives this machine's
// administrator another kubeconfig if the present one was among them.
func (m *Main) keepRevoked(ctx context.Context) error {
	var known []join.Revocation
	for {
		all, err := join.Revocations(ctx, m.store, true)
		if err == nil && !slices.Equal(all, known) {
			m.port.CutCertificates(func(leaf *x509.Certificate) bool { return join.Taken(all, leaf) })
			known = all
		}
		if err == nil && len(all) > 0 {
			err = m.writeKubeconfig()
		}
		if err != nil && ctx.Err() == nil {
			m.log.Warn("list revocations", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-slack.After(revocationLook):
		}
	}
}

func (a *clusterAPI) getRevocations(w http.ResponseWriter, r *http.Request) {
	all, err := join.Revocations(r.Context(), a.store, false)
	if err != nil {
		fail(w, err)
		return
	}
	list := v1.RevocationList{Revocations: []v1.Revocation{}}
	for _, one := range all {
		list.Revocations = append(list.Revocations, v1.Revocation(one))
	}
	reply(w, http.StatusOK, list)
}

func (a *clusterAPI) postRevocation(w http.ResponseWriter, r *http.Request) {
	var req v1.RevocationRequest
	if !decode(w, r, smallRequest, &req) {
		return
	}
	revocation := join.Revocation{User: req.User, Serial: req.Serial}
	if err := revocation.Validate(); err != nil {
		refuse(w, http.StatusBadRequest, err.Error())
		return
	}
	done, err := join.Revoke(r.Context(), a.store, revocation, a.clock.Now())
	if err != nil {
		fail(w, err)
		return
	}
	reply(w, http.StatusOK, v1.Revocation(done))
}
