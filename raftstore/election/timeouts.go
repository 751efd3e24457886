package election

import (
	"sync"
	"time"
)

// timeouts is how long this member waits for others before it takes them for gone.
//
// On a machine that is not overloaded that is Config.Silence. Where members get a
// few milliseconds of a CPU a second, heartbeats are late although nothing is
// wrong, votes come when raft has given the election up, and with fixed times no
// election ends for minutes. So a wait is longer
//   - by the time for which this member itself did not run: its timers fired late, and
//     what came meanwhile may still be unread;
//   - when heartbeats of a leader have been late before and it was there after all;
//   - after each election that has brought no leader, twice as long: the members' waits
//     become longer than an election takes, whatever it takes.
type timeouts struct {
	silence time.Duration
	gap     func() time.Duration

	mu     sync.Mutex
	failed int       // elections without a leader, less those forgiven since
	until  time.Time // failed is one less from then on

	due    time.Time // when the timer that is set fires; zero: none is
	late   time.Duration
	lateOf time.Time // late is of the silence since then
}

const (
	// maxFailed bounds the waits, whatever their reason: 16 times as long.
	maxFailed = 4
	// forgiveAfter is how long a leader has to be there until one of the elections
	// that have failed is forgotten.
	forgiveAfter = 15 * time.Second
	// gapFactor is how many times a pause between heartbeats that was seen has to pass.
	gapFactor = 2
)

// wait is how long a leader may be silent now.
func (p *timeouts) wait() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	longest := p.silence << maxFailed
	return min(min(max(p.silence, gapFactor*p.gap()), longest)<<p.failed, longest)
}

// factor is by how much waits are longer than on a machine that is not overloaded.
func (p *timeouts) factor() time.Duration { return max(1, p.wait()/p.silence) }

// failedElection notes one that has brought no leader.
func (p *timeouts) failedElection() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failed, p.until = min(p.failed+1, maxFailed), time.Time{}
}

// leads notes that there is a leader.
func (p *timeouts) leads(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.failed == 0:
	case p.until.IsZero():
		p.until = now.Add(forgiveAfter)
	case now.After(p.until):
		p.failed, p.until = p.failed-1, now.Add(forgiveAfter)
	}
}

// sleeps notes when the timer that is being set fires; woke, that it has, or that
// something else came before.
func (p *timeouts) sleeps(until time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.due = until
}

func (p *timeouts) woke(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.late += max(0, now.Sub(p.due))
	p.due = time.Time{}
}

// silentFor is how long this member has listened in vain since it has heard something.
func (p *timeouts) silentFor(heard, now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if heard.After(p.lateOf) {
		p.late, p.lateOf = 0, heard
	}
	late := p.late
	if !p.due.IsZero() {
		late += max(0, now.Sub(p.due))
	}
	return max(0, now.Sub(heard)-late)
}
