package raftstore

import (
	"context"
	"fmt"
	"net"
	"sync"

	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/peer"
	"github.com/clusterd/clusterd/raftstore/wire"
)

// maxServed bounds the calls of one stream that are worked on at a time,
// submitted commands apart, which take no goroutine.
const maxServed = 64

// serveCalls answers another member's calls until the stream ends.
func (s *Store) serveCalls(conn net.Conn) {
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	w := peer.NewWriter(conn)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer w.Close()
	wg.Add(1)
	go func() {
		defer wg.Done()
		w.Run()
	}()
	slots := make(chan struct{}, maxServed)
	err := peer.ReadFrames(conn, func(f peer.Frame) error {
		if !s.mayCall(conn, f) {
			w.Send(peer.Frame{Kind: peer.KindVerdict, Call: f.Call, Body: []byte{byte(refused)}})
			return nil
		}
		switch f.Kind {
		case peer.KindSubmit:
			s.serveSubmit(conn, w, f)
			return nil
		case peer.KindTerm, peer.KindProgress:
			if f.Kind == peer.KindTerm && !s.votes() || s.raftSide.Gate.Shut() {
				w.Send(peer.Frame{Kind: peer.KindVerdict, Call: f.Call, Body: []byte{byte(refused)}})
				return nil
			}
			n := s.keyspace().Index()
			if f.Kind == peer.KindTerm {
				n = s.raft().CurrentTerm()
			}
			w.Send(peer.Frame{Kind: peer.KindNumber, Call: f.Call, Body: peer.NumberBody(n)})
			return nil
		case peer.KindSpeaks:
			if n := s.speaks(); n > 0 {
				w.Send(peer.Frame{Kind: peer.KindNumber, Call: f.Call, Body: peer.NumberBody(n)})
				return nil
			}
		case peer.KindFormats:
			if !s.cfg.older {
				w.Send(peer.Frame{Kind: peer.KindNumber, Call: f.Call, Body: peer.NumberBody(s.formats())})
				return nil
			}
		case peer.KindRoom:
			w.Send(peer.Frame{Kind: peer.KindNumber, Call: f.Call, Body: peer.NumberBody(uint64(max(s.disk.Room(), 0)))})
			return nil
		case peer.KindDiffers:
			if !s.fromLeader(conn) {
				w.Send(peer.Frame{Kind: peer.KindVerdict, Call: f.Call, Body: []byte{byte(refused)}})
				return nil
			}
			s.divergence.Differs(f.Body)
			w.Send(peer.Frame{Kind: peer.KindDone, Call: f.Call})
			return nil
		}
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer func() { <-slots }()
			w.Send(s.answer(ctx, f))
		}()
		return nil
	})
	s.cfg.Logger.Debug("stream of calls ended", "err", err)
	cancel()
}

// serveSubmit takes a command of another member. Who asked for it is that member's word; that it
// was this member is what its key has proved.
func (s *Store) serveSubmit(conn net.Conn, w *peer.Writer, f peer.Frame) {
	say := func(v verdict) {
		w.Send(peer.Frame{Kind: peer.KindVerdict, Call: f.Call, Body: []byte{byte(v)}})
	}
	if err := wire.CheckCommand(f.Body); err != nil {
		s.cfg.Logger.Warn("member submitted a malformed command", "err", err)
		say(notDecoded)
		return
	}
	if !s.leads() {
		say(refused)
		return
	}
	if s.disk.Short() && !s.essential(f.Body) {
		say(diskFull)
		return
	}
	from := ""
	if bound, ok := conn.(peer.BoundConn); ok {
		from = bound.ID
	}
	raw, err := wire.WithOrigin(f.Body, func(who string) string { return mvcc.OriginFrom(who, from) })
	if err != nil { // it was checked above
		say(notDecoded)
		return
	}
	s.enqueue(proposal{raw: raw, failed: say})
}

// answer does one call that may block.
func (s *Store) answer(ctx context.Context, f peer.Frame) peer.Frame {
	switch f.Kind {
	case peer.KindReadIndex:
		index, err := s.leaderReadIndex(ctx)
		if err != nil {
			return peer.Frame{Kind: peer.KindVerdict, Call: f.Call, Body: []byte{byte(refused)}}
		}
		return peer.Frame{Kind: peer.KindNumber, Call: f.Call, Body: peer.NumberBody(index)}
	case peer.KindHash:
		hash, ok := s.divergence.Answer(ctx, f.Body)
		if !ok {
			return peer.Frame{Kind: peer.KindVerdict, Call: f.Call, Body: []byte{byte(refused)}}
		}
		return peer.Frame{Kind: peer.KindNumber, Call: f.Call, Body: peer.NumberBody(hash)}
	case peer.KindMember:
		return peer.Frame{Kind: peer.KindDone, Call: f.Call, Body: s.serveMember(ctx, f.Body)}
	case peer.KindLeaderless:
		if s.raftSide.Gate.Shut() {
			return peer.Frame{Kind: peer.KindVerdict, Call: f.Call, Body: []byte{byte(refused)}} // it has no vote to give
		}
		return peer.Frame{Kind: peer.KindVoterState, Call: f.Call, Body: s.election.Answer(ctx, f.Body)}
	default:
		return peer.Frame{Kind: peer.KindDone, Call: f.Call, Body: append([]byte{byte(refused)}, fmt.Sprintf("unknown call %d", f.Kind)...)}
	}
}
