package main

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/clusterd/clusterd/gossip"
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
