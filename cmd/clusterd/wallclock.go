package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/slack"
	"k8s.io/apiserver/pkg/server/healthz"
	kubeversion "k8s.io/component-base/version"
)

// clockFloor is a moment that has passed for certain, and what was then.
func clockFloor(trust *pki.Trust) (time.Time, string) {
	return clockFloorOf(kubeversion.Get().BuildDate, trust)
}

// checkClockBefore refuses what a clock of the past would spoil: a cluster of 1970 has an
// authority that has ended when the clock is set.
func checkClockBefore(doing string) error {
	floor, what := clockFloor(nil)
	if now := time.Now(); now.Before(floor) {
		return fmt.Errorf("%s: this machine's clock is wrong: it says %s, which is before %s (%s): set it (timedatectl set-time), and repeat the command",
			doing, now.UTC().Format(time.RFC3339), what, floor.UTC().Format(time.RFC3339))
	}
	return nil
}

// readClock asks servers for their time as the node with that id.
func readClock(tid func() transport.Identity, id string) func(context.Context, join.ServerAddr) (time.Duration, error) {
	return func(ctx context.Context, s join.ServerAddr) (time.Duration, error) {
		tid := tid()
		return join.AskClock(ctx, func(ctx context.Context) (net.Conn, error) { return tid.DialForTime(ctx, s.Addr, s.ID) }, id, time.Now)
	}
}

// newClockWatch is a server's.
func (m *Main) newClockWatch() *clockWatch {
	return &clockWatch{
		clock: &m.clock, log: room(m.log, "clock"), read: readClock(func() transport.Identity { return m.tid }, m.id.nodeID()), trust: m.trust.Load,
		others: m.otherServers, all: func() int { return len(m.otherServers()) + 1 }, self: true, period: clockPeriod,
		last: func() time.Time {
			if m.store == nil {
				return time.Time{}
			}
			return m.store.Time()
		},
		ask: make(chan struct{}, 1), changed: m.renewNow.Broadcast,
	}
}

// otherServers are those of the records, and before the store is open those of the data directory.
func (m *Main) otherServers() []join.ServerAddr {
	if m.store != nil {
		return m.serverAddrs()[1:]
	}
	var others []join.ServerAddr
	for _, p := range m.dir.readPeers() {
		others = append(others, join.ServerAddr{ID: p.ID, Name: p.Name, Addr: p.Addr})
	}
	return others
}

// keepClock keeps the verdict on this server's clock, and leadership away from it while others agree
// that it is wrong: what the leader does goes by its clock.
func (m *Main) keepClock(ctx context.Context) error {
	yield := leaderYield{verdict: m.clock.Verdict, leads: m.store.IsLeader, members: m.store.Members, transfer: m.store.TransferLeadershipTo, log: m.log}
	var yielding sync.WaitGroup
	defer yielding.Wait()
	yielding.Go(func() {
		for ctx.Err() == nil {
			wait := yield.look(ctx)
			select {
			case <-ctx.Done():
			case <-slack.After(wait):
			}
		}
	})
	return m.clockWatch.run(ctx)
}

// clockCheck is the readiness of this server as its clock makes it.
func (m *Main) clockCheck() healthz.HealthChecker {
	return healthz.NamedCheck("clock", func(*http.Request) error {
		if v := m.clock.Verdict(); v.Wrong() {
			return errors.New(v.Why)
		}
		return nil
	})
}
