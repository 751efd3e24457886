package main

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"time"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/authority"
	"github.com/clusterd/clusterd/member/gossipkey"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

// newRotation is this server's part in CA rotations, once its store is open.
func (m *Main) newRotation() *authority.Server {
	// sealsOf are the CAs, in PEM, that the sealing keys in use follow from.
	sealsOf := m.trust.Load().For(pki.ForSecrets).Bundle()
	return &authority.Server{
		Store: m.store, ID: m.id.NodeID(), Trust: m.trust.Load, Now: m.clock.Now,
		HasLeader:  func() bool { return m.store.Leader() != "" },
		Successors: m.dir,
		Fetch: func(ctx context.Context, server join.Record) (*join.Keys, error) {
			return m.fetchKeys(ctx, m.serverAddr(server.ID), server.ID)
		},
		Adopt: m.adoptTrust,
		Settle: func(context.Context) error {
			errs := []error{m.renewFront(m.clock.Now()), m.writeKubeconfig()}
			if seals := m.trust.Load().For(pki.ForSecrets).Bundle(); !bytes.Equal(seals, sealsOf) {
				err := m.newSealKeys()
				if err == nil {
					sealsOf = seals
				}
				errs = append(errs, err)
			}
			return errors.Join(errs...)
		},
		Refresh: func(ctx context.Context, name string) {
			_ = m.peers.call(ctx, name, http.MethodPost, v1.Members, nil, nil) // it asks by itself, later
		},
		Log: room(m.log, "authority"),
	}
}

// fetchKeys asks the server at an address for the keys that all servers have. id is what its
// key must be, empty: any server's.
func (m *Main) fetchKeys(ctx context.Context, addr netip.AddrPort, id string) (*join.Keys, error) {
	return join.FetchKeys(ctx, func(ctx context.Context) (net.Conn, error) {
		return m.tid.Dial(ctx, addr, id, transport.Member)
	})
}

// newGossipKeys is this server's part in rotations of the gossip key, once its store is open.
func (m *Main) newGossipKeys() *gossipkey.Node {
	return &gossipkey.Node{
		Store: m.store, ID: m.id.NodeID(), HasLeader: func() bool { return m.store.Leader() != "" },
		Ring: func() gossipkey.Ring {
			m.idMu.Lock()
			defer m.idMu.Unlock()
			return m.id.Ring
		},
		Adopt: m.adoptRing,
		Addr:  m.serverAddr, Known: m.memberAddrs, Self: m.cfg.addr(), Fetch: m.fetchKeys,
		Every: m.cfg.GossipKeyAge.Duration, Now: m.clock.Now, Log: room(m.log, "gossipkey"),
	}
}

// adoptRing makes a ring this server's: on disk in one step, then in use.
func (m *Main) adoptRing(ring gossipkey.Ring) error {
	m.idMu.Lock()
	defer m.idMu.Unlock()
	id := *m.id
	id.Ring = ring
	if err := m.dir.ReplaceIdentity(&id); err != nil {
		return err
	}
	m.id.Ring = ring
	return m.members.SetKeys(ring.Keys)
}

// adoptTrust makes a trust this server's: on disk in one step, then in use.
func (m *Main) adoptTrust(next *pki.Trust) error {
	had := m.trust.Load()
	if err := m.writeTrust(next, m.clock.Now()); err != nil {
		return err
	}
	if !bytes.Equal(had.Bundle(), next.Bundle()) {
		m.trustChanged.Broadcast()
	}
	if had.DropsAny(next) {
		// Keys that have a record are the members', no matter which CA signed for them.
		m.port.CloseUntrusted(m.rights.IsRecorded)
	}
	return nil
}

func (m *Main) writeTrust(next *pki.Trust, now time.Time) error {
	m.idMu.Lock()
	defer m.idMu.Unlock()
	id := *m.id
	id.Trust = next
	for _, ca := range m.id.Trust.Dropped(next, pki.ForSecrets) {
		key, err := nodedir.SealKeyOf(ca)
		if err != nil {
			return err
		}
		id.RetiredSeals = append(slices.Clone(id.RetiredSeals), nodedir.SealLine(key)...)
	}
	if !next.Signer().Signed(id.Cert) {
		cert, err := next.Signer().IssueServer(id.Key.Public(), m.cfg.Name, certAddrs(m.cfg), now, certNames(m.cfg)...)
		if err != nil {
			return err
		}
		id.Cert = cert
	}
	if err := m.dir.ReplaceIdentity(&id); err != nil {
		return err
	}
	m.id.Trust, m.id.Cert, m.id.RetiredSeals = id.Trust, id.Cert, id.RetiredSeals
	return m.useIdentity(now)
}
