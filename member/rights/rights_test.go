package rights

import (
	"slices"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
)

// TestRemovedServers: agents receive recently removed servers only.
func TestRemovedServers(t *testing.T) {
	var r Rights
	if got := r.RemovedServers(); len(got) != 0 {
		t.Errorf("before any was removed: %v", got)
	}
	now := time.Now()
	r.Note("n3", join.Removal{Removed: now, Role: pki.Server})
	r.Note("n2", join.Removal{Removed: now})
	r.Note("n2", join.Removal{Removed: now}) // reported again
	r.Note("a1", join.Removal{Removed: now, Role: pki.Agent})
	r.Note("n4", join.Removal{Removed: now.Add(-2 * pki.MaxServerLifetime), Role: pki.Server})
	if got := r.RemovedServers(); !slices.Equal(got, []string{"n2", "n3"}) {
		t.Errorf("agents receive %v", got)
	}
}
