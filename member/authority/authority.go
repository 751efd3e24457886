// Package authority exchanges the cluster's certificate authority while the
// cluster works. What is to be done next is decided by Decide, a function of
// values; the state lies in the store, and holds certificates and no key.
//
//	stable ── Begin ──▶ distribute ── all have it ──▶ reissue ── all have it, and
//	(old)               (old, new)                    (new, old)  the grace is over
//	                     old signs                     new signs        │
//	   ▲                                                                │
//	   └────────────────────────────── stable (new) ◀───────────────────┘
//
// A member has a state when it trusts the authorities that it names, holds
// their keys if it is a server, and shows a certificate of the first of them.
// Each step waits until every member has the one before. So each may be down,
// or be killed, or lead or not, at any moment: no member is asked to trust an
// authority that it does not know. In between all trust both.
package authority

import (
	"slices"
	"time"

	"github.com/clusterd/clusterd/member/pki"
)

// Phase is how far an exchange is.
type Phase string

const (
	// Stable: there is one authority.
	Stable Phase = "stable"
	// Distribute: the new authority is made known. It signs nothing yet.
	Distribute Phase = "distribute"
	// Reissue: the new authority signs, and the old one is still trusted. The API
	// shows certificates of the old one until the end: people's kubeconfigs know
	// no other.
	Reissue Phase = "reissue"
)

// State is the cluster's word on its authorities.
type State struct {
	// Number grows with each change.
	Number uint64 `json:"number"`
	Phase  Phase  `json:"phase"`
	// Authorities are certificates in PEM, the one that signs first.
	Authorities [][]byte `json:"authorities"`
	// Maker is the id of the server that made the new authority, and alone holds
	// its key when Distribute begins.
	Maker string    `json:"maker,omitempty"`
	Since time.Time `json:"since"`          // when the phase began
	Began time.Time `json:"began,omitzero"` // when the exchange did
	// Grace is how long Reissue lasts at least, so that people can get themselves
	// new kubeconfigs; Finish: until all members are ready, and no longer. In
	// Stable, Finish says that the exchange ended so.
	Grace  time.Duration `json:"grace,omitempty"`
	Finish bool          `json:"finish,omitempty"`
}

// Trust is the state in a form to verify with. It holds no keys.
func (s State) Trust() (*pki.Trust, error) {
	return pki.ParseTrust(s.Number, slices.Concat(s.Authorities...), nil)
}

// Member is a member of the cluster's records and what it has done.
type Member struct {
	ID, Name string
	Server   bool
	// Arrived: it has been seen since it joined.
	Arrived bool
	Joined  time.Time
	// Has is the number of the last state that it has.
	Has uint64
}

// arrivalTimeout is how long a member is waited for that has a record and was
// never seen: machines that broke off while they joined have one, too.
const arrivalTimeout = 5 * time.Minute

// absenceTimeout is how long a step that was asked for waits for agents. They
// trust the new authority by then, and get a new certificate when they come.
const absenceTimeout = time.Minute

// settle is how long an exchange lasts at least: pods and aggregated APIs hear
// of the new authority when it begins, and it is not known when they have heard.
const settle = 30 * time.Second

// Waiting are the members that do not have the state yet and are waited for.
func (s State) Waiting(members []Member, now time.Time) []Member {
	var waiting []Member
	for _, m := range members {
		gone := !m.Arrived && now.Sub(m.Joined) > arrivalTimeout
		spared := s.Phase == Reissue && s.Finish && !m.Server && now.Sub(s.Since) > absenceTimeout
		if m.Has < s.Number && !gone && !spared {
			waiting = append(waiting, m)
		}
	}
	return waiting
}

// Lost reports whether no member is left that might hold the new authority's key: the
// server that made it was removed before another one had it. Nothing was signed
// with it, so another is made in its place.
func (s State) Lost(members []Member) bool {
	return s.Phase == Distribute && !slices.ContainsFunc(members, func(m Member) bool {
		return m.Server && (m.ID == s.Maker || m.Has >= s.Number)
	})
}

// Next is the state that follows, if it is time for it.
func (s State) Next(members []Member, now time.Time) (State, bool) {
	if s.Phase == Stable || len(s.Authorities) != 2 || len(s.Waiting(members, now)) > 0 {
		return s, false
	}
	next := State{Number: s.Number + 1, Since: now.UTC(), Began: s.Began, Grace: s.Grace, Finish: s.Finish, Maker: s.Maker}
	switch {
	case s.Phase == Distribute:
		next.Phase, next.Authorities = Reissue, [][]byte{s.Authorities[1], s.Authorities[0]}
	case !s.Finish && now.Sub(s.Since) < s.Grace, now.Sub(s.Began) < settle:
		return s, false
	default:
		next = State{Number: s.Number + 1, Phase: Stable, Since: now.UTC(), Authorities: s.Authorities[:1], Finish: s.Finish}
	}
	return next, true
}

// begin is the state with which an exchange begins, or begins again with another
// authority because the first one's key is lost.
func (s State) begin(signer, successor []byte, maker string, grace time.Duration, now time.Time) (State, error) {
	switch s.Phase {
	case Distribute:
		signer, grace = s.Authorities[0], s.Grace
	case Reissue:
		return s, ErrUnderWay
	default:
		if s.Number > 0 { // the asking member may not know it yet
			signer = s.Authorities[0]
		}
	}
	return State{
		Number: s.Number + 1, Phase: Distribute, Authorities: [][]byte{signer, successor},
		Maker: maker, Since: now.UTC(), Began: now.UTC(), Grace: grace, Finish: s.Finish && s.Phase == Distribute,
	}, nil
}
