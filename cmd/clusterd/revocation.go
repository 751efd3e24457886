package main

import (
	"context"
	"crypto/x509"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
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

// serialForm is a serial number in hexadecimal, as openssl prints it, too.
var serialForm = regexp.MustCompile(`^[0-9A-Fa-f][0-9A-Fa-f:]{0,80}$`)

// maxUserName bounds what becomes a key of the store.
const maxUserName = 253

func (a *clusterAPI) postRevocation(w http.ResponseWriter, r *http.Request) {
	var req v1.RevocationRequest
	if !decode(w, r, smallRequest, &req) {
		return
	}
	if why := revocable(req); why != "" {
		refuse(w, http.StatusBadRequest, why)
		return
	}
	done, err := join.Revoke(r.Context(), a.store, join.Revocation{User: req.User, Serial: req.Serial}, a.clock.Now())
	if err != nil {
		fail(w, err)
		return
	}
	reply(w, http.StatusOK, v1.Revocation(done))
}

// revocable says what is wrong with a request; "": nothing.
func revocable(req v1.RevocationRequest) string {
	switch {
	case (req.User == "") == (req.Serial == ""):
		return "give a user or a serial number, and not both"
	case req.Serial != "" && !serialForm.MatchString(req.Serial):
		return fmt.Sprintf("serial %q: give it in hexadecimal, as `openssl x509 -noout -serial` prints it", req.Serial)
	case len(req.User) > maxUserName:
		return fmt.Sprintf("user: the name has %d bytes, at most %d are possible", len(req.User), maxUserName)
	case strings.HasPrefix(req.User, pki.NodeUserPrefix):
		return fmt.Sprintf("user %q: a node's key is taken away with `clusterctl members rm %s`", req.User, strings.TrimPrefix(req.User, pki.NodeUserPrefix))
	case strings.HasPrefix(req.User, "system:"):
		return fmt.Sprintf("user %q: it has no certificate that could be revoked; service accounts' tokens go with the account, the pod or the Secret they are bound to", req.User)
	}
	return ""
}
