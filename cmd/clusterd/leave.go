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
	return persistently(ctx, func(ctx context.Context) error { return s.m.clusterAPI.leave(ctx, s.m.cfg.Name, false) })
}

// Leave implements agent.Membership.
func (s membership) Leave(ctx context.Context) error {
	return logLeft(s.m.log, persistently(ctx, func(ctx context.Context) error {
		err := s.m.clusterAPI.leave(ctx, s.m.cfg.Name, true)
		if errors.Is(err, join.ErrNotMember) { // a try before it did it
			return nil
		}
		return err
	}))
}

// agentMembership is it for an agent, which asks a server.
type agentMembership struct{ n *agentNode }

func (a agentMembership) dial(ctx context.Context) (net.Conn, error) {
	return a.n.servers.Dial(ctx, transport.Member)
}

// MayLeave implements agent.Membership.
func (a agentMembership) MayLeave(ctx context.Context) error {
	return persistently(ctx, func(ctx context.Context) error { return join.MayLeave(ctx, a.dial) })
}

// Leave implements agent.Membership.
func (a agentMembership) Leave(ctx context.Context) error {
	return logLeft(a.n.log, persistently(ctx, func(ctx context.Context) error {
		err := join.Leave(ctx, a.dial)
		// Servers close the connections of a member that was removed, this one as well.
		if err != nil && !needed(err) && a.n.askRemoved(ctx) != nil {
			return nil
		}
		return err
	}))
}

// leaveAgain is how often what failed is tried.
const leaveAgain = 200 * time.Millisecond

// persistently does it until it succeeds, the cluster cannot do without the member, or
// ctx ends. Without a leader, or with a server that does not answer, it is tried again.
func persistently(ctx context.Context, do func(context.Context) error) error {
	var last error
	err := wait.PollUntilContextCancel(ctx, leaveAgain, true, func(ctx context.Context) (bool, error) {
		last = do(ctx)
		if needed(last) {
			return false, last
		}
		return last == nil, nil
	})
	if err != nil && last != nil {
		return last
	}
	return err
}

// needed reports whether an error is that the cluster cannot do without the member.
func needed(err error) bool {
	var no *join.Refusal
	return errors.As(err, &no) && no.Code == join.CodeNeeded
}

// logLeft logs that the node has left, if it has.
func logLeft(log *slog.Logger, err error) error {
	if err == nil {
		log.Info("this node has left the cluster, as its machine is shut down: to come back it must be reset and join again")
	}
	return err
}
