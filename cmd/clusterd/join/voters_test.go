package join

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/clusterd/clusterd/gossip"
	"github.com/clusterd/clusterd/raftstore"
)

func TestPlan(t *testing.T) {
	start := time.Date(2026, 11, 20, 0, 0, 0, 0, time.UTC)
	// A member is written as its id and letters: r it has a record, a gossip
	// sees it alive, d gossip calls it dead, v it votes, n it is in without a vote.
	for _, tc := range []struct {
		name    string
		members []string
		want    []string
	}{
		{"first alone", []string{"a rav"}, nil},
		{"second does not vote: two voters are worse than one", []string{"a rav", "b ra"}, []string{"add non-voter b"}},
		{"second stays as it is", []string{"a rav", "b ran"}, nil},
		{"third makes three voters", []string{"a rav", "b ran", "c ra"}, []string{"add voter b", "add voter c"}},
		{"two at once", []string{"a rav", "b ra", "c ra"}, []string{"add voter b", "add voter c"}},
		{"fourth does not vote", []string{"a rav", "b rav", "c rav", "d ra"}, []string{"add non-voter d"}},
		{"fifth makes five", []string{"a rav", "b rav", "c rav", "d ran", "e ra"}, []string{"add voter d", "add voter e"}},
		{"sixth and seventh do not", []string{"a rav", "b rav", "c rav", "d rav", "e rav", "f ra", "g ra"}, []string{"add non-voter f", "add non-voter g"}},
		{"admitted but not seen", []string{"a rav", "b r", "c r"}, nil},
		{"seen but not admitted", []string{"a rav", "x a"}, nil},
		{"a dead voter keeps its place", []string{"a rav", "b rdv", "c rav"}, nil},
		{"record gone: out", []string{"a rav", "b v", "c rav"}, []string{"remove b"}},
		{"a spare one takes the place of one removed", []string{"a rav", "b v", "c rav", "d ran"}, []string{"remove b", "add voter d"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var records []Record
			var current []raftstore.Member
			seen := map[string]gossip.State{}
			for i, m := range tc.members {
				var id, flags string
				fmt.Sscan(m, &id, &flags)
				for _, f := range flags {
					switch f {
					case 'r':
						records = append(records, Record{ID: id, Name: id, Joined: start.Add(time.Duration(i) * time.Minute)})
					case 'a':
						seen[id] = gossip.Alive
					case 'd':
						seen[id] = gossip.Dead
					case 'v', 'n':
						current = append(current, raftstore.Member{ID: id, Voter: f == 'v'})
					}
				}
			}
			var got []string
			for _, c := range plan(records, seen, current) {
				got = append(got, string(c.verb)+" "+c.id)
			}
			if d := cmp.Diff(tc.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}
