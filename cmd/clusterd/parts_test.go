package main

import (
	"net/http"
	"slices"
	"testing"
	"time"
)

// TestServerParts: each part is named; the agent holds up readiness while it is
// built and no longer, the leader's loops fail it when they stay away.
func TestServerParts(t *testing.T) {
	c := &serverParts{began: time.Now()}
	failing := func() []string {
		var names []string
		for _, check := range c.readyChecks() {
			if check.Check(&http.Request{}) != nil {
				names = append(names, check.Name())
			}
		}
		return names
	}
	agent := []string{"kubelet", "container-runtime", "kube-proxy", "pod-network", "csi"}
	if got := failing(); !slices.Equal(got, append([]string{"apiserver"}, agent...)) {
		t.Errorf("at the start: %q", got)
	}
	c.serves.Store(true)
	if got := failing(); !slices.Equal(got, agent) {
		t.Errorf("with an API: %q", got)
	}
	if err := c.checkAgent(c.began.Add(partsLimit)); err != nil {
		t.Errorf("an agent that takes long: %v", err)
	}
	c.agent.Store(true)
	since := time.Now()
	c.leading(&since)
	if got := failing(); len(got) > 0 {
		t.Errorf("a new leader: %q", got)
	}
	late := since.Add(partsLimit)
	if c.checkLoops(late) == nil {
		t.Error("a leader without loops is ready")
	}
	c.loops.Store(true)
	if err := c.checkLoops(late); err != nil {
		t.Errorf("with loops: %v", err)
	}
	c.loops.Store(false)
	c.leading(nil)
	if err := c.checkLoops(late); err != nil {
		t.Errorf("it does not lead any more: %v", err)
	}
}
