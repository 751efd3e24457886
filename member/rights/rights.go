// Package rights answers what a member may do, by the records and removals that this server has
// applied: whose key is refused, whom gossip may list, whose certificate the API takes. It also
// notifies agents, which have no store, of removed servers (Notifier). It writes nothing to the
// store and closes no connection.
package rights

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/clusterd/clusterd/gossip"
	"github.com/clusterd/clusterd/member/clock"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/wait"
)

// Rights knows which members' keys were revoked. It is made before the store is
// open, and until then the removed servers count that the data directory names. Its methods
// may be called concurrently, and none waits but CheckCertificate. The zero value
// knows of no removal.
type Rights struct {
	self  string // this member's id
	clock *clock.Clock
	store atomic.Pointer[raftstore.Store]

	mu      sync.Mutex              // guards below
	removed map[string]join.Removal // of servers, as Note got them
	former  map[string]bool         // ids of removed servers, as the data directory has them

	changed wait.Change // of removed
}

// New makes those of the member with the id self. former are the ids of removed servers that the
// data directory has.
func New(self string, clock *clock.Clock, former map[string]bool) *Rights {
	return &Rights{self: self, clock: clock, former: maps.Clone(former)}
}

// UseStore has the records of the store count from now on.
func (r *Rights) UseStore(s *raftstore.Store) { r.store.Store(s) }

// Now is the cluster's time.
func (r *Rights) Now() time.Time { return r.clock.Now() }

// Remember adds a removed server to those of the data directory. It returns their ids,
// or nil if it was among them or was no server.
func (r *Rights) Remember(id string, why join.Removal) []string {
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

// Note keeps a removed server for the list that agents get: see RemovedServers.
func (r *Rights) Note(id string, why join.Removal) {
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

// Changed is closed when RemovedServers has become another list. Take it before that.
func (r *Rights) Changed() <-chan struct{} { return r.changed.Next() }

// RemovedServers are the ids of removed servers that agents must refuse now.
func (r *Rights) RemovedServers() []string {
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

// Revoked reports whether the key with that id was removed, as far as this
// member knows.
func (r *Rights) Revoked(id string) bool {
	s := r.store.Load()
	if s == nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.former[id]
	}
	gone, err := join.IsRemoved(context.Background(), s, id)
	return err == nil && gone // a store that is closing knows nothing
}

// Admitted reports whether gossip may list a member: a server of the records, by
// the name it has there. While this member follows no leader its records may
// lack those who joined last, and only who was removed is refused.
func (r *Rights) Admitted(m gossip.Meta) bool {
	s := r.store.Load()
	if s == nil || s.Leader() == "" {
		return !r.Revoked(m.ID)
	}
	rec, err := join.Member(context.Background(), s, m.ID)
	if err != nil {
		// A store that lacks this member's own record is still being filled.
		_, err = join.Member(context.Background(), s, r.self)
		return err != nil && !r.Revoked(m.ID)
	}
	return rec.IsServer() && rec.Name == m.Name
}

// IsServer reports whether the key with that id is a server's.
func (r *Rights) IsServer(id string) bool {
	s := r.store.Load()
	if s == nil {
		return false
	}
	rec, err := join.Member(context.Background(), s, id)
	return err == nil && rec.IsServer()
}

// Servers are the ids of all servers and where they joined.
func (r *Rights) Servers() map[string]netip.AddrPort {
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

// Named is the record of a node name, as far as this member knows.
func (r *Rights) Named(name string) (join.Record, error) {
	s := r.store.Load()
	if s == nil {
		return join.Record{}, raftstore.ErrClosed
	}
	return join.MemberNamed(context.Background(), s, name)
}

// RevokedCertificate reports whether a client certificate was taken away, as far as
// this member knows.
func (r *Rights) RevokedCertificate(leaf *x509.Certificate) bool {
	s := r.store.Load()
	if s == nil {
		return false
	}
	gone, err := join.IsRevoked(context.Background(), s, leaf)
	return err == nil && gone
}

// SignAt is the time at which to sign a certificate of the user now, see
// join.SignAt.
func (r *Rights) SignAt(user string) time.Time {
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

// CheckCertificate refuses revoked certificates and those of removed nodes. A node's key has to
// be recorded, too: it may ask the leader, for two seconds.
func (r *Rights) CheckCertificate(ctx context.Context, leaf *x509.Certificate) error {
	if r.RevokedCertificate(leaf) {
		return fmt.Errorf("this certificate of %s was revoked: ask for another", leaf.Subject.CommonName)
	}
	name, isNode := pki.NodeName(leaf)
	switch {
	case !isNode:
		return nil
	case r.Revoked(pki.Fingerprint(leaf.PublicKey)):
		return fmt.Errorf("node %s was removed from the cluster", name)
	}
	return r.recorded(ctx, leaf, name)
}

// recorded refuses a node's certificate that no record stands behind. This
// member may not know one that has just joined: then the leader is
// asked.
func (r *Rights) recorded(ctx context.Context, leaf *x509.Certificate, name string) error {
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

// IsRecorded reports whether the key with that id is a member's.
func (r *Rights) IsRecorded(id string) bool {
	s := r.store.Load()
	if s == nil {
		return false
	}
	_, err := join.Member(context.Background(), s, id)
	return err == nil
}
