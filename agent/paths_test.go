package agent

import (
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/apis/paths"
)

// TestPathCondition: a way counts as faulty when two looks saw it so, and as
// mended when three did not; numbers alone write nothing.
func TestPathCondition(t *testing.T) {
	way := paths.Path{Peer: "n2", Address: "10.42.2.1", Expected: true, Sent: 60, Heard: 0.5, MTU: 1500, Streamed: true}
	w := newPathWatch(func() paths.Report { return paths.Report{Node: "n1", Paths: []paths.Path{way}} })
	for i, step := range []struct {
		lost    int
		changed bool
		faulty  bool
	}{
		{0, false, false},
		{30, false, false}, // once
		{0, false, false},
		{30, false, false},
		{31, true, true}, // twice in a row
		{40, false, true},
		{0, false, true},
		{40, false, true},
		{0, false, true},
		{0, false, true},
		{0, true, false}, // three looks without it
		{0, false, false},
	} {
		way.Lost = step.lost
		changed := w.look()
		c := w.conditions()[0]
		if changed != step.changed || (c.Status == v1.ConditionTrue) != step.faulty || c.Type != paths.Condition {
			t.Errorf("look %d: changed: %t, %+v", i, changed, c)
		}
		if step.faulty && (c.Reason != "PathsFail" || !strings.Contains(c.Message, "n2: 31 of 60 packets are lost")) {
			t.Errorf("look %d: %+v", i, c)
		}
		if !step.faulty && (c.Reason != "PathsWork" || c.Message != "the ways to 1 other nodes work") {
			t.Errorf("look %d: %+v", i, c)
		}
	}
}
