// Package past is what clients and servers say to each other about the past of
// objects: how a moment is named, and what the history of an object looks like.
// It only has values; servers answer in apis/server.
package past

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"
)

const (
	// AtParameter is the query parameter of a get or list that asks for the
	// state as of a moment, in the form that ParseMoment reads.
	AtParameter = "at"
	// HistoryParameter is the query parameter of a get that asks for the
	// object's changes, newest last, instead of the object: at most so many,
	// or DefaultChanges if it is empty.
	HistoryParameter = "history"
	// RevisionHeader of a response says as of which revision it holds.
	RevisionHeader = "Clusterd-Revision"
)

// Bounds of HistoryParameter.
const (
	DefaultChanges = 100
	MaxChanges     = 1000
)

// Via stands in a Change's Origin between a user and the program.
const Via = " via "

// SplitOrigin is the user and the program of a Change's Origin; either may be "".
// A user whose name reads like more than that is quoted.
func SplitOrigin(origin string) (user, program string) {
	if quoted, err := strconv.QuotedPrefix(origin); err == nil && strings.HasPrefix(origin, `"`) {
		return quoted, strings.TrimPrefix(origin[len(quoted):], Via)
	}
	user, program, _ = strings.Cut(origin, Via)
	return user, program
}

// Moment is a revision or a time: exactly one is set.
type Moment struct {
	Revision int64
	Time     time.Time
	// Back is set for a span back from now, which who knows the time makes a
	// Time of; it is positive.
	Back time.Duration
}

// ParseMoment reads "1234" (a revision), "-10m" (a span back from now) or
// "2006-01-02T15:04:05Z" (RFC 3339).
func ParseMoment(text string) (Moment, error) {
	const forms = "give a revision such as 1234, a span back from now such as -10m, or a time such as 2006-01-02T15:04:05Z"
	if n, err := strconv.ParseInt(text, 10, 64); err == nil && n > 0 {
		return Moment{Revision: n}, nil
	}
	if d, err := time.ParseDuration(text); err == nil && d != 0 {
		if d > 0 {
			return Moment{}, fmt.Errorf("%q lies in the future: did you mean -%s?", text, strings.TrimPrefix(text, "+"))
		}
		return Moment{Back: -d}, nil
	}
	t, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return Moment{}, fmt.Errorf("%q is no moment: %s", text, forms)
	}
	return Moment{Time: t}, nil
}

// At is the moment's time, seen from now; zero for a revision.
func (m Moment) At(now time.Time) time.Time {
	if m.Back > 0 {
		return now.Add(-m.Back)
	}
	return m.Time
}

// Kinds of changes, in the words of watches.
const (
	Added    = "ADDED"
	Modified = "MODIFIED"
	Deleted  = "DELETED"
)

// Change is one change of an object.
type Change struct {
	Type     string    `json:"type"`
	Revision int64     `json:"revision,string"`
	Time     time.Time `json:"time"`
	// Origin is who asked for it: a user, and with what program; "" when it is
	// not known.
	Origin string `json:"origin,omitempty"`
	// Server is the member that took the request and handed the change to the leader, which has
	// noted whose key was proved; Origin is that member's word. "": the leader
	// took the request itself, or was of a version that did not note it.
	Server string `json:"server,omitempty"`
	// Object is the state after the change; of a deletion, the state before.
	Object json.RawMessage `json:"object,omitempty"`
}

// History is the answer to HistoryParameter.
type History struct {
	// Base is the object as of the oldest revision, when it existed then and no
	// change is left out.
	Base    json.RawMessage `json:"base,omitempty"`
	Changes []Change        `json:"changes"` // oldest first
	// More: older changes are known, and were left out.
	More bool `json:"more,omitempty"`
	// OldestRevision that can be read, since when it held, and the newest one.
	OldestRevision int64     `json:"oldestRevision,string"`
	OldestTime     time.Time `json:"oldestTime"`
	NewestRevision int64     `json:"newestRevision,string"`
}
