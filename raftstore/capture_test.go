package raftstore_test

import (
	"fmt"
	"testing"

	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// TestMultiCapture: a capture, taken on any member, holds what was acknowledged
// before it and does not change.
func TestMultiCapture(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, nil)
	for i := range 30 {
		rev := mustPut(t, c.Leader(), fmt.Sprint("/k/", i), "x").Revision
		if i%10 != 9 {
			continue
		}
		snap, err := c.Follower().Capture(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		mustPut(t, c.Leader(), fmt.Sprint("/k/", i), "changed")
		keys := map[string]string{}
		err = snap.Changes(func(ch mvcc.Change) error {
			keys[ch.KV.Key] = string(ch.KV.Value)
			return nil
		})
		if err != nil || snap.Header().Digest.Revision < rev || keys[fmt.Sprint("/k/", i)] != "x" {
			t.Errorf("after %d writes: revision %d of %d, %v, %v", i+1, snap.Header().Digest.Revision, rev, keys, err)
		}
	}
}
