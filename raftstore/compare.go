package raftstore

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/clusterd/clusterd/raftstore/peer"
)

// ErrDiverged is why a store stops whose keyspace differs from what most
// members made of the same log.
var ErrDiverged = errors.New("this member's keyspace differs from the others'")

// hashes remembers the keyspace's hash after each of the latest log entries.
type hashes struct {
	mu   sync.Mutex
	ring [4096]indexHash
}

type indexHash struct{ index, hash uint64 }

func (h *hashes) note(index, hash uint64) {
	h.mu.Lock()
	h.ring[index%uint64(len(h.ring))] = indexHash{index, hash}
	h.mu.Unlock()
}

func (h *hashes) at(index uint64) (hash uint64, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	e := h.ring[index%uint64(len(h.ring))]
	return e.hash, e.index == index && index > 0
}

const (
	// comparePeriod is how often the leader compares, when something has been
	// applied since.
	comparePeriod = time.Second
	// comparePatience is how long a member may take to apply what the leader
	// has applied; a later one is asked the next time.
	comparePatience = 5 * time.Second
)

// compareForever makes the leader ask every member, once a second while there
// are writes, for the hash of its keyspace after one and the same log entry.
// The keyspace keeps its hash up to date with each change, so this costs a few
// bytes a second.
func (s *Store) compareForever() {
	tick := time.NewTicker(comparePeriod)
	defer tick.Stop()
	var compared uint64
	for {
		select {
		case <-tick.C:
		case <-s.ctx.Done():
			return
		}
		if index := s.keyspace().Index(); index != compared && s.IsLeader() && s.compare(index) {
			compared = index
		}
	}
}

// compare reports whether all members answered.
func (s *Store) compare(index uint64) bool {
	ours, ok := s.fsm.hashes.at(index)
	if !ok {
		return false // the latest entry changed nothing, the next one will do
	}
	ms, err := s.Members()
	if err != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(s.ctx, comparePatience)
	defer cancel()
	type answer struct {
		id   string
		hash uint64
		ok   bool
	}
	answers := make(chan answer, len(ms))
	asked := 0
	for _, m := range ms {
		if m.ID == s.cfg.ID {
			continue
		}
		asked++
		call := s.peers.Call(m.ID, peer.KindHash, peer.NumberBody(index), func(f peer.Frame, _ bool, err error) {
			a := answer{id: m.ID}
			if err == nil && f.Kind == peer.KindNumber {
				a.hash, err = peer.BodyNumber(f.Body)
				a.ok = err == nil
			}
			answers <- a
		})
		defer s.peers.Forget(m.ID, call)
	}
	votes := map[uint64]int{ours: 1}
	theirs := map[string]uint64{}
	for range asked {
		select {
		case a := <-answers:
			if a.ok {
				votes[a.hash]++
				theirs[a.id] = a.hash
			}
		case <-ctx.Done():
		}
	}
	s.settle(index, ours, votes, theirs)
	return len(theirs) == asked
}

// settle stops who differs. What most have is taken for right; between two it
// is what the leader has.
func (s *Store) settle(index, ours uint64, votes map[uint64]int, theirs map[string]uint64) {
	right := ours
	for hash, n := range votes {
		if n > votes[right] {
			right = hash
		}
	}
	for id, hash := range theirs {
		if hash != right {
			s.cfg.Logger.Error("a member's keyspace differs, it has to stop", "member", id, "index", index, "has", hashText(hash), "most have", hashText(right))
			s.peers.Call(id, peer.KindDiffers, append(peer.NumberBody(index), peer.NumberBody(right)...), func(peer.Frame, bool, error) {})
		}
	}
	if ours != right {
		s.diverged(index, ours, right)
	}
}

func hashText(h uint64) string { return fmt.Sprintf("%016x", h) }

// serveHash answers KindHash when this member has come that far.
func (s *Store) serveHash(ctx context.Context, f peer.Frame) peer.Frame {
	no := peer.Frame{Kind: peer.KindVerdict, Call: f.Call, Body: []byte{byte(refused)}}
	index, err := peer.BodyNumber(f.Body)
	if err != nil {
		return no
	}
	ctx, cancel := context.WithTimeout(ctx, comparePatience)
	defer cancel()
	if err := s.waitIndex(ctx, index); err != nil {
		return no
	}
	hash, ok := s.fsm.hashes.at(index)
	if !ok {
		return no
	}
	return peer.Frame{Kind: peer.KindNumber, Call: f.Call, Body: peer.NumberBody(hash)}
}

// serveDiffers takes the leader's word that this member differs, if it does.
func (s *Store) serveDiffers(body []byte) {
	if len(body) != 16 {
		return
	}
	index, right := binary.LittleEndian.Uint64(body), binary.LittleEndian.Uint64(body[8:])
	if ours, ok := s.fsm.hashes.at(index); ok && ours != right {
		s.diverged(index, ours, right)
	}
}

func (s *Store) diverged(index, ours, right uint64) {
	s.fail(fmt.Errorf("%w: after log entry %d its hash is %016x, theirs is %016x", ErrDiverged, index, ours, right), true)
}
