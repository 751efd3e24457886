package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"

	"k8s.io/apiserver/pkg/authentication/authenticator"

	"github.com/clusterd/clusterd/cmd/clusterd/join"
	"github.com/clusterd/clusterd/cmd/clusterd/pki"
	"github.com/clusterd/clusterd/raftstore"
)

// rights knows whose key was taken away. It is made before the store is open,
// and until then nobody's was.
type rights struct {
	store atomic.Pointer[raftstore.Store]
}

// revoked reports whether the key with that id was removed, as far as this
// member knows. It never waits.
func (r *rights) revoked(id string) bool {
	s := r.store.Load()
	if s == nil {
		return false
	}
	gone, err := join.IsRemoved(context.Background(), s, id)
	return err == nil && gone // a store that is closing knows nothing
}

// admitted is the opposite of revoked.
func (r *rights) admitted(id string) bool { return !r.revoked(id) }

// check refuses the certificates of removed nodes to the API, and asks next
// about all others.
func (r *rights) check(next authenticator.Request) authenticator.Request {
	return authenticator.RequestFunc(func(req *http.Request) (*authenticator.Response, bool, error) {
		if req.TLS != nil && len(req.TLS.PeerCertificates) > 0 {
			leaf := req.TLS.PeerCertificates[0]
			if name, isNode := pki.NodeName(leaf); isNode && r.revoked(pki.Fingerprint(leaf.PublicKey)) {
				return nil, false, fmt.Errorf("node %s was removed from the cluster", name)
			}
		}
		return next.AuthenticateRequest(req)
	})
}

// keepRights cuts the connections of members that are removed, and ends this
// node when it is the one.
func (m *Main) keepRights(ctx context.Context) error {
	err := join.Removals(ctx, m.store, func(id string, r join.Removal) error {
		if id == m.id.nodeID() {
			return errors.Join(m.errRemoved(r), m.dir.markRemoved(r))
		}
		m.port.Cut(id)
		m.members.Forget(id)
		return nil
	})
	if ctx.Err() != nil {
		return nil
	}
	return err
}
