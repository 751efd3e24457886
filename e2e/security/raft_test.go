package security

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/peer"
	"github.com/clusterd/clusterd/raftstore/wire"
)

// The greeting of a stream between members: kind, version, epoch (see raftstore/peer).
const (
	greetingVersion = 2
	epochSize       = 16
	greetingTaken   = 1
	greetingEpoch   = 2
)

// greet begins a stream and returns the answer: taken, or the epoch to greet with.
func greet(c net.Conn, kind byte, epoch []byte) (taken bool, other []byte, err error) {
	_ = c.SetDeadline(time.Now().Add(opens))
	if _, err := c.Write(append([]byte{kind, greetingVersion}, epoch...)); err != nil {
		return false, nil, err
	}
	var b [1]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return false, nil, err
	}
	switch b[0] {
	case greetingTaken:
		return true, nil, nil
	case greetingEpoch:
		other = make([]byte, epochSize)
		_, err = io.ReadFull(c, other)
		return false, other, err
	}
	return false, nil, fmt.Errorf("answer %d", b[0])
}

// epoch is that of the store, as a server tells it to a member.
func (s *suite) epoch() []byte {
	s.t.Helper()
	var epoch []byte
	s.eventually("the store's epoch is known", func(ctx context.Context) error {
		c, err := s.stolen("n2").Dial(ctx, s.addr("n1"), "", transport.Raft)
		if err != nil {
			return err
		}
		defer c.Close()
		_, epoch, err = greet(c, peer.CallStream, make([]byte, epochSize))
		if err == nil && epoch == nil {
			err = errors.New("it took epoch 0")
		}
		return err
	})
	return epoch
}

// stream opens a stream of a kind with a stolen identity.
func (s *suite) stream(ctx context.Context, id transport.Identity, to string, kind byte, epoch []byte) (net.Conn, error) {
	c, err := id.Dial(ctx, s.addr(to), "", transport.Raft)
	if err != nil {
		return nil, err
	}
	taken, _, err := greet(c, kind, epoch)
	if err == nil && !taken {
		err = errors.New("it lives in another epoch")
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	_ = c.SetDeadline(time.Time{})
	return c, nil
}

// stolenLayer is raft's connections, made with a stolen identity.
type stolenLayer struct {
	net.Listener // which is never dialled
	dial         func(context.Context) (net.Conn, error)
}

func (l stolenLayer) Dial(_ raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return l.dial(ctx)
}

// raftCalls are raft's messages with a term far ahead, from whoever has a key.
var raftCalls = []struct {
	name string
	call func(t *raft.NetworkTransport, to raft.ServerAddress, head raft.RPCHeader, term uint64) error
}{
	{"AppendEntries", func(t *raft.NetworkTransport, to raft.ServerAddress, head raft.RPCHeader, term uint64) error {
		return t.AppendEntries(raft.ServerID(to), to, &raft.AppendEntriesRequest{RPCHeader: head, Term: term + 100_000, Leader: head.ID}, new(raft.AppendEntriesResponse))
	}},
	{"AppendEntries with an entry", func(t *raft.NetworkTransport, to raft.ServerAddress, head raft.RPCHeader, term uint64) error {
		return t.AppendEntries(raft.ServerID(to), to, &raft.AppendEntriesRequest{RPCHeader: head, Term: term, Leader: head.ID, PrevLogEntry: 1, PrevLogTerm: 1,
			Entries: []*raft.Log{{Index: 2, Term: term, Type: raft.LogNoop}}, LeaderCommitIndex: 1 << 40}, new(raft.AppendEntriesResponse))
	}},
	{"RequestVote", func(t *raft.NetworkTransport, to raft.ServerAddress, head raft.RPCHeader, term uint64) error {
		return t.RequestVote(raft.ServerID(to), to, &raft.RequestVoteRequest{RPCHeader: head, Term: term + 100_000, Candidate: head.ID, LastLogIndex: 1 << 40, LastLogTerm: term + 1, LeadershipTransfer: true}, new(raft.RequestVoteResponse))
	}},
	{"RequestPreVote", func(t *raft.NetworkTransport, to raft.ServerAddress, head raft.RPCHeader, term uint64) error {
		return t.RequestPreVote(raft.ServerID(to), to, &raft.RequestPreVoteRequest{RPCHeader: head, Term: term + 100_000, LastLogIndex: 1 << 40, LastLogTerm: term + 1}, new(raft.RequestPreVoteResponse))
	}},
	{"InstallSnapshot", func(t *raft.NetworkTransport, to raft.ServerAddress, head raft.RPCHeader, term uint64) error {
		return t.InstallSnapshot(raft.ServerID(to), to, &raft.InstallSnapshotRequest{RPCHeader: head, SnapshotVersion: 1, Term: term + 100_000, Leader: head.ID, LastLogIndex: 1 << 40, LastLogTerm: term + 1, Size: 4},
			new(raft.InstallSnapshotResponse), bytes.NewReader([]byte("none")))
	}},
	{"TimeoutNow", func(t *raft.NetworkTransport, to raft.ServerAddress, head raft.RPCHeader, _ uint64) error {
		return t.TimeoutNow(raft.ServerID(to), to, &raft.TimeoutNowRequest{RPCHeader: head}, new(raft.TimeoutNowResponse))
	}},
}

// withRaft makes one call by raft's own transport.
func (s *suite) withRaft(id transport.Identity, to string, epoch []byte, call func(t *raft.NetworkTransport, to raft.ServerAddress, head raft.RPCHeader, term uint64) error) (said error, err error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	layer := stolenLayer{Listener: ln, dial: func(ctx context.Context) (net.Conn, error) {
		return s.stream(ctx, id, to, peer.RaftStream, epoch)
	}}
	t := raft.NewNetworkTransport(layer, 1, opens, io.Discard)
	defer t.Close()
	_, term := s.leads()
	own := pki.Fingerprint(id.Certificate().Leaf.PublicKey)
	target := pki.Fingerprint(s.stolen(to).Certificate().Leaf.PublicKey)
	head := raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax, ID: []byte(own), Addr: []byte(own)}
	return call(t, raft.ServerAddress(target), head, term), nil
}

// raftAttacks sends raft's messages to servers, and looks whether the leader and the
// term are as before. A voter asks with the one message that changes nothing.
func raftAttacks(first, second string, id, voter transport.Identity) []attack {
	var out []attack
	for _, c := range raftCalls {
		for _, to := range []string{first, second} {
			a := attack{name: fmt.Sprintf("%s to %s with a term of the future", c.name, to), try: func(s *suite) verdict {
				epoch := s.epoch()
				leader, term := s.leads()
				said, err := s.withRaft(id, to, epoch, c.call)
				if err != nil {
					return broken(err)
				}
				if said == nil {
					return open("it was answered")
				}
				if l, now := s.leads(); l != leader || now != term {
					return open("%s led in term %d, now %s leads in term %d", leader, term, l, now)
				}
				return shut("%v", said)
			}}
			if c.name == "RequestPreVote" && to == first {
				a.control = func(s *suite) error {
					said, err := s.withRaft(voter, to, s.epoch(), c.call)
					return errors.Join(said, err)
				}
			}
			out = append(out, a)
		}
	}
	return out
}

// submitAttack writes to the store past the API, by the call with which servers
// forward theirs to the leader. A voter asks on the same stream how far the leader is.
func submitAttack(id, voter transport.Identity) attack {
	const name = "forged-past-the-api"
	command := wire.AppendCommand(nil, &mvcc.Command{Type: mvcc.CmdTxn, ID: mvcc.CommandID{Session: 1 << 40, Seq: 1},
		Txn: mvcc.Txn{Origin: "forged", Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/registry/core/configmaps/" + ns + "/" + name, Value: []byte("{}")}}}})
	return attack{
		name: "forwards a write to the store",
		try: func(s *suite) verdict {
			leader, _ := s.leads()
			answers, err := s.memberCalls(id, leader, peer.Frame{Kind: peer.KindSubmit, Call: 1, Body: command}, peer.Frame{Kind: peer.KindProgress, Call: 2})
			if answers > 0 {
				return open("%d calls were answered", answers)
			}
			if code, body, err := s.send(s.admin, call{method: http.MethodGet, path: "/api/v1/namespaces/$NS/configmaps/" + name}, false); err != nil || code != http.StatusNotFound {
				return verdict{open: err == nil, said: body, err: err}
			}
			return shut("no call is answered: %v", err)
		},
		control: func(s *suite) error {
			leader, _ := s.leads()
			to := "n1"
			if leader == "n2" { // which dials itself no more than others do
				to = "n3"
			}
			answers, err := s.memberCalls(voter, to, peer.Frame{Kind: peer.KindProgress, Call: 2})
			if answers > 0 {
				err = nil
			}
			return err
		},
	}
}

// memberCalls sends calls of members and counts the answers up to that of the last
// one; verdicts that refuse do not count.
func (s *suite) memberCalls(id transport.Identity, to string, frames ...peer.Frame) (answers int, err error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), opens)
	defer cancel()
	c, err := s.stream(ctx, id, to, peer.CallStream, s.epoch())
	if err != nil {
		return 0, err
	}
	w := peer.NewWriter(c)
	done := make(chan struct{})
	go func() { defer close(done); w.Run() }()
	defer func() { w.Close(); <-done }()
	for _, f := range frames {
		w.Send(f)
	}
	_ = c.SetReadDeadline(time.Now().Add(opens))
	err = peer.ReadFrames(c, func(f peer.Frame) error {
		if f.Kind != peer.KindVerdict {
			answers++
		}
		if f.Call == frames[len(frames)-1].Call {
			return io.EOF
		}
		return nil
	})
	return answers, err
}
