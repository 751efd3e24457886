package raftstore_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
	"github.com/clusterd/clusterd/raftstore/wire"
)

// intruder speaks the store's protocol under an id of its own.
type intruder struct {
	c     *raftstoretest.Cluster
	id    string
	epoch raftstore.Epoch
}

// open begins a stream of that kind; an error means that it was refused.
func (i intruder) open(ctx context.Context, to string, kind byte) (net.Conn, error) {
	conn, err := i.c.DialAs(ctx, i.id, to)
	if err != nil {
		return nil, err
	}
	greeting := binary.LittleEndian.AppendUint64([]byte{kind, 2}, i.epoch.Number)
	greeting = binary.LittleEndian.AppendUint64(greeting, i.epoch.ID)
	_ = conn.SetDeadline(time.Now().Add(raftstoretest.Timeout))
	var answer [1]byte
	if _, err := conn.Write(greeting); err == nil {
		_, err = io.ReadFull(conn, answer[:])
		if err == nil && answer[0] == 1 {
			return conn, nil
		}
	}
	_ = conn.Close()
	return nil, errors.New("refused")
}

// Dial, Accept, Close and Addr make it a raft.StreamLayer that only dials.
func (i intruder) Dial(to raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return i.open(ctx, string(to), 'R')
}
func (i intruder) Accept() (net.Conn, error) { return nil, net.ErrClosed }
func (i intruder) Close() error              { return nil }
func (i intruder) Addr() net.Addr            { return &net.TCPAddr{} }

// ask makes a call, its kind and body, and returns the answer's kind.
func ask(t *testing.T, conn net.Conn, call []byte) byte {
	t.Helper()
	kind, err := tryAsk(conn, call)
	if err != nil {
		t.Fatal(err)
	}
	return kind
}

// tryAsk is ask of a member that may end before it answers.
func tryAsk(conn net.Conn, call []byte) (byte, error) {
	out := binary.LittleEndian.AppendUint32(nil, uint32(len(call)+8))
	out = append(binary.LittleEndian.AppendUint64(append(out, call[0]), 1), call[1:]...)
	if _, err := conn.Write(out); err != nil {
		return 0, err
	}
	head := make([]byte, 4)
	if _, err := io.ReadFull(conn, head); err != nil {
		return 0, err
	}
	answer := make([]byte, binary.LittleEndian.Uint32(head))
	if _, err := io.ReadFull(conn, answer); err != nil || len(answer) == 0 {
		return 0, fmt.Errorf("an answer of %d bytes: %w", len(answer), err)
	}
	return answer[0], nil
}

// TestMultiForgedVerdict: that a member's keyspace is wrong is believed if its leader
// says so, and no other member, a voter or not.
func TestMultiForgedVerdict(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, raftstoretest.Steady)
	mustPut(t, c.Leader(), "/k", "x")
	c.Agree()
	leader, victim := c.LeaderID(), c.Follower()
	digest := victim.Status().Keyspace
	verdict := binary.LittleEndian.AppendUint64([]byte{8}, digest.Index)
	verdict = binary.LittleEndian.AppendUint64(verdict, digest.Hash+1)
	say := func(from, to string) (byte, error) {
		conn, err := intruder{c, from, victim.Status().Epoch}.open(t.Context(), to, 'C')
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		return tryAsk(conn, verdict)
	}
	for _, from := range c.IDs() {
		for _, to := range c.IDs() {
			if from == leader || from == to {
				continue
			}
			if answer, err := say(from, to); err != nil || answer != 65 {
				t.Errorf("%s answered %s with frame %d, %v", to, from, answer, err)
			}
			if err := c.Store(to).Err(); err != nil {
				t.Fatalf("%s believed %s: %v", to, from, err)
			}
		}
	}
	id := victim.Status().ID
	// It ends by this, maybe before the answer has gone out.
	if answer, err := say(leader, id); err == nil && answer != 67 {
		t.Errorf("%s answered its leader with frame %d", id, answer)
	}
	select {
	case <-victim.Failed():
	case <-time.After(raftstoretest.Timeout):
		t.Fatal("the leader is not believed")
	}
	c.Kill(id)
}

// TestMultiForgedMessages: a node outside the configuration deposes no leader,
// takes no vote and writes nothing, whatever id the messages name; neither
// does one without a vote by raft's messages.
func TestMultiForgedMessages(t *testing.T) {
	c := raftstoretest.New(t, 3, raftstoretest.Steady) // an election would change the term
	leader := c.Leader()
	before := leader.Status()
	for _, id := range []string{"stranger", "spare"} {
		if id == "spare" {
			if err := leader.AddNonvoter(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
		in := intruder{c, id, before.Epoch}
		tr := raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{Stream: in, MaxPool: 1, Timeout: raftstoretest.Timeout})
		t.Cleanup(func() { _ = tr.Close() })
		for _, to := range c.IDs() {
			// It calls itself the leader, and a voter.
			for _, name := range []string{id, before.Leader} {
				header := raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax, ID: []byte(name), Addr: []byte(name)}
				term := before.Term + 100_000
				if err := tr.AppendEntries(raft.ServerID(to), raft.ServerAddress(to), &raft.AppendEntriesRequest{RPCHeader: header, Term: term, Leader: []byte(name)}, &raft.AppendEntriesResponse{}); err == nil {
					t.Errorf("%s took entries from %s", to, id)
				}
				if err := tr.RequestVote(raft.ServerID(to), raft.ServerAddress(to), &raft.RequestVoteRequest{RPCHeader: header, Term: term, Candidate: []byte(name)}, &raft.RequestVoteResponse{}); err == nil {
					t.Errorf("%s answered a request for a vote by %s", to, id)
				}
				if err := tr.TimeoutNow(raft.ServerID(to), raft.ServerAddress(to), &raft.TimeoutNowRequest{RPCHeader: header}, &raft.TimeoutNowResponse{}); err == nil {
					t.Errorf("%s stood for election for %s", to, id)
				}
			}
		}
	}
	// A stranger has no stream of calls. One that is known, and not in the
	// configuration, may ask to be taken in, and for nothing else.
	for _, to := range c.IDs() {
		if conn, err := (intruder{c, "stranger", before.Epoch}).open(t.Context(), to, 'C'); err == nil {
			_ = conn.Close()
			t.Errorf("%s took a stream of calls from a stranger", to)
		}
		conn, err := intruder{c, raftstoretest.Lost, before.Epoch}.open(t.Context(), to, 'C')
		if err != nil {
			t.Fatal(err)
		}
		cmd := mvcc.Command{Type: mvcc.CmdTxn, Txn: mvcc.Txn{Origin: "the president", Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/forged", Value: []byte("x")}}}, ID: mvcc.CommandID{Session: 1, Seq: 1}}
		calls := [][]byte{append([]byte{1}, wire.AppendCommand(nil, &cmd)...)}
		for _, victim := range c.IDs() {
			calls = append(calls, append([]byte{4, raftstore.DemoteOp}, victim...))
		}
		for _, call := range calls {
			if answer := ask(t, conn, call); answer != 65 {
				t.Errorf("%s answered call %d of an outsider with frame %d", to, call[0], answer)
			}
		}
		_ = conn.Close()
	}
	after := leader.Status()
	if after.Term != before.Term || after.Leader != before.Leader {
		t.Errorf("term %d led by %s, before %d led by %s", after.Term, after.Leader, before.Term, before.Leader)
	}
	members, err := leader.Members()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range members {
		if !m.Voter && m.ID != "spare" {
			t.Errorf("%s lost its vote", m.ID)
		}
	}
	if kv, _, err := leader.Get(t.Context(), "/forged", raftstore.ReadOptions{}); err != nil || kv != nil {
		t.Errorf("forged: %v %v", kv, err)
	}
}
