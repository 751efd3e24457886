// Package gossipkey rotates the gossip encryption key online. State.Next and Due, functions
// of values, decide the next step; the state is stored in the replicated store, and names
// keys without holding any.
//
//	stable ── begin ──▶ distribute ── all have it ──▶ use ── all have it ──▶ stable
//	[old]               [old, new]                    [new, old]             [new]
//
// The first key of a ring encrypts, all of it decrypt. A server has a state when
// its ring is what the state names. It takes keys that it lacks from other servers,
// over connections that prove keys of the records (member/join). A step waits for
// all servers, but not long: a server that is away takes no part in gossip, and asks
// for the keys when it comes back.
package gossipkey

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

// Size is how many bytes a key has: AES-256.
const Size = 32

// New makes a key.
func New() []byte {
	key := make([]byte, Size)
	rand.Read(key) // never fails
	return key
}

// ID names a key. It follows from the key and tells nothing of it.
func ID(key []byte) string {
	sum := sha256.Sum256(append([]byte("clusterd gossip key "), key...))
	return hex.EncodeToString(sum[:8])
}

// Ring is what a server holds: the key that encrypts first.
type Ring struct {
	// Number is that of the state that it is from; 0: the cluster's first key.
	Number uint64   `json:"number"`
	Keys   [][]byte `json:"keys"`
}

// Find returns the key with that id, or nil.
func (r Ring) Find(id string) []byte {
	for _, key := range r.Keys {
		if ID(key) == id {
			return key
		}
	}
	return nil
}

// Names reports whether the ring has the keys with these ids, in this order.
func (r Ring) Names(ids []string) bool {
	return slices.EqualFunc(r.Keys, ids, func(key []byte, id string) bool { return ID(key) == id })
}

// Validate checks a ring that came from outside.
func (r Ring) Validate() error {
	if len(r.Keys) == 0 || len(r.Keys) > 2 {
		return fmt.Errorf("a ring of %d gossip keys: 1 or 2 are right", len(r.Keys))
	}
	for _, key := range r.Keys {
		if len(key) != Size {
			return fmt.Errorf("the gossip key has %d bytes, not %d", len(key), Size)
		}
	}
	return nil
}

// Encode is the ring as it lies on disk, beside the key that encrypts: in a file of
// its own, which is what servers had before keys were changed. nil: that says all.
func (r Ring) Encode() (first, rest []byte, err error) {
	if r.Number == 0 && len(r.Keys) == 1 {
		return r.Keys[0], nil, nil
	}
	rest, err = json.Marshal(Ring{Number: r.Number, Keys: r.Keys[1:]})
	return r.Keys[0], rest, err
}

// Parse reads what Encode has made. rest may be nil.
func Parse(first, rest []byte) (Ring, error) {
	var r Ring
	if rest != nil {
		if err := json.Unmarshal(rest, &r); err != nil {
			return r, err
		}
	}
	r.Keys = append([][]byte{first}, r.Keys...)
	return r, r.Validate()
}

// Phase is how far a change of the key is.
type Phase string

const (
	// Stable: there is one key.
	Stable Phase = "stable"
	// Distribute: servers are given the new key. It encrypts nothing yet.
	Distribute Phase = "distribute"
	// Use: the new key encrypts, the old one still decrypts.
	Use Phase = "use"
)

// State is the replicated state of the gossip keys and their rotation.
type State struct {
	// Number grows with each step, Generation with each key that came into use.
	Number     uint64 `json:"number"`
	Generation uint64 `json:"generation"`
	Phase      Phase  `json:"phase"`
	// Keys are the ids of the keys of a ring, the one that encrypts first.
	Keys  []string  `json:"keys"`
	Since time.Time `json:"since"` // when the phase began
	// Used is when the key that encrypts began to.
	Used time.Time `json:"used"`
	// Answers is the revision of the last wish for another key (join.GossipKeyRotation)
	// that had been made when this change began.
	Answers int64 `json:"answers"`
}

// Server is a server of the records, and which state it has.
type Server struct {
	ID, Name string
	// Arrived: it has been seen since it joined.
	Arrived bool
	// Knows: it has ever said which state it has. Older versions of clusterd do not.
	Knows bool
	Has   uint64
}

// stepTimeout is how long a step waits for servers that do not have the state, when a
// majority has it.
const stepTimeout = 10 * time.Second

// Lagging are the servers that do not have the state yet. One that never arrived
// gets the keys when it comes.
func (s State) Lagging(servers []Server) []Server {
	var lagging []Server
	for _, m := range servers {
		if m.Arrived && (!m.Knows || m.Has < s.Number) {
			lagging = append(lagging, m)
		}
	}
	return lagging
}

// Next is the state that follows, if it is time for it. A majority holds a key
// before it encrypts, so that it is as safe as the store.
func (s State) Next(servers []Server, now time.Time) (State, bool) {
	lagging, arrived := len(s.Lagging(servers)), 0
	for _, m := range servers {
		if m.Arrived {
			arrived++
		}
	}
	if s.Phase == Stable || len(s.Keys) != 2 || arrived == 0 ||
		lagging > 0 && (now.Sub(s.Since) < stepTimeout || arrived-lagging <= arrived/2) {
		return s, false
	}
	next := s
	next.Number++
	next.Since = now.UTC()
	switch s.Phase {
	case Distribute:
		next.Phase, next.Keys = Use, []string{s.Keys[1], s.Keys[0]}
		next.Generation++
		next.Used = next.Since
	default:
		next.Phase, next.Keys = Stable, s.Keys[:1]
	}
	return next, true
}

// Lost reports whether the new key is to be given up for another: its maker
// has ended before another server had it.
func (s State) Lost(servers []Server, now time.Time) bool {
	return s.Phase == Distribute && now.Sub(s.Since) >= stepTimeout &&
		!slices.ContainsFunc(servers, func(m Server) bool { return m.Has >= s.Number })
}

// Due says why another key is to be made now; empty: it is not. wished is the
// revision of the last wish for one, every how long a key is used at most (0: for
// ever), began when the cluster did.
func (s State) Due(wished int64, every time.Duration, began, now time.Time) string {
	used := s.Used
	if used.IsZero() {
		used = began
	}
	switch {
	case s.Phase != Stable:
		return ""
	case wished > s.Answers:
		return "it was asked for"
	case every > 0 && now.Sub(used) >= every:
		return "the key is old"
	}
	return ""
}

// Begin is the state with which a change to the key with that id begins. first is
// the id of the cluster's key as long as the store names none.
func (s State) Begin(first, id string, wished int64, now time.Time) State {
	old := first
	if len(s.Keys) > 0 {
		old = s.Keys[0]
	}
	return State{Number: s.Number + 1, Generation: s.Generation, Phase: Distribute, Keys: []string{old, id}, Since: now.UTC(), Used: s.Used, Answers: wished}
}
