// Package authority rotates the cluster's certificate authorities (CAs), of one purpose or
// of several at once, without downtime. State.Next decides the next step, from values
// alone; the state is stored in the replicated store, and holds certificates and no key.
//
//	stable ── Begin ──▶ distribute ── all have it ──▶ reissue ── all have it, and
//	(old)               (old, new)                    (new, old)  the overlap is over
//	                     old signs                     new signs        │
//	   ▲                                                                │
//	   └────────────────────────────── stable (new) ◀───────────────────┘
//
// A member has a state when it trusts the authorities that it names, holds
// their keys if it is a server, and presents a certificate of the first of them.
// Each step waits until every member has completed the previous one. So each may be
// down, be killed, lead or not, at any time: no member has to trust a CA that it does not
// know. In between all trust both.
//
// A purpose without a CA of its own gets one in the same way: the servers' CA, which it
// used until then, is the old one of the rotation.
package authority

import (
	"encoding/json"
	"maps"
	"slices"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
)

// Phase is how far a rotation is.
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

// State is the replicated state of the CAs and their rotation.
type State struct {
	// Number grows with each change.
	Number uint64 `json:"number"`
	Phase  Phase  `json:"phase"`
	// Authorities are the servers', certificates in PEM, the one that signs first.
	Authorities [][]byte `json:"-"`
	// Own are those of purposes that have authorities of their own.
	Own map[pki.Purpose][][]byte `json:"-"`
	// Of is what the rotation is of, or was; empty: of Authorities.
	Of []pki.Purpose `json:"of,omitempty"`
	// Split: it gives purposes authorities of their own.
	Split bool `json:"split,omitempty"`
	// Tokens is the number of the last state with which the key of service accounts' tokens
	// is changed, and TokensAlone whether those before verify no more; see TokenKeys.
	Tokens      uint64 `json:"tokens,omitempty"`
	TokensAlone bool   `json:"tokensAlone,omitempty"`
	// Maker is the id of the server that made the new authority, and alone holds
	// its key when Distribute begins.
	Maker string    `json:"maker,omitempty"`
	Since time.Time `json:"since"`          // when the phase began
	Began time.Time `json:"began,omitzero"` // when the rotation did
	// Grace is how long Reissue lasts at least, so that people can get themselves
	// new kubeconfigs; Finish: until all members are ready, and no longer. In
	// Stable, Finish says that the rotation ended so.
	Grace  time.Duration `json:"grace,omitempty"`
	Finish bool          `json:"finish,omitempty"`
}

// Trust is the state in a form to verify with. It holds no keys.
func (s State) Trust() (*pki.Trust, error) {
	word := join.TrustBundle{Number: s.Number, Authorities: slices.Concat(s.Authorities...), Own: map[pki.Purpose][]byte{}}
	for p, list := range s.Own {
		word.Own[p] = slices.Concat(list...)
	}
	return word.Trust()
}

// Is reports whether the rotation is of these purposes, in any order.
func (s State) Is(of []pki.Purpose) bool {
	return slices.Equal(slices.Sorted(slices.Values(of)), slices.Sorted(slices.Values(s.of())))
}

// of is what the rotation is of.
func (s State) of() []pki.Purpose {
	if len(s.Of) == 0 {
		return []pki.Purpose{pki.ForPeers}
	}
	return s.Of
}

// For are the authorities of a purpose; nil: none of its own.
func (s State) For(p pki.Purpose) [][]byte {
	if p == pki.ForPeers {
		return s.Authorities
	}
	return s.Own[p]
}

// change is the state with what f makes of the authorities that are rotated.
func (s State) change(f func(pki.Purpose, [][]byte) [][]byte) State {
	s.Own = maps.Clone(s.Own)
	for _, p := range s.of() {
		if p == pki.ForPeers {
			s.Authorities = f(p, s.Authorities)
			continue
		}
		if s.Own == nil {
			s.Own = map[pki.Purpose][][]byte{}
		}
		s.Own[p] = f(p, s.Own[p])
	}
	return s
}

// rotates reports whether what is for that purpose is rotated.
func (s State) rotates(p pki.Purpose) bool {
	_, own := s.Own[p]
	return slices.Contains(s.of(), p) || !own && slices.Contains(s.of(), pki.ForPeers)
}

// TokenKeys is the state with which the key that signs service accounts' tokens is
// changed, 0: none, and whether the ones before it verify no more. They lie in the store, and
// are changed with what seals them there.
func (s State) TokenKeys() (number uint64, alone bool) {
	if s.Tokens == 0 && len(s.Own) == 0 && s.Phase == Stable { // of versions that knew one authority
		return s.Number, s.Finish
	}
	return s.Tokens, s.TokensAlone
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

// settle is how long a rotation lasts at least: pods and aggregated APIs hear
// of the new authority when it begins, and it is not known when they have heard.
const settle = 30 * time.Second

// Waiting are the members that do not have the state yet and are waited for.
func (s State) Waiting(members []Member, now time.Time) []Member {
	var waiting []Member
	for _, m := range members {
		spared := s.Phase == Reissue && s.Finish && !m.Server && now.Sub(s.Since) > absenceTimeout
		if m.Has < s.Number && !m.gone(now) && !spared {
			waiting = append(waiting, m)
		}
	}
	return waiting
}

// gone: it broke off while it joined.
func (m Member) gone(now time.Time) bool { return !m.Arrived && now.Sub(m.Joined) > arrivalTimeout }

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
	two := !slices.ContainsFunc(s.of(), func(p pki.Purpose) bool { return len(s.For(p)) != 2 })
	if s.Phase == Stable || !two || len(s.Waiting(members, now)) > 0 {
		return s, false
	}
	next := s
	next.Number, next.Since = s.Number+1, now.UTC()
	switch {
	case s.Phase == Distribute:
		next.Phase = Reissue
		next = next.change(func(_ pki.Purpose, list [][]byte) [][]byte { return [][]byte{list[1], list[0]} })
	case !s.Finish && now.Sub(s.Since) < s.Grace, now.Sub(s.Began) < settle:
		return s, false
	default:
		next.Phase, next.Maker, next.Began, next.Grace = Stable, "", time.Time{}, 0
		next = next.change(func(_ pki.Purpose, list [][]byte) [][]byte { return list[:1] })
		if s.rotates(pki.ForSecrets) && !s.Split {
			next.Tokens, next.TokensAlone = next.Number, s.Finish
		}
	}
	return next, true
}

// Request is what a server asks for that begins a rotation.
type Request struct {
	// Now is what the asking server trusts. It counts if the cluster has no state yet.
	Now *pki.Trust
	// Successors are the new authorities' certificates in PEM, by what they are for. The
	// maker has their keys on its disk.
	Successors map[pki.Purpose][]byte
	Maker      string
	Grace      time.Duration
	// Finish is State.Finish.
	Finish bool
}

// begin is the state with which a rotation begins, or begins again with other
// authorities because the first ones' keys are lost.
func (s State) begin(w Request, now time.Time) (State, error) {
	again := s.Phase == Distribute
	switch {
	case s.Phase == Reissue:
		return s, ErrUnderWay
	case again:
		w.Grace = s.Grace
	case s.Number == 0:
		s.Authorities, s.Own = lists(w.Now)
	}
	next := s
	next.Tokens, next.TokensAlone = s.TokenKeys()
	next.Number, next.Phase, next.Maker, next.Grace = s.Number+1, Distribute, w.Maker, w.Grace
	next.Since, next.Began, next.Finish = now.UTC(), now.UTC(), w.Finish || s.Finish && again
	next.Of, next.Split = slices.Sorted(maps.Keys(w.Successors)), false
	if again {
		next.Split = s.Split
	}
	for _, p := range next.Of {
		if s.For(p) == nil {
			next.Split = true
		}
	}
	return next.change(func(p pki.Purpose, list [][]byte) [][]byte {
		if list == nil {
			list = s.Authorities
		}
		return [][]byte{list[0], w.Successors[p]}
	}), nil
}

// lists are the authorities in a trust as a State has them.
func lists(t *pki.Trust) (servers [][]byte, own map[pki.Purpose][][]byte) {
	list := func(t *pki.Trust) (list [][]byte) {
		for _, ca := range t.All() {
			list = append(list, pki.EncodeCert(ca.Cert))
		}
		return list
	}
	for _, p := range pki.OwnPurposes {
		if t.Owns(p) {
			if own == nil {
				own = map[pki.Purpose][][]byte{}
			}
			own[p] = list(t.For(p))
		}
	}
	return list(t), own
}

// stateFields are State's but for the authorities.
type stateFields State

// stateJSON is a State in the store. Once a purpose has an authority of its own,
// authorities is an object. Versions that know one authority alone cannot read that: they
// stay as they are, and the rotation waits for them.
type stateJSON struct {
	*stateFields
	Authorities any `json:"authorities"`
}

// MarshalJSON implements json.Marshaler.
func (s State) MarshalJSON() ([]byte, error) {
	fields := stateFields(s)
	if len(s.Own) == 0 {
		return json.Marshal(stateJSON{&fields, s.Authorities})
	}
	all := maps.Clone(s.Own)
	all[pki.ForPeers] = s.Authorities
	return json.Marshal(stateJSON{&fields, all})
}

// UnmarshalJSON implements json.Unmarshaler.
func (s *State) UnmarshalJSON(b []byte) error {
	var raw json.RawMessage
	*s = State{}
	if err := json.Unmarshal(b, &stateJSON{(*stateFields)(s), &raw}); err != nil {
		return err
	}
	if len(raw) == 0 || raw[0] != '{' {
		if len(raw) == 0 {
			return nil
		}
		return json.Unmarshal(raw, &s.Authorities)
	}
	if err := json.Unmarshal(raw, &s.Own); err != nil {
		return err
	}
	s.Authorities = s.Own[pki.ForPeers]
	delete(s.Own, pki.ForPeers)
	return nil
}
