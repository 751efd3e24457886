package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/clusterd/clusterd/member/clock"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
	"k8s.io/apiserver/pkg/server/healthz"
	kubeversion "k8s.io/component-base/version"
)

// clockFloor is a moment that has passed for certain, and what was then.
func clockFloor(trust *pki.Trust) (time.Time, string) {
	return clock.Floor(kubeversion.Get().BuildDate, trust)
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
func (m *Main) newClockWatch() *clock.Watch {
	return &clock.Watch{
		Clock: &m.clock, Log: room(m.log, "clock"), Read: readClock(func() transport.Identity { return m.tid }, m.id.NodeID()), Floor: func() (time.Time, string) { return clockFloor(m.trust.Load()) },
		Others: m.otherServers, Servers: func() int { return len(m.otherServers()) + 1 }, Self: true, Period: clock.Period,
		Last: func() time.Time {
			if m.store == nil {
				return time.Time{}
			}
			return m.store.Time()
		},
		Changed: m.renewNow.Broadcast,
	}
}

// otherServers are those of the records, and before the store is open those of the data directory.
func (m *Main) otherServers() []join.ServerAddr {
	if m.store != nil {
		return m.serverAddrs()[1:]
	}
	var others []join.ServerAddr
	for _, p := range m.dir.ReadPeers() {
		others = append(others, join.ServerAddr{ID: p.ID, Name: p.Name, Addr: p.Addr})
	}
	return others
}

// keepClock keeps the verdict on this server's clock, and leadership away from it while others agree
// that it is wrong.
func (m *Main) keepClock(ctx context.Context) error {
	yield := clock.Yield{Verdict: m.clock.Verdict, Leads: m.store.IsLeader, Members: m.store.Members, Transfer: m.store.TransferLeadershipTo, Log: m.log}
	var yielding sync.WaitGroup
	defer yielding.Wait()
	yielding.Go(func() { yield.Run(ctx) })
	return m.clockWatch.Run(ctx)
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
