package main

import (
	"slices"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
)

// TestRemovedServers: agents receive recently removed servers only.
func TestRemovedServers(t *testing.T) {
	var r rights
	if got := r.removedServers(); len(got) != 0 {
		t.Errorf("before any was removed: %v", got)
	}
	now := time.Now()
	r.note("n3", join.Removal{Removed: now, Role: pki.Server})
	r.note("n2", join.Removal{Removed: now})
	r.note("n2", join.Removal{Removed: now}) // reported again
	r.note("a1", join.Removal{Removed: now, Role: pki.Agent})
	r.note("n4", join.Removal{Removed: now.Add(-2 * pki.MaxServerLifetime), Role: pki.Server})
	if got := r.removedServers(); !slices.Equal(got, []string{"n2", "n3"}) {
		t.Errorf("agents receive %v", got)
	}
}
