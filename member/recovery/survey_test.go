package recovery

import (
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/raftstore"
)

// answering is a member that answers, in the survey's epoch.
func answering(name string, voter bool, term, index uint64) Survivor {
	return Survivor{Name: name, ID: "id-" + name, Voter: voter, Answered: true, Epoch: raftstore.Epoch{Number: 4}, LastTerm: term, LastIndex: index}
}

func silent(name string) Survivor {
	return Survivor{Name: name, ID: "id-" + name, Voter: true, Problem: "dead"}
}

func TestSurvey(t *testing.T) {
	led := answering("b", true, 2, 9)
	led.Leader = "id-b"
	past := answering("b", true, 9, 99)
	past.Epoch.Number = 3
	for _, tc := range []struct {
		name     string
		members  []Survivor
		newest   string
		obstacle string
	}{
		{"the later term", []Survivor{answering("a", true, 2, 100), answering("b", false, 3, 9), silent("c"), silent("d")}, "b", ""},
		{"the longer log", []Survivor{answering("a", true, 3, 8), answering("b", false, 3, 9), silent("c"), silent("d")}, "b", ""},
		{"of equals the voter", []Survivor{answering("a", false, 3, 9), answering("b", true, 3, 9), silent("c"), silent("d")}, "b", ""},
		{"not one of another epoch", []Survivor{answering("a", true, 1, 1), past, silent("c")}, "a", ""},
		{"not one without a log", []Survivor{answering("a", true, 1, 1), answering("b", false, 0, 0), silent("c")}, "a", ""},
		{"a majority answers", []Survivor{answering("a", true, 2, 9), answering("b", true, 2, 9), silent("c")}, "a", "2 of 3 voters answer"},
		{"there is a leader", []Survivor{answering("a", true, 2, 8), led, silent("c"), silent("d")}, "b", "follows a leader"},
	} {
		s := Survey{Epoch: raftstore.Epoch{Number: 4}, Members: tc.members}
		s.Judge()
		if s.Recommended != tc.newest || (s.Obstacle == "") != (tc.obstacle == "") || !strings.Contains(s.Obstacle, tc.obstacle) {
			t.Errorf("%s: %q, %q", tc.name, s.Recommended, s.Obstacle)
		}
	}
}

func TestRecoveryOrder(t *testing.T) {
	members := []Survivor{answering("a", true, 3, 9), answering("b", false, 3, 8), silent("c"), silent("d")}
	for _, tc := range []struct {
		name string
		wish v1.RecoveryRequest
		want string // "": it is ordered
	}{
		{"as surveyed", v1.RecoveryRequest{From: "a", Keep: []string{"a", "b"}}, ""},
		{"from another", v1.RecoveryRequest{From: "b", Keep: []string{"a", "b"}}, ""},
		{"one that answers would be left out", v1.RecoveryRequest{From: "a", Keep: []string{"a"}}, "b answers now"},
		{"one has gone meanwhile", v1.RecoveryRequest{From: "a", Keep: []string{"a", "b", "c"}}, "c no longer answers"},
		{"from one that does not answer", v1.RecoveryRequest{From: "c", Keep: []string{"a", "b"}}, `"c" is none`},
		{"from no member", v1.RecoveryRequest{Keep: []string{"a", "b"}}, "is none"},
	} {
		s := Survey{Epoch: raftstore.Epoch{Number: 4}, Members: members}
		s.Judge()
		order, from, err := s.NewOrder(tc.wish, time.Now())
		if tc.want != "" {
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%s: %v", tc.name, err)
			}
			continue
		}
		if err != nil || from.Name != tc.wish.From || order.Epoch.Number != 5 || !slices.Equal(order.Keep, []string{"id-a", "id-b"}) {
			t.Errorf("%s: %+v, %+v, %v", tc.name, order, from, err)
		}
	}
}
