package raftstore

import (
	"fmt"
	"net"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/peer"
)

// A stream is as good as the member at its other end. Raft trusts what a
// message says about its sender: one entry with a high term deposes a leader. So
// every stream is bound to the id that its peer has proved (Config.PeerID):
//
//	raft's messages   from voters of this member's configuration
//	our own calls     from any member of it; that this member's keyspace is wrong
//	                  from the leader alone
//	both              from the leader that this member follows, and from any node
//	                  who may dial while it follows none
//	a call to be      from one that Config.Known admits, for itself: it lost its
//	taken out or in   store and must go and come back as a new member
//
// The last line is for a member that is behind: those who lead today may have
// joined after the last entry it knows. A member with a live leader, and the
// leader itself, hear no member outside the configuration.

// mayStream says why a peer may not use a stream of that kind now; nil: it may.
func (s *Store) mayStream(kind byte, id string) error {
	leader, _ := s.leader.Current()
	if leader == "" || leader == id {
		return nil
	}
	r := s.raftPtr.Load()
	if r == nil {
		return nil
	}
	cf := r.GetConfiguration()
	if err := cf.Error(); err != nil {
		return err
	}
	servers := cf.Configuration().Servers
	if allowedBy(servers, kind, id) || len(servers) == 0 || kind == peer.CallStream && s.known(id) {
		return nil
	}
	if kind == peer.RaftStream {
		return fmt.Errorf("%s has no vote in this member's configuration", id)
	}
	return fmt.Errorf("%s is not in this member's configuration", id)
}

func (s *Store) known(id string) bool { return s.cfg.Known != nil && s.cfg.Known(id) }

// mayCall says whether the peer of a stream of calls may make this one.
func (s *Store) mayCall(conn net.Conn, f peer.Frame) bool {
	bound, ok := conn.(peer.BoundConn)
	if !ok {
		return true
	}
	leader, _ := s.leader.Current()
	if leader == "" || leader == bound.ID {
		return true
	}
	cf := s.raft().GetConfiguration()
	if cf.Error() != nil {
		return false
	}
	if servers := cf.Configuration().Servers; len(servers) == 0 || allowedBy(servers, peer.CallStream, bound.ID) {
		return true
	}
	if f.Kind != peer.KindMember || len(f.Body) == 0 || string(f.Body[1:]) != bound.ID {
		return false
	}
	op := memberOp(f.Body[0])
	return op == addNonvoter || op == remove
}

// fromLeader says whether the peer of a stream of calls is the leader that this
// member follows.
func (s *Store) fromLeader(conn net.Conn) bool {
	bound, ok := conn.(peer.BoundConn)
	if !ok {
		return true
	}
	leader, _ := s.leader.Current()
	return leader != "" && leader == bound.ID
}

// allowedBy decides by a configuration alone.
func allowedBy(servers []raft.Server, kind byte, id string) bool {
	for _, server := range servers {
		if string(server.ID) == id {
			return kind != peer.RaftStream || server.Suffrage == raft.Voter
		}
	}
	return false
}
