package raftstore_test

import (
	"encoding/binary"
	"testing"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
	"github.com/clusterd/clusterd/raftstore/wire"
)

// TestMultiOriginNamesTheMember: the history says of each change which member handed it to the
// leader, as that one's key has proved, and not as the member or a user says.
func TestMultiOriginNamesTheMember(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, raftstoretest.Steady)
	leader, follower := c.Leader(), c.Follower()
	lead, follow := c.LeaderID(), follower.Status().ID
	third := ""
	for _, id := range c.IDs() {
		if id != lead && id != follow {
			third = id
		}
	}
	put := func(s *raftstore.Store, key, origin string) {
		t.Helper()
		res, err := s.Txn(t.Context(), mvcc.Txn{Origin: origin, Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: key, Value: []byte("v")}}})
		if err != nil || !res.Succeeded {
			t.Fatal(res, err)
		}
	}
	put(leader, "/own", "alice via kubectl")
	put(leader, "/own/forged", "alice [from "+third+"]")
	put(follower, "/forwarded", "alice via kubectl")
	put(follower, "/forwarded/forged", "alice [from "+lead+"] [from "+third+"]")
	put(follower, "/forwarded/unnamed", "")

	// A member whose words nobody has looked at: it speaks the protocol itself.
	conn, err := intruder{c, follow, leader.Status().Epoch}.open(t.Context(), lead, 'C')
	if err != nil {
		t.Fatal(err)
	}
	basis := leader.Status().Keyspace.Index
	own, _, err := leader.Get(t.Context(), "/own", raftstore.ReadOptions{})
	if err != nil || own == nil {
		t.Fatal(own, err)
	}
	for i, cmd := range []mvcc.Command{
		{Type: mvcc.CmdTxn, Txn: mvcc.Txn{Origin: "admin via kubectl [from " + third + "]", Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/raw", Value: []byte("v")}}}},
		{Type: mvcc.CmdDelete, Delete: mvcc.Deletion{Origin: "[from " + third + "]", Keys: []mvcc.Compare{{Key: "/own", ModRevision: own.ModRevision}}}},
	} {
		cmd.ID, cmd.Basis = mvcc.CommandID{Session: 7, Seq: uint64(i + 1)}, basis
		raw := wire.AppendCommand(nil, &cmd)
		frame := binary.LittleEndian.AppendUint32(nil, uint32(len(raw)+9))
		frame = binary.LittleEndian.AppendUint64(append(frame, 1), uint64(i+1))
		if _, err := conn.Write(append(frame, raw...)); err != nil {
			t.Fatal(err)
		}
	}
	c.Wait("what was submitted to be applied", func() bool {
		made, _, err := leader.Get(t.Context(), "/raw", raftstore.ReadOptions{})
		gone, _, errGone := leader.Get(t.Context(), "/own", raftstore.ReadOptions{})
		return err == nil && errGone == nil && made != nil && gone == nil
	})
	for _, want := range []struct{ key, who, from string }{
		{"/own/forged", "alice", ""},
		{"/forwarded", "alice via kubectl", follow},
		{"/forwarded/forged", "alice", follow},
		{"/forwarded/unnamed", "", follow},
		{"/raw", "admin via kubectl", follow},
		{"/own", "", follow}, // its deletion
	} {
		for _, s := range []*raftstore.Store{leader, follower} {
			history, err := s.History(t.Context(), want.key, 0, raftstore.ReadOptions{})
			if err != nil || len(history.Changes) == 0 {
				t.Fatal(want.key, history, err)
			}
			last := history.Changes[len(history.Changes)-1]
			if who, from := mvcc.SplitOrigin(last.Origin); who != want.who || from != want.from {
				t.Errorf("%s on %s: %q, want by %q from %q", want.key, s.Status().ID, last.Origin, want.who, want.from)
			}
		}
	}
	// Whoever writes through several members is one writer.
	for _, w := range leader.Top().Writers {
		if _, from := mvcc.SplitOrigin(w.Origin); from != "" {
			t.Errorf("a writer is called %q", w.Origin)
		}
	}
	_ = conn.Close()
	c.Agree()
}
