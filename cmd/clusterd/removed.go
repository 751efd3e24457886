package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"k8s.io/apiserver/pkg/authentication/authenticator"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/rights"
	"github.com/clusterd/clusterd/member/servers"
	"github.com/clusterd/clusterd/member/transport"
)

// refuseRemoved refuses to the API whom the rights refuse, and asks next about all others.
func refuseRemoved(r *rights.Rights, next authenticator.Request) authenticator.Request {
	return authenticator.RequestFunc(func(req *http.Request) (*authenticator.Response, bool, error) {
		if req.TLS != nil && len(req.TLS.PeerCertificates) > 0 {
			if err := r.CheckCertificate(req.Context(), req.TLS.PeerCertificates[0]); err != nil {
				return nil, false, err
			}
		}
		return next.AuthenticateRequest(req)
	})
}

// keepRights cuts the connections of members that are removed, and ends this
// node when it is the one.
func (m *Main) keepRights(ctx context.Context) error {
	err := join.Removals(ctx, m.store, func(id string, r join.Removal) error {
		if id == m.id.NodeID() {
			m.clusterAPI.answered()
			return errors.Join(m.errRemoved(r), m.dir.MarkRemoved(r))
		}
		m.rights.Note(id, r)
		m.port.CloseConns(id)
		m.members.Forget(id)
		if ids := m.rights.Remember(id, r); ids != nil {
			if err := m.dir.WriteFormerServers(ids); err != nil {
				m.log.Warn("the list of removed servers could not be written down", "err", err)
			}
		}
		return nil
	})
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// removedPath is where a server notifies an agent which servers were removed (PUT, a list of
// ids). An agent that does not know it asks by itself, every half minute.
const removedPath = "/clusterd/v1/removed-servers"

// notifyRemovals notifies this server's agents of removed servers, over their tunnels.
func (m *Main) notifyRemovals(ctx context.Context) error {
	n := rights.Notifier{
		Rights: m.rights, Agents: m.peers.agents.Agents, Arrivals: m.peers.agents.Arrivals,
		Send: func(ctx context.Context, name string, ids []string) error {
			err := m.peers.call(ctx, name, http.MethodPut, removedPath, ids, nil)
			if errors.Is(err, errNoSuchCall) || errors.Is(err, errCallRefused) {
				return fmt.Errorf("%w: %w", rights.ErrUnsupported, err)
			}
			return err
		},
	}
	return n.Run(ctx)
}

// putRemoved takes a server's list of removed ones.
func (n *agentNode) putRemoved(w http.ResponseWriter, r *http.Request) {
	var ids []string
	if !decode(w, r, maxRemovedServers, &ids) {
		return
	}
	caller, _ := transport.PeerFrom(r.Context())
	switch err := n.servers.Remove(caller, ids); {
	case errors.Is(err, servers.ErrOnlyCaller):
		refuse(w, http.StatusConflict, err.Error())
		return
	case err != nil:
		refuse(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// maxRemovedServers bounds the list's bytes: some thousands of ids.
const maxRemovedServers = 256 << 10
