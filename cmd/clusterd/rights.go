package main

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apiserver/pkg/authentication/authenticator"

	"github.com/clusterd/clusterd/gossip"
	"github.com/clusterd/clusterd/member/clock"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore"
	changes "github.com/clusterd/clusterd/raftstore/wait"
)

// rights knows which members' keys were revoked. It is made before the store is
// open, and until then the removed servers count that the data directory names.
type rights struct {
	self  string // this member's id
	clock *clock.Clock
	store atomic.Pointer[raftstore.Store]

	mu      sync.Mutex              // guards below
	removed map[string]join.Removal // of servers, as keepRights read them
	former  map[string]bool         // ids of removed servers, as the data directory has them

	changed changes.Change // of removed
}

// remember adds a removed server to those of the data directory. It returns their ids,
// or nil if it was among them or was no server.
func (r *rights) remember(id string, why join.Removal) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if why.Role == pki.Agent || r.former[id] {
		return nil
	}
	if r.former == nil {
		r.former = map[string]bool{}
	}
	r.former[id] = true
	return slices.Sorted(maps.Keys(r.former))
}

// note keeps a removed server for the list that agents get.
func (r *rights) note(id string, why join.Removal) {
	if !why.TellAgents(r.clock.Now()) {
		return
	}
	defer r.changed.Broadcast()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.removed == nil {
		r.removed = map[string]join.Removal{}
	}
	r.removed[id] = why
}

// removedServers are the ids of removed servers that agents must refuse now.
func (r *rights) removedServers() []string {
	now := r.clock.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	var ids []string
	for id, why := range r.removed { // none is deleted: the clock may be put back
		if why.TellAgents(now) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// revoked reports whether the key with that id was removed, as far as this
// member knows. It never waits.
func (r *rights) revoked(id string) bool {
	s := r.store.Load()
	if s == nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.former[id]
	}
	gone, err := join.IsRemoved(context.Background(), s, id)
	return err == nil && gone // a store that is closing knows nothing
}

// admitted says whether gossip may list a member: a server of the records, by
// the name it has there. While this member follows no leader its records may
// lack those who joined last, and only who was removed is refused.
func (r *rights) admitted(m gossip.Meta) bool {
	s := r.store.Load()
	if s == nil || s.Leader() == "" {
		return !r.revoked(m.ID)
	}
	rec, err := join.Member(context.Background(), s, m.ID)
	if err != nil {
		// A store that lacks this member's own record has only begun to fill.
		_, err = join.Member(context.Background(), s, r.self)
		return err != nil && !r.revoked(m.ID)
	}
	return rec.IsServer() && rec.Name == m.Name
}

// known says whether the key with that id is a server's.
func (r *rights) known(id string) bool {
	s := r.store.Load()
	if s == nil {
		return false
	}
	rec, err := join.Member(context.Background(), s, id)
	return err == nil && rec.IsServer()
}

// servers are the ids of all servers and where they joined.
func (r *rights) servers() map[string]netip.AddrPort {
	s := r.store.Load()
	if s == nil {
		return nil
	}
	records, err := join.Records(context.Background(), s, true)
	if err != nil {
		return nil
	}
	addrs := map[string]netip.AddrPort{}
	for _, rec := range join.Servers(records) {
		addrs[rec.ID] = rec.Addr
	}
	return addrs
}

// named is the record of a node name, as far as this member knows.
func (r *rights) named(name string) (join.Record, error) {
	s := r.store.Load()
	if s == nil {
		return join.Record{}, raftstore.ErrClosed
	}
	return join.MemberNamed(context.Background(), s, name)
}

// revokedCertificate reports whether a client certificate was taken away, as far as
// this member knows. It never waits.
func (r *rights) revokedCertificate(leaf *x509.Certificate) bool {
	s := r.store.Load()
	if s == nil {
		return false
	}
	gone, err := join.IsRevoked(context.Background(), s, leaf)
	return err == nil && gone
}

// signAt is the time at which to sign a certificate of the user now, see
// join.SignAt. It never waits.
func (r *rights) signAt(user string) time.Time {
	now := r.clock.Now()
	s := r.store.Load()
	if s == nil {
		return now
	}
	at, err := join.SignAt(context.Background(), s, user, now)
	if err != nil {
		return now
	}
	return at
}

// check refuses revoked certificates and those of removed nodes to the API, and
// asks next about all others.
func (r *rights) check(next authenticator.Request) authenticator.Request {
	return authenticator.RequestFunc(func(req *http.Request) (*authenticator.Response, bool, error) {
		if req.TLS != nil && len(req.TLS.PeerCertificates) > 0 {
			leaf := req.TLS.PeerCertificates[0]
			if r.revokedCertificate(leaf) {
				return nil, false, fmt.Errorf("this certificate of %s was revoked: ask for another", leaf.Subject.CommonName)
			}
			if name, isNode := pki.NodeName(leaf); isNode {
				if r.revoked(pki.Fingerprint(leaf.PublicKey)) {
					return nil, false, fmt.Errorf("node %s was removed from the cluster", name)
				}
				if err := r.recorded(req.Context(), leaf, name); err != nil {
					return nil, false, err
				}
			}
		}
		return next.AuthenticateRequest(req)
	})
}

// recorded refuses a node's certificate that no record stands behind. This
// member may not know one that has just joined: then the leader is
// asked.
func (r *rights) recorded(ctx context.Context, leaf *x509.Certificate, name string) error {
	s := r.store.Load()
	if s == nil {
		return raftstore.ErrClosed
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	rec, err := join.MemberNow(ctx, s, pki.Fingerprint(leaf.PublicKey))
	switch {
	// An agent that was just promoted has its old certificate for a while.
	case errors.Is(err, join.ErrNotMember), err == nil && (rec.Name != name || !rec.IsServer() && pki.NodeRole(leaf) == pki.Server):
		return fmt.Errorf("node %s has no such record in the cluster", name)
	case err != nil && pki.NodeRole(leaf) != pki.Server:
		return fmt.Errorf("look up node %s: %w", name, err)
	}
	return nil
}

// keepRights cuts the connections of members that are removed, and ends this
// node when it is the one.
func (m *Main) keepRights(ctx context.Context) error {
	err := join.Removals(ctx, m.store, func(id string, r join.Removal) error {
		if id == m.id.nodeID() {
			m.clusterAPI.answered()
			return errors.Join(m.errRemoved(r), m.dir.markRemoved(r))
		}
		m.rights.note(id, r)
		m.port.CloseConns(id)
		m.members.Forget(id)
		if ids := m.rights.remember(id, r); ids != nil {
			if err := m.dir.writeFormerServers(ids); err != nil {
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

// recordedKey reports whether the key with that id is a member's.
func (r *rights) recordedKey(id string) bool {
	s := r.store.Load()
	if s == nil {
		return false
	}
	_, err := join.Member(context.Background(), s, id)
	return err == nil
}
