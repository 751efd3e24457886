package election

import (
	"sync"
	"time"
)

// Leader knows who leads, as far as this member has heard.
type Leader struct {
	mu      sync.Mutex
	id      string
	term    uint64
	changed chan struct{}
	at      time.Time // of the last change
	lost    time.Time // since when there is no leader, if there is none
}

// NewLeader returns a Leader that knows of none yet.
func NewLeader() *Leader {
	return &Leader{changed: make(chan struct{}), at: time.Now(), lost: time.Now()}
}

// Since is when the leader has last changed.
func (l *Leader) Since() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.at
}

// Current returns the leader's id, "" if there is none, and a channel that is
// closed when that is no longer so.
func (l *Leader) Current() (string, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.id, l.changed
}

// Changed returns a channel that is closed when another member leads, or none.
func (l *Leader) Changed() <-chan struct{} {
	_, changed := l.Current()
	return changed
}

// Without is for how long there has been no leader; 0 while there is one.
func (l *Leader) Without() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.id != "" {
		return 0
	}
	return time.Since(l.lost)
}

// Set notes who leads in a term, and reports whether that is a change.
func (l *Leader) Set(id string, term uint64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.id == id && l.term == term {
		return false
	}
	l.at = time.Now()
	if l.id != "" && id == "" { // not at each further election without a winner
		l.lost = l.at
	}
	l.id, l.term = id, term
	close(l.changed)
	l.changed = make(chan struct{})
	return true
}

// Silent notes that the leader which has just been lost was last heard at that time: it
// takes raft a while to give it up, in which it led nobody.
func (l *Leader) Silent(heard time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.id == "" && heard.Before(l.lost) {
		l.lost = heard
	}
}

// Leadership tells one reader in order when this member leads and when it does not
// any more: true and false in turn, beginning with true. A loss is never skipped,
// however slow the reader, though several in a row show as one.
type Leadership struct {
	ch   chan bool
	wake chan struct{}

	mu   sync.Mutex
	term uint64 // in which this member leads and is ready; 0: it does not
}

// NewLeadership begins without.
func NewLeadership() *Leadership {
	return &Leadership{ch: make(chan bool), wake: make(chan struct{}, 1)}
}

// Set notes the term in which this member leads and is ready; 0: it does not.
func (l *Leadership) Set(term uint64) {
	l.mu.Lock()
	l.term = term
	l.mu.Unlock()
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// Ch delivers the changes. Run closes it.
func (l *Leadership) Ch() <-chan bool { return l.ch }

// Run sends until done.
func (l *Leadership) Run(done <-chan struct{}) {
	defer close(l.ch)
	var sent uint64 // the term the reader knows that we lead in; 0: that we do not
	for {
		l.mu.Lock()
		term := l.term
		l.mu.Unlock()
		var ch chan bool
		if sent != 0 && term != sent {
			term = 0 // lost, whatever came after: say so first
		}
		if sent != term {
			ch = l.ch
		}
		select {
		case ch <- term != 0:
			sent = term
		case <-l.wake:
		case <-done:
			return
		}
	}
}
