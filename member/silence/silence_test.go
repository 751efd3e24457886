package silence

import (
	"slices"
	"testing"
	"time"
)

func TestTrackerAfter(t *testing.T) {
	begin := time.Now()
	tr := Tracker{After: time.Second}
	tr.Heard("1", "n1", begin)
	if got := tr.Suspects(begin.Add(time.Second)); len(got) > 0 {
		t.Errorf("suspected too soon: %q", got)
	}
	tr.Heard("1", "n1", begin.Add(time.Second/2))
	if got := tr.Suspects(begin.Add(time.Second * 3 / 2)); len(got) > 0 {
		t.Errorf("suspected too soon after it spoke: %q", got)
	}
	if got := tr.Suspects(begin.Add(time.Second*3/2 + 1)); !slices.Equal(got, []string{"n1"}) {
		t.Errorf("silent for longer: %q", got)
	}
	// Half of it is what a look may be late without this process having stood still.
	tr.Heard("1", "n1", begin.Add(10*time.Second))
	tr.Tick(begin.Add(10 * time.Second))
	tr.Tick(begin.Add(10*time.Second + 600*time.Millisecond))
	if got := tr.Suspects(begin.Add(11*time.Second + 500*time.Millisecond)); len(got) > 0 {
		t.Errorf("suspected although this process stood still: %q", got)
	}
}

func TestTracker(t *testing.T) {
	begin := time.Now()
	at := func(d time.Duration) time.Time { return begin.Add(d) }
	var tr Tracker
	if tr.Knows("1") {
		t.Error("knows a node that was never heard")
	}
	tr.Heard("1", "n1", at(0))
	tr.Heard("2", "n2", at(0))
	for _, step := range []struct {
		what string
		now  time.Duration
		do   func()
		want []string
	}{
		{"not yet", After, nil, nil},
		{"n1 spoke, n2 did not", After + 1, func() { tr.Heard("1", "n1", at(time.Second)) }, []string{"n2"}},
		{"not again at once", After + Again, nil, []string{"n1"}},
		{"again", After + Again + 2, nil, []string{"n2"}},
		{"an old sign of life changes nothing", 2*After + 2*Again, func() { tr.Heard("1", "n1", at(0)) }, []string{"n1", "n2"}},
		{"this process stood still", 4 * Again, func() { tr.Tick(at(Again)); tr.Tick(at(4 * Again)) }, nil},
		{"and heard nothing since", 7 * Again, nil, []string{"n1", "n2"}},
		{"one speaks under another name", time.Hour, func() { tr.Heard("1", "m1", at(time.Hour-After-1)) }, []string{"m1"}},
	} {
		if step.do != nil {
			step.do()
		}
		got := tr.Suspects(at(step.now))
		slices.Sort(got)
		if !slices.Equal(got, step.want) {
			t.Errorf("%s: %q, want %q", step.what, got, step.want)
		}
	}
	if tr.Knows("2") || !tr.Knows("1") {
		t.Error("a node is remembered that was silent for an hour, or one forgotten that was not")
	}
}
