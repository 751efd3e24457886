package raftstore_test

import (
	"fmt"
	"testing"

	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// TestMultiReturnAfterAbsence: raft waits twice as long after each failed
// replication call, so the number of such calls during an absence is what a
// member that returns pays for. A member that had been away for half a minute
// used to be caught up 7 s after its return.
func TestMultiReturnAfterAbsence(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, raftstoretest.Steady)
	mustPut(t, c.Leader(), "/a", "0")
	var away string
	leader := c.LeaderID()
	for _, id := range c.IDs() {
		if id != leader {
			away = id
		}
	}
	before := c.Leader().Absences()
	c.Isolate(away)
	for i := range 200 {
		mustPut(t, c.Leader(), "/a", fmt.Sprint(i))
	}
	c.Wait("the absence to be noticed", func() bool { return c.Store(leader).Absences() > before })
	for i := range 200 {
		mustPut(t, c.Leader(), "/a", fmt.Sprint(i))
	}
	if c.LeaderID() == leader {
		if n := c.Leader().Absences() - before; n != 1 {
			t.Errorf("replication to an absent member failed %d times, want 1", n)
		}
	}
	c.Rejoin(away)
	c.Agree()
}
