// Package capability knows which commands the other members of a store can read
// (Known), so that none comes into the log at which one of them would stop.
package capability

import (
	"context"
	"sync"
	"time"

	"github.com/clusterd/clusterd/raftstore/peer"
)

// Members are the other members, as peer.Calls knows them.
type Members interface {
	Call(id string, kind byte, body []byte, reply peer.ReplyFunc) uint64
}

// Known remembers what members have said that they can read. Members grow
// newer, not older: what one has said once holds, also while it is away. Its
// methods may be called concurrently.
type Known struct {
	members        Members
	timeout, pause time.Duration

	mu     sync.Mutex
	newest map[string]uint64
	// quiet is until when those are not asked again that did not answer.
	quiet map[string]time.Time
}

const (
	timeout = 500 * time.Millisecond // how long All waits for answers
	pause   = 10 * time.Second       // how long one that said no, or nothing, is left alone
)

// New returns a Known that has not asked any member yet.
func New(members Members) *Known {
	return &Known{members: members, timeout: timeout, pause: pause, newest: make(map[string]uint64), quiet: make(map[string]time.Time)}
}

// All reports whether each of the members is known to read commands up to a
// number. It asks those that have not said so, and waits a moment for them.
func (k *Known) All(ctx context.Context, ids []string, command uint64) bool {
	ctx, cancel := context.WithTimeout(ctx, k.timeout)
	defer cancel()
	answers := make(chan bool, len(ids))
	for _, id := range ids {
		k.ask(id, command, answers)
	}
	for range ids {
		select {
		case yes := <-answers:
			if !yes {
				return false
			}
		case <-ctx.Done():
			k.hush(ids)
			return false
		}
	}
	return true
}

// hush keeps those who have never answered from being asked again soon.
func (k *Known) hush(ids []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, id := range ids {
		if k.newest[id] == 0 {
			k.quiet[id] = time.Now().Add(k.pause)
		}
	}
}

// ask answers from what was said before, or asks.
func (k *Known) ask(id string, command uint64, answers chan<- bool) {
	k.mu.Lock()
	known, quiet := k.newest[id], time.Now().Before(k.quiet[id])
	k.mu.Unlock()
	if known >= command || quiet {
		answers <- known >= command
		return
	}
	k.members.Call(id, peer.KindSpeaks, nil, func(f peer.Frame, _ bool, err error) {
		a := peer.Answer{ID: id, Frame: f, Err: err}
		newest, _ := a.Number()
		k.mu.Lock()
		k.newest[id] = max(k.newest[id], newest)
		if newest < command {
			k.quiet[id] = time.Now().Add(k.pause)
		}
		k.mu.Unlock()
		answers <- newest >= command
	})
}
