package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/servers"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/slack"
)

// A member's role is what its record says (`clusterctl members promote`,
// `demote`). A node that finds another role there than it has gets a certificate
// of that role, puts its data directory right and begins again, in the same process
// and under the same name and key. podmon and the containers do not notice.
//
//	agent  ── record says server ──▶ certificate, keys, empty store, pki ──▶ run
//	server ── record says agent ───▶ certificate, list of servers, pki ────▶ run, and the store is set aside
//
// pki is changed last and in one step: a crash before leaves what the node was,
// which then tries again.

// rolePeriod is how often a server looks up its own record, and how long after a
// failed change of role comes the next.
const rolePeriod = 2 * time.Second

// keepRole waits until the servers say that this agent is a server, and makes it
// one. It returns a *reexecError.
func (n *agentNode) keepRole(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-n.promoted:
	}
	for {
		err := n.becomeServer(ctx)
		if err == nil {
			return &reexecError{"this node was promoted and goes on as a server", n.cfg.Data}
		}
		if ctx.Err() != nil {
			return nil
		}
		n.log.Warn("this node was promoted and cannot become a server yet, trying again", "err", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(rolePeriod):
		}
	}
}

// becomeServer puts into the data directory what a server that joins gets.
func (n *agentNode) becomeServer(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	over := func(protocol string) join.Dialer {
		return func(ctx context.Context) (net.Conn, error) { return n.servers.Dial(ctx, protocol) }
	}
	cert, answer, err := join.Renew(ctx, over(transport.Join), n.cfg.Name, n.id.Key, func(*join.Certificate) *pki.Trust { return n.trust.Load() })
	if err != nil {
		return fmt.Errorf("get a server's certificate: %w", err)
	}
	if pki.NodeRole(cert) != pki.Server {
		return errors.New("the certificate is an agent's: was it demoted meanwhile?")
	}
	keys, err := join.FetchKeys(ctx, over(transport.Member))
	if err != nil {
		return fmt.Errorf("get the servers' keys: %w", err)
	}
	next := &nodedir.Identity{Key: n.id.Key, Cert: cert, Trust: n.trust.Load()}
	if err := next.TakeKeys(keys); err != nil {
		return err
	}
	// What an earlier attempt began; the store of a server that was demoted was set aside then, and
	// the keys for secrets at rest that it had are gone: those that are there are to be kept.
	if err := os.RemoveAll(n.dir.Path("store")); err != nil {
		return err
	}
	if err := n.dir.DropServerState(); err != nil {
		return err
	}
	if err := raftstore.SetEpoch(n.dir.Path("store"), answer.Epoch); err != nil {
		return err
	}
	if err := n.dir.AddSealKeys(keys.OwnSeals); err != nil {
		return err
	}
	if err := n.dir.WritePeers(nodedir.ServerPeers(answer.Servers)); err != nil {
		return err
	}
	return n.dir.ReplaceIdentity(next)
}

// keepRole waits until this server's record says that it is an agent, as far as
// this member knows, and makes it one. It returns a *reexecError.
func (m *Main) keepRole(ctx context.Context) error {
	tick := slack.NewTicker(rolePeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		rec, err := join.Member(ctx, m.store, m.id.NodeID())
		if err != nil || rec.IsServer() {
			continue
		}
		if err := m.tryBecomeAgent(ctx); err != nil {
			return err
		}
	}
}

// tryBecomeAgent returns a *reexecError once this node is an agent; nil: it is to
// be tried again.
func (m *Main) tryBecomeAgent(ctx context.Context) error {
	err := m.becomeAgent(ctx, m.memberAddrs())
	var again *reexecError
	if errors.As(err, &again) {
		return err
	}
	if ctx.Err() == nil {
		m.log.Warn("this node was demoted and cannot become an agent yet, trying again", "err", err)
	}
	return nil
}

// becomeAgent puts an agent's identity into the data directory, and returns a
// *reexecError. What only servers have is removed by the agent's start.
func (m *Main) becomeAgent(ctx context.Context, addrs []netip.AddrPort) error {
	var errs []error
	for _, addr := range addrs {
		attempt, cancel := context.WithTimeout(ctx, membershipTimeout)
		cert, answer, err := join.Renew(attempt, func(ctx context.Context) (net.Conn, error) {
			return m.tid.Dial(ctx, addr, "", transport.Join)
		}, m.cfg.Name, m.id.Key, func(*join.Certificate) *pki.Trust { return m.trust.Load() })
		cancel()
		if err == nil && pki.NodeRole(cert) != pki.Agent {
			err = errors.New("the certificate is a server's")
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", addr, err))
			continue
		}
		others := slices.DeleteFunc(answer.Servers, func(s join.ServerAddr) bool { return s.ID == m.id.NodeID() })
		list, err := servers.Encode(others)
		if err != nil {
			return err
		}
		if err := m.dir.WriteServers(list); err != nil {
			return err
		}
		m.idMu.Lock()
		err = m.dir.ReplaceIdentity(&nodedir.Identity{Trust: m.id.Trust.Public(), Key: m.id.Key, Cert: cert})
		m.idMu.Unlock()
		if err != nil {
			return err
		}
		return &reexecError{"this node was demoted and goes on as an agent", m.cfg.Data}
	}
	return fmt.Errorf("get an agent's certificate: %w", errors.Join(errs...))
}
