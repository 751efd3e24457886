package silence

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/clusterd/clusterd/gossip"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
)

// company is what gossip knows; join adds a member.
type company struct {
	all     []gossip.Member
	changed chan struct{}
}

func (c *company) All() []gossip.Member     { return c.all }
func (c *company) Changed() <-chan struct{} { return c.changed }

func (c *company) change(joined ...gossip.Member) {
	c.all = append(c.all, joined...)
	old := c.changed
	c.changed = make(chan struct{})
	close(old)
}

// awaited are ids of agents that have had no time to connect yet.
type awaited []string

func (a awaited) Awaits(id string) bool                { return slices.Contains(a, id) }
func (a awaited) Probe(context.Context, chan<- string) {}

// TestExcused: an answer to a heartbeat that came while a server was asked is one, an
// older one is none, and an agent has none to give.
func TestExcused(t *testing.T) {
	began := time.Now()
	records := map[string]join.Record{
		"busy": {ID: "1"}, "silent": {ID: "2"}, "unheard": {ID: "3"}, "agent": {ID: "4", Role: pki.Agent}, "silent agent": {ID: "5", Role: pki.Agent},
	}
	s := NewSuspects(Sources{
		Agents: awaited{"4"},
		Record: func(name string) (join.Record, error) {
			if rec, ok := records[name]; ok {
				return rec, nil
			}
			return join.Record{}, join.ErrNotMember
		},
		Answered: func() map[string]time.Time {
			return map[string]time.Time{"1": began.Add(time.Millisecond), "2": began, "": began.Add(time.Hour)}
		},
	})
	for node, want := range map[string]bool{
		"busy": true, "silent": false, "unheard": false, "unknown": false, "silent agent": false,
		"agent": true, // it has not connected yet
	} {
		if got := s.excused(node, began); got != want {
			t.Errorf("%s: %v, want %v", node, got, want)
		}
	}
}

// TestHasOthers: a server alone waits, also while it changes itself, for another
// member, and for no time when there is one.
func TestHasOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &company{all: []gossip.Member{{}}, changed: make(chan struct{})}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		answer := make(chan bool, 1)
		wait := func() { go func() { answer <- hasOthers(ctx, c) }() }
		wait()
		synctest.Wait()
		c.change()
		synctest.Wait()
		if len(answer) != 0 {
			t.Fatal("a server that is alone does not wait")
		}
		c.change(gossip.Member{State: gossip.Dead})
		synctest.Wait()
		if len(answer) != 1 || !<-answer {
			t.Fatal("another member was not noticed")
		}
		wait()
		synctest.Wait()
		if len(answer) != 1 || !<-answer {
			t.Fatal("another member that is there already was not noticed")
		}
		c.all = c.all[:1]
		wait()
		synctest.Wait()
		cancel()
		if <-answer {
			t.Error("it found another member when its context had ended")
		}
	})
}
