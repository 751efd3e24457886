package main

import (
	"context"
	"net/netip"
	"slices"

	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/gossip"
	"github.com/clusterd/clusterd/member/join"
)

// serverAddrs are all servers of the records, this one first: those that are
// away, too, since they come back.
func (m *Main) serverAddrs() []join.ServerAddr {
	all := []join.ServerAddr{{ID: m.id.NodeID(), Name: m.cfg.Name, Addr: m.cfg.addr()}}
	records, err := join.Records(context.Background(), m.store, true)
	if err != nil {
		return all
	}
	for _, rec := range join.Servers(records) {
		seen, known := m.members.Get(rec.ID)
		switch {
		case rec.ID == m.id.NodeID():
		case known:
			all = append(all, join.ServerAddr{ID: rec.ID, Name: rec.Name, Addr: seen.Addr})
		case rec.Confirmed:
			all = append(all, join.ServerAddr{ID: rec.ID, Name: rec.Name, Addr: rec.Addr})
		}
	}
	return all
}

// serverAddr is where the server with that id is: as gossip has it, else where it was
// last seen, else where it joined. The server there has to prove the id. It is not
// valid for an unknown server.
func (m *Main) serverAddr(id string) netip.AddrPort {
	if seen, known := m.members.Get(id); known {
		return seen.Addr
	}
	for _, p := range m.dir.ReadPeers() {
		if p.ID == id {
			return p.Addr
		}
	}
	return m.rights.Servers()[id]
}

// seeds are where other members were last seen, and where they are said to be.
func (m *Main) seeds() []netip.AddrPort {
	given, _ := m.cfg.peerAddrs() // checked when they were read
	return append(m.dir.PeerAddrs(), given...)
}

// alive returns the other members that gossip sees.
func (m *Main) alive() []nodedir.SeenPeer {
	var peers []nodedir.SeenPeer
	for _, mem := range m.members.All() {
		if mem.State == gossip.Alive && mem.ID != m.id.NodeID() {
			peers = append(peers, nodedir.SeenPeer{ID: mem.ID, Name: mem.Name, Addr: mem.Addr})
		}
	}
	return peers
}

// keepPeers writes down who the others are and where, so that a restart finds
// them, and can name them before it has a leader.
func (m *Main) keepPeers(ctx context.Context) error {
	written := m.dir.ReadPeers()
	for {
		changed := m.members.Changed()
		// A node that sees no other member keeps the list it has.
		if alive := m.alive(); len(alive) > 0 {
			peers := keptPeers(alive, written, m.rights.Revoked)
			if !slices.Equal(peers, written) {
				if err := m.dir.WritePeers(peers); err != nil {
					m.log.Warn("the peers' addresses could not be written down", "err", err)
				} else {
					written = peers
				}
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// keptPeers are those that are alive now, then those that are away: one that
// was written down stays until it is removed from the cluster, also when it was
// away before this node was started, so that gossip does not know it.
func keptPeers(alive, written []nodedir.SeenPeer, removed func(id string) bool) []nodedir.SeenPeer {
	peers := slices.Clone(alive)
	for _, old := range written {
		if !removed(old.ID) && !slices.ContainsFunc(peers, func(p nodedir.SeenPeer) bool { return p.ID == old.ID }) {
			peers = append(peers, old)
		}
	}
	return peers
}
