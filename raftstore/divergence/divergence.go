// Package divergence finds a member whose keyspace differs from what most made of
// the same log: the leader compares hashes, once a second while there are writes.
// It knows no Store.
package divergence

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/clusterd/clusterd/raftstore/peer"
	"github.com/clusterd/clusterd/slack"
)

// Err is why a store stops whose keyspace differs from what most
// members made of the same log.
var Err = errors.New("this member's keyspace differs from the others'")

// Hashes remembers the keyspace's hash after each of the latest log entries.
type Hashes struct {
	mu   sync.Mutex
	ring [4096]indexHash
}

type indexHash struct{ index, hash uint64 }

// Note notes the hash after the entry of that index.
func (h *Hashes) Note(index, hash uint64) {
	h.mu.Lock()
	h.ring[index%uint64(len(h.ring))] = indexHash{index, hash}
	h.mu.Unlock()
}

// At is the hash after an entry; false: that is not known (any more).
func (h *Hashes) At(index uint64) (hash uint64, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	e := h.ring[index%uint64(len(h.ring))]
	return e.hash, e.index == index && index > 0
}

const (
	// comparePeriod is how often the leader compares, when something has been
	// applied since.
	comparePeriod = time.Second
	// compareTimeout is how long a member may take to apply what the leader
	// has applied; a later one is asked the next time.
	compareTimeout = 5 * time.Second
)

// Members are the others, as peer.Calls knows them.
type Members interface {
	Ask(ids []string, kind byte, body []byte) (answers <-chan peer.Answer, forget func())
	Call(id string, kind byte, body []byte, reply peer.ReplyFunc) uint64
}

// Config is what a Check works with. All fields are required.
type Config struct {
	ID      string // this member's
	Hashes  *Hashes
	Members Members
	IDs     func() ([]string, error)                      // of all members
	Leads   func() bool                                   // this member may compare
	Applied func() uint64                                 // the last log entry here
	Reach   func(ctx context.Context, index uint64) error // waits until that entry is applied here
	Stop    func(err error)                               // this member differs: err wraps Err
	Logger  *slog.Logger
}

// Check compares this member with the others.
type Check struct {
	cfg Config
	// undecided is what was last said of members that differ without a majority.
	undecided string
}

// New starts nothing, see Run.
func New(cfg Config) *Check { return &Check{cfg: cfg} }

// Run makes the leader ask every member, once a second while there
// are writes, for the hash of its keyspace after one and the same log entry.
// The keyspace keeps its hash up to date with each change, so this costs a few
// bytes a second.
func (c *Check) Run(ctx context.Context) {
	tick := slack.NewTicker(comparePeriod)
	defer tick.Stop()
	var compared uint64
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if index := c.cfg.Applied(); index != compared && c.cfg.Leads() && c.compare(ctx, index) {
			compared = index
		}
	}
}

// compare reports whether all members answered.
func (c *Check) compare(ctx context.Context, index uint64) bool {
	ours, ok := c.cfg.Hashes.At(index)
	if !ok {
		return false // the latest entry changed nothing, the next one will do
	}
	others, err := c.cfg.IDs()
	if err != nil {
		return false
	}
	others = slices.DeleteFunc(others, func(id string) bool { return id == c.cfg.ID })
	ctx, cancel := context.WithTimeout(ctx, compareTimeout)
	defer cancel()
	answers, forget := c.cfg.Members.Ask(others, peer.KindHash, peer.NumberBody(index))
	defer forget()
	votes := map[uint64]int{ours: 1}
	theirs := map[string]uint64{}
	for range others {
		select {
		case a := <-answers:
			if hash, ok := a.Number(); ok {
				votes[hash]++
				theirs[a.ID] = hash
			}
		case <-ctx.Done():
		}
	}
	c.settle(index, len(others)+1, ours, votes, theirs)
	return len(theirs) == len(others)
}

// settle stops who differs from what a majority of all members have: of fewer it is not
// known which of them are wrong. Between two members it is what the leader has.
func (c *Check) settle(index uint64, members int, ours uint64, votes map[uint64]int, theirs map[string]uint64) {
	right := ours
	for hash, n := range votes {
		if n > votes[right] {
			right = hash
		}
	}
	if len(votes) > 1 && members > 2 && votes[right] <= members/2 {
		differ := fmt.Sprint(hashText(ours), hashTexts(theirs))
		if c.undecided == differ {
			return // it is said once
		}
		c.undecided = differ
		c.cfg.Logger.Error("members' keyspaces differ, and no majority has the same: none of them is stopped", "index", index, "members", members, "has", hashText(ours), "others", hashTexts(theirs))
		return
	}
	for id, hash := range theirs {
		if hash != right {
			c.cfg.Logger.Error("a member's keyspace differs, it has to stop", "member", id, "index", index, "has", hashText(hash), "majority", hashText(right))
			c.cfg.Members.Call(id, peer.KindDiffers, append(peer.NumberBody(index), peer.NumberBody(right)...), func(peer.Frame, bool, error) {})
		}
	}
	if ours != right {
		c.diverged(index, ours, right)
	}
}

func hashTexts(theirs map[string]uint64) map[string]string {
	texts := make(map[string]string, len(theirs))
	for id, hash := range theirs {
		texts[id] = hashText(hash)
	}
	return texts
}

func hashText(h uint64) string { return fmt.Sprintf("%016x", h) }

// Answer answers peer.KindHash when this member has come that far; false: it has
// no answer.
func (c *Check) Answer(ctx context.Context, body []byte) (hash uint64, ok bool) {
	index, err := peer.BodyNumber(body)
	if err != nil {
		return 0, false
	}
	ctx, cancel := context.WithTimeout(ctx, compareTimeout)
	defer cancel()
	if err := c.cfg.Reach(ctx, index); err != nil {
		return 0, false
	}
	return c.cfg.Hashes.At(index)
}

// Differs takes the leader's word (peer.KindDiffers) that this member differs, if
// it does.
func (c *Check) Differs(body []byte) {
	if len(body) != 16 {
		return
	}
	index, right := binary.LittleEndian.Uint64(body), binary.LittleEndian.Uint64(body[8:])
	if ours, ok := c.cfg.Hashes.At(index); ok && ours != right {
		c.diverged(index, ours, right)
	}
}

func (c *Check) diverged(index, ours, right uint64) {
	c.cfg.Stop(fmt.Errorf("%w: after log entry %d its hash is %016x, theirs is %016x", Err, index, ours, right))
}
