package election

import (
	"encoding/binary"

	"github.com/clusterd/clusterd/raftstore/peer"
)

// voterState is what a voter says of itself.
type voterState struct {
	id                        string
	leaderless                bool // it does not lead, and has no leader
	candidate                 bool // it is asking for votes in raft's own time
	term, lastTerm, lastIndex uint64
}

// betterThan orders the voters: the one with the newest log, which all others
// may vote for, and of several such the one with the highest ID.
func (a *voterState) betterThan(b *voterState) bool {
	return a.newerThan(b) || !b.newerThan(a) && a.id > b.id
}

// newerThan reports whether a would refuse b its vote.
func (a *voterState) newerThan(b *voterState) bool {
	if a.lastTerm != b.lastTerm {
		return a.lastTerm > b.lastTerm
	}
	return a.lastIndex > b.lastIndex
}

// append is the form in which it is sent, see parseVoterState.
func (a *voterState) append(b []byte) []byte {
	switch {
	case a.leaderless && a.candidate:
		b = append(b, 2)
	case a.leaderless:
		b = append(b, 1)
	default:
		b = append(b, 0)
	}
	for _, n := range []uint64{a.term, a.lastTerm, a.lastIndex} {
		b = binary.LittleEndian.AppendUint64(b, n)
	}
	return b
}

// voterStateOf is what a voter has answered, nil if it has not.
func voterStateOf(a *peer.Answer) *voterState {
	if a.Err != nil || a.Frame.Kind != peer.KindVoterState {
		return nil
	}
	return parseVoterState(a.ID, a.Frame.Body)
}

// parseVoterState returns nil for what is not one.
func parseVoterState(id string, b []byte) *voterState {
	if len(b) != 25 {
		return nil
	}
	n := func(i int) uint64 { return binary.LittleEndian.Uint64(b[1+8*i:]) }
	return &voterState{id: id, leaderless: b[0] == 1 || b[0] == 2, candidate: b[0] == 2, term: n(0), lastTerm: n(1), lastIndex: n(2)}
}
