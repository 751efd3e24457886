package join

import (
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore"
)

// TestJudgeMembership: what ends a node, or has it start over, counts only while no member of its
// own epoch that follows a leader has it for a server.
func TestJudgeMembership(t *testing.T) {
	ours, newer := raftstore.Epoch{Number: 3}, raftstore.Epoch{Number: 4}
	removal := &Removal{Name: "n1", Removed: time.Unix(1e9, 0)}
	removed := MembershipStatus{Epoch: ours, Removed: removal}
	agent := MembershipStatus{Epoch: ours, Member: true, Role: pki.Agent}
	moved := MembershipStatus{Epoch: newer, Member: true}
	led := MembershipStatus{Epoch: ours, Member: true, Role: pki.Server, HasLeader: new(true)}
	alone := MembershipStatus{Epoch: ours, Member: true, Role: pki.Server, HasLeader: new(false)}
	past := MembershipStatus{Epoch: raftstore.Epoch{Number: 2}, Removed: removal}
	for _, tc := range []struct {
		name    string
		leads   bool
		answers []MembershipStatus
		want    string
	}{
		{"no answer", false, nil, ""},
		{"one without a leader", false, []MembershipStatus{alone}, ""},
		{"it was removed", false, []MembershipStatus{alone, removed}, "removed"},
		{"by one of a past epoch", false, []MembershipStatus{past}, ""},
		{"by one, and another follows a leader", false, []MembershipStatus{removed, led}, "contradicted"},
		{"it was demoted", false, []MembershipStatus{agent}, "demoted"},
		{"and leads", true, []MembershipStatus{agent}, ""},
		{"and another follows a leader", false, []MembershipStatus{agent, led}, ""},
		{"recovered", false, []MembershipStatus{moved}, "start over"},
		{"recovered elsewhere, and it leads", true, []MembershipStatus{moved}, "elsewhere"},
		{"recovered elsewhere, and another follows a leader", false, []MembershipStatus{moved, led}, "elsewhere"},
	} {
		j, got := JudgeMembership(ours, tc.leads, tc.answers), ""
		switch {
		case j.Removed == removal:
			got = "removed"
		case j.Demoted:
			got = "demoted"
		case j.StartOver != nil && *j.StartOver == newer:
			got = "start over"
		case len(j.Elsewhere) == 1 && j.Elsewhere[0] == newer:
			got = "elsewhere"
		case len(j.Contradicted) == 1:
			got = "contradicted"
		}
		if got != tc.want {
			t.Errorf("%s: %q, want %q: %+v", tc.name, got, tc.want, j)
		}
	}
}
