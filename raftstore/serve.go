package raftstore

import (
	"context"
	"fmt"
	"net"
	"sync"

	"github.com/clusterd/clusterd/raftstore/wire"
)

// maxServed bounds the calls of one stream that are worked on at a time,
// submitted commands apart, which take no goroutine.
const maxServed = 64

// serveCalls answers another member's calls until the stream ends.
func (s *Store) serveCalls(conn net.Conn) {
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	w := newFrameWriter(conn)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer w.close()
	wg.Add(1)
	go func() {
		defer wg.Done()
		w.run()
	}()
	slots := make(chan struct{}, maxServed)
	err := readFrames(conn, func(f frame) error {
		if !s.mayCall(conn, f) {
			w.send(frame{kind: frameVerdict, call: f.call, body: []byte{byte(refused)}})
			return nil
		}
		switch f.kind {
		case frameSubmit:
			s.serveSubmit(w, f)
			return nil
		case frameTerm, frameProgress:
			if f.kind == frameTerm && !s.votes() || s.gate.shut.Load() {
				w.send(frame{kind: frameVerdict, call: f.call, body: []byte{byte(refused)}})
				return nil
			}
			n := s.keyspace().Index()
			if f.kind == frameTerm {
				n = s.raft().CurrentTerm()
			}
			w.send(frame{kind: frameNumber, call: f.call, body: numberBody(n)})
			return nil
		case frameRoom:
			w.send(frame{kind: frameNumber, call: f.call, body: numberBody(uint64(max(s.disk.room(), 0)))})
			return nil
		case frameDiffers:
			s.serveDiffers(f.body)
			w.send(frame{kind: frameDone, call: f.call})
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
			w.send(s.answer(ctx, f))
		}()
		return nil
	})
	s.cfg.Logger.Debug("stream of calls ended", "err", err)
	cancel()
}

func (s *Store) serveSubmit(w *frameWriter, f frame) {
	say := func(v verdict) {
		w.send(frame{kind: frameVerdict, call: f.call, body: []byte{byte(v)}})
	}
	if err := wire.CheckCommand(f.body); err != nil {
		s.cfg.Logger.Warn("member submitted a malformed command", "err", err)
		say(notDecoded)
		return
	}
	if !s.leads() {
		say(refused)
		return
	}
	if s.disk.short.Load() && !s.essential(f.body) {
		say(diskFull)
		return
	}
	s.proposals.add(proposal{raw: f.body, failed: say})
}

// answer does one call that may block.
func (s *Store) answer(ctx context.Context, f frame) frame {
	switch f.kind {
	case frameReadIndex:
		index, err := s.leaderReadIndex(ctx)
		if err != nil {
			return frame{kind: frameVerdict, call: f.call, body: []byte{byte(refused)}}
		}
		return frame{kind: frameNumber, call: f.call, body: numberBody(index)}
	case frameHash:
		return s.serveHash(ctx, f)
	case frameMember:
		return frame{kind: frameDone, call: f.call, body: s.serveMember(ctx, f.body)}
	case frameLeaderless:
		if s.gate.shut.Load() {
			return frame{kind: frameVerdict, call: f.call, body: []byte{byte(refused)}} // it has no vote to give
		}
		return frame{kind: frameStanding, call: f.call, body: s.answerLeaderless(ctx, f.body)}
	default:
		return frame{kind: frameDone, call: f.call, body: append([]byte{byte(refused)}, fmt.Sprintf("unknown call %d", f.kind)...)}
	}
}
