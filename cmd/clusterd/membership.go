package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/recovery"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/slack"
)

// goneError ends a node that does not belong to the cluster any more. Starting it again
// does not help.
type goneError struct{ why string }

func (e *goneError) Error() string { return e.why }

// errRemoved says what became of this machine and what to do.
func (m *Main) errRemoved(r join.Removal) error { return errRemoved(m.cfg, r) }

func errRemoved(cfg Config, r join.Removal) error {
	happened := "was removed from the cluster, where it was called " + cfg.Name
	if r.Why != "" {
		happened = fmt.Sprintf("was left out when the cluster was %s on %s, where it was called %s: the cluster goes on in epoch %d, without what only this machine knows",
			r.Why, r.Removed.Format(time.RFC3339), cfg.Name, r.Epoch)
	}
	return &goneError{fmt.Sprintf("this machine %s; its containers go on without anybody to look after them: end them with `clusterd reset --data %s`, after which it can join again", happened, cfg.Data)}
}

// membershipPeriod is how often a node without a leader asks the others why.
const membershipPeriod = 2 * time.Second

// A node that starts asks before it takes part. A member whose clusterd is
// down says so at once; one whose machine is silent costs this much. Tests lengthen them.
var (
	startTimeout      = 3 * time.Second
	membershipTimeout = 3 * time.Second
)

// watchMembership finds out why no member answers this node: without a leader, or
// when a member has refused it, it asks the others for its membership status.
func (m *Main) watchMembership(ctx context.Context) error {
	tick := slack.NewTicker(membershipPeriod)
	defer tick.Stop()
	for {
		wasRefused := false
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			select {
			case <-m.refused:
				wasRefused = true
			default:
			}
		}
		if !wasRefused && m.store.Leader() != "" {
			continue
		}
		adopt, err := m.judgeMembership(m.askMembership(ctx, m.memberAddrs(), membershipTimeout))
		if errors.Is(err, errDemoted) {
			if err := m.tryBecomeAgent(ctx); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		if adopt != nil {
			if err := m.dir.WriteRecovery(*adopt); err != nil {
				return err
			}
			return &reexecError{"this node starts over in epoch " + adopt.Epoch.String() + " of the store", m.cfg.Data}
		}
	}
}

// checkMembership is called before the store is opened: a member of a past epoch
// must not find others of it and form a majority with them.
func (m *Main) checkMembership(ctx context.Context) error {
	var looking sync.WaitGroup
	looking.Go(func() { m.clockWatch.Look(ctx) })
	answers := m.askMembership(ctx, m.seeds(), startTimeout)
	looking.Wait()
	if m.clock.Verdict().Ahead != 0 { // those who answer seemed to have certificates of another time
		answers = m.askMembership(ctx, m.seeds(), startTimeout)
	}
	adopt, err := m.judgeMembership(answers)
	if errors.Is(err, errDemoted) {
		return m.becomeAgent(ctx, m.seeds())
	}
	if err != nil || adopt == nil {
		return err
	}
	if err := m.dir.WriteRecovery(*adopt); err != nil {
		return err
	}
	return m.recoverStore()
}

// memberAddrs are the addresses where other members are, or were.
func (m *Main) memberAddrs() []netip.AddrPort {
	addrs := m.seeds()
	for _, mem := range m.members.All() {
		if mem.ID != m.id.NodeID() {
			addrs = append(addrs, mem.Addr)
		}
	}
	return addrs
}

// askMembership asks all of them at once and returns the answers that came
// in time.
func (m *Main) askMembership(ctx context.Context, addrs []netip.AddrPort, timeout time.Duration) []join.MembershipStatus {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	addrs = slices.Clone(addrs)
	slices.SortFunc(addrs, netip.AddrPort.Compare)
	var mu sync.Mutex
	var answers []join.MembershipStatus
	var asking sync.WaitGroup
	for _, addr := range slices.Compact(addrs) {
		asking.Go(func() {
			dial := func(ctx context.Context) (net.Conn, error) {
				return m.tid.Dial(ctx, addr, "", transport.Join)
			}
			answer, err := join.AskMembershipStatus(ctx, dial, m.id.NodeID())
			if err != nil {
				m.log.Debug("ask a member for this node's membership status", "peer", addr, "err", err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			answers = append(answers, answer)
		})
	}
	asking.Wait()
	return answers
}

// errDemoted is returned by judgeMembership when this node is an agent by now: it
// was down, or cut off from the store, when that was written.
var errDemoted = errors.New("this node was demoted")

// judgeMembership does what follows from the answers: it returns the end of this node, an
// epoch in which it is to start over, or nothing.
func (m *Main) judgeMembership(answers []join.MembershipStatus) (*recovery.Order, error) {
	ours, err := m.dir.Epoch()
	if err != nil {
		return nil, err
	}
	j := join.JudgeMembership(ours, m.store != nil && m.store.Leader() != "", answers)
	for _, epoch := range j.Elsewhere {
		m.log.Error("another part of this cluster was recovered or restored and runs on without this one: members do not speak to each other across epochs; end one of the two with `clusterd reset` on its machines",
			"epoch", ours, "other epoch", epoch)
	}
	for _, removed := range j.Contradicted {
		m.log.Warn("a member says that this node was removed from the cluster, and another that follows a leader says that it is a member: this node goes on, and asks again", "removed", removed.Removed)
	}
	switch {
	case j.Removed != nil:
		return nil, errors.Join(m.errRemoved(*j.Removed), m.dir.MarkRemoved(*j.Removed))
	case j.Demoted:
		return nil, errDemoted
	case j.StartOver != nil:
		return &recovery.Order{Epoch: *j.StartOver}, nil
	}
	return nil, nil
}
