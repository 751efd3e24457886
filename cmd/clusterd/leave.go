package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

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
	err := join.Leave(ctx, a.dial)
	var no *join.Refusal
	if err != nil && !errors.As(err, &no) {
		// Servers close the connections of a member that was removed, this one as well.
		if wait.PollUntilContextCancel(ctx, leaveAgain, true, func(ctx context.Context) (bool, error) {
			return a.n.askRemoved(ctx) != nil, nil
		}) == nil {
			err = nil
		}
	}
	return logLeft(a.n.log, err)
}

// leaveAgain is how often servers are asked whether they have removed this node.
const leaveAgain = 200 * time.Millisecond

// logLeft logs that the node has left, if it has.
func logLeft(log *slog.Logger, err error) error {
	if err == nil {
		log.Info("this node has left the cluster, as its machine is shut down: to come back it must be reset and join again")
	}
	return err
}
