package main

import (
	"context"
	"log/slog"
	"net"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/transport"
)

// membership is what agent.Membership is for a server: it takes itself out, as
// `clusterctl members rm` does, which hands over leadership first.
type membership struct{ m *Main }

// MayLeave implements agent.Membership.
func (s membership) MayLeave(ctx context.Context) error {
	return s.m.clusterAPI.leave(ctx, s.m.cfg.Name, false)
}

// Leave implements agent.Membership.
func (s membership) Leave(ctx context.Context) error {
	return logLeft(s.m.log, s.m.clusterAPI.leave(ctx, s.m.cfg.Name, true))
}

// agentMembership is it for an agent, which asks a server.
type agentMembership struct{ n *agentNode }

func (a agentMembership) dial(ctx context.Context) (net.Conn, error) {
	return a.n.servers.Dial(ctx, transport.Member)
}

// MayLeave implements agent.Membership.
func (a agentMembership) MayLeave(ctx context.Context) error { return join.MayLeave(ctx, a.dial) }

// Leave implements agent.Membership.
func (a agentMembership) Leave(ctx context.Context) error {
	return logLeft(a.n.log, join.Leave(ctx, a.dial))
}

// logLeft logs that the node has left, if it has.
func logLeft(log *slog.Logger, err error) error {
	if err == nil {
		log.Info("this node has left the cluster, as its machine is shut down: to come back it must be reset and join again")
	}
	return err
}
