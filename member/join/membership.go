package join

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore"
)

// MembershipStatusPath answers, over the join protocol, with the membership status
// of a node: GET with its id. A node that is refused everywhere else can ask
// there why. The answer says nothing to those who do not hold the id, which is 130
// bits of a fingerprint.
const MembershipStatusPath = "/v1/standing"

// MembershipStatus is what one member knows about a node.
type MembershipStatus struct {
	// Epoch is the life of the store that the one who answers takes part in.
	Epoch raftstore.Epoch `json:"epoch"`
	// Member: the node has a record there, of the role.
	Member bool     `json:"member"`
	Role   pki.Role `json:"role,omitempty"`
	// Removed is set when it was a member and is not any more.
	Removed *Removal `json:"removed,omitempty"`
	// HasLeader says whether the one who answers leads or follows a leader; nil: it
	// is of a version that does not say.
	HasLeader *bool `json:"hasLeader,omitempty"`
}

// Follows reports whether the one who answers is part of a majority in that epoch
// in which the node is a server.
func (m MembershipStatus) Follows(epoch raftstore.Epoch) bool {
	return m.Epoch == epoch && m.Member && m.Role != pki.Agent && m.Removed == nil && m.HasLeader != nil && *m.HasLeader
}

// membershipStatus looks a node up in this member's own store: it works
// without a leader.
func (s *Server) membershipStatus(ctx context.Context, id string) (MembershipStatus, error) {
	answer := MembershipStatus{Epoch: s.Epoch}
	if s.HasLeader != nil {
		answer.HasLeader = new(s.HasLeader())
	}
	stale := raftstore.ReadOptions{Stale: true}
	switch rec, _, err := readRecord(ctx, s.Store, id, stale); {
	case err == nil:
		answer.Member, answer.Role = true, rec.Role
	case !errors.Is(err, ErrNotMember):
		return answer, err
	}
	gone, _, err := s.Store.Get(ctx, removed+id, stale)
	if err != nil || gone == nil {
		return answer, err
	}
	answer.Removed = new(Removal)
	return answer, json.Unmarshal(gone.Value, answer.Removed)
}

func (s *Server) serveMembershipStatus(w http.ResponseWriter, r *http.Request) {
	answer, err := s.membershipStatus(r.Context(), r.URL.Query().Get("id"))
	if err != nil {
		s.Log.Warn("a node's membership status could not be looked up", "peer", r.RemoteAddr, "err", err)
		refuse(w, http.StatusServiceUnavailable, &Refusal{CodeBusy, "the node's membership status cannot be looked up right now: " + err.Error()})
		return
	}
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(answer)
}

// AskMembershipStatus asks a member for the membership status of the node with
// that id. dial opens a connection for the join protocol and has verified who is at its other end.
func AskMembershipStatus(ctx context.Context, dial func(context.Context) (net.Conn, error), id string) (MembershipStatus, error) {
	var answer MembershipStatus
	res, err := membershipStatus(ctx, dial, id)
	if err != nil {
		return answer, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, 64<<10))
	if err != nil {
		return answer, err
	}
	if res.StatusCode != http.StatusOK {
		return answer, fmt.Errorf("it answered %s", res.Status)
	}
	return answer, json.Unmarshal(body, &answer)
}

// AskClock asks a server how far its clock is ahead of now's, over the join protocol: each answer
// of a server says what time it is, to the second, those of earlier versions too.
func AskClock(ctx context.Context, dial func(context.Context) (net.Conn, error), id string, now func() time.Time) (time.Duration, error) {
	var asked time.Time
	res, err := membershipStatus(ctx, func(ctx context.Context) (net.Conn, error) {
		c, err := dial(ctx)
		asked = now() // the handshake is over
		return c, err
	}, id)
	if err != nil {
		return 0, err
	}
	res.Body.Close()
	date, err := http.ParseTime(res.Header.Get("Date"))
	if err != nil {
		return 0, fmt.Errorf("the time in its answer: %w", err)
	}
	// The second began up to one before, the answer is half of the way old.
	return date.Add(500 * time.Millisecond).Sub(asked.Add(now().Sub(asked) / 2)), nil
}

func membershipStatus(ctx context.Context, dial func(context.Context) (net.Conn, error), id string) (*http.Response, error) {
	tr := &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
	}
	target := url.URL{Scheme: "http", Host: "member", Path: MembershipStatusPath, RawQuery: url.Values{"id": {id}}.Encode()}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target.String(), nil)
	if err != nil {
		return nil, err
	}
	return tr.RoundTrip(req)
}
