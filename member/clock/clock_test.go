package clock

import (
	"strings"
	"testing"
	"time"
)

func TestJudge(t *testing.T) {
	now := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	floor := now.Add(-30 * 24 * time.Hour)
	y1970 := time.Unix(100, 0)
	day := 24 * time.Hour
	for name, c := range map[string]struct {
		now      time.Time
		readings []Reading
		servers  int
		self     bool
		wrong    string // a word of why; empty: not wrong
		ahead    time.Duration
	}{
		"alone":                                {now, nil, 1, true, "", 0},
		"alone in 1970":                        {y1970, nil, 1, true, "before the cluster began", 0},
		"three that agree":                     {now, []Reading{{"id-n2", "n2", time.Second}, {"id-n3", "n3", -time.Second}}, 3, true, "", 0},
		"a day behind the two others":          {now, []Reading{{"id-n2", "n2", day}, {"id-n3", "n3", day + time.Second}}, 3, true, "n2, n3 agree on 2026-11-28", day + time.Second},
		"a day ahead of the two others":        {now, []Reading{{"id-n2", "n2", -day}, {"id-n3", "n3", -day}}, 3, true, "n2, n3", -day},
		"another one is a day off":             {now, []Reading{{"id-n2", "n2", day}, {"id-n3", "n3", 0}}, 3, true, "", 0},
		"the two others do not agree":          {now, []Reading{{"id-n2", "n2", day}, {"id-n3", "n3", -day}}, 3, true, "", 0},
		"one of three is away":                 {now, []Reading{{"id-n2", "n2", day}}, 3, true, "", 0},
		"two servers":                          {now, []Reading{{"id-n2", "n2", day}}, 2, true, "", 0},
		"two servers, this one in 1970":        {y1970, []Reading{{"id-n2", "n2", now.Sub(y1970)}}, 2, true, "before the cluster began", now.Sub(y1970)},
		"two servers, both in 1970":            {y1970, []Reading{{"id-n2", "n2", 0}}, 2, true, "before the cluster began", 0},
		"three, this one in 1970, one is away": {y1970, []Reading{{"id-n2", "n2", now.Sub(y1970)}}, 3, true, "before the cluster began", now.Sub(y1970)},
		"three of five agree":                  {now, []Reading{{"id-n2", "n2", day}, {"id-n3", "n3", day}, {"id-n4", "n4", day}, {"id-n5", "n5", 0}}, 5, true, "n2, n3, n4", day},
		"two of five agree":                    {now, []Reading{{"id-n2", "n2", day}, {"id-n3", "n3", day}, {"id-n4", "n4", 0}, {"id-n5", "n5", 0}}, 5, true, "", 0},
		"an agent of one server":               {now, []Reading{{"id-n1", "n1", day}}, 1, false, "n1 agree", day},
		"an agent of two that differ":          {now, []Reading{{"id-n1", "n1", day}, {"id-n2", "n2", 0}}, 2, false, "", 0},
		"an agent in 1970, no server answers":  {y1970, nil, 3, false, "1970-01-01T00:01:40Z", 0},
		"within tolerance":                     {now, []Reading{{"id-n2", "n2", 59 * time.Second}, {"id-n3", "n3", 58 * time.Second}}, 3, true, "", 0},
	} {
		v := Judge(c.now, floor, "the cluster began", c.readings, c.servers, c.self)
		if differ := strings.Contains(name, "differ") || strings.Contains(name, "not agree") || name == "two servers" || name == "one of three is away" || name == "two of five agree" || name == "another one is a day off"; differ != (v.Differs != "") {
			t.Errorf("%s: differs: %q", name, v.Differs)
		}
		if v.Agreed != (v.Ahead != 0) || v.Agreed != (len(v.By) > 0) {
			t.Errorf("%s: %+v", name, v)
		}
		if v.Wrong() != (c.wrong != "") || !strings.Contains(v.Why, c.wrong) || v.Ahead != c.ahead {
			t.Errorf("%s: %+v, want %q and %s", name, v, c.wrong, c.ahead)
		}
	}
}

// TestClock: what was noted counts for the time since. (That it ends when the clock is set,
// TestE2EClocks shows: no time of this process has a wall clock that was set.)
func TestClock(t *testing.T) {
	at := time.Now()
	c := Clock{now: func() time.Time { return at }}
	if v := c.Verdict(); v.Wrong() || !c.Now().Equal(at) {
		t.Fatalf("at first: %+v, %s", v, c.Now())
	}
	c.Note(Verdict{Ahead: time.Hour, Why: "wrong"})
	at = at.Add(time.Minute)
	if !c.Verdict().Wrong() || !c.Now().Equal(at.Add(time.Hour)) {
		t.Errorf("noted: %+v, %s", c.Verdict(), c.Now())
	}
	c.Note(Verdict{})
	if c.Verdict().Wrong() || !c.Now().Equal(at) {
		t.Errorf("right again: %+v, %s", c.Verdict(), c.Now())
	}
}

// TestClockKeeps: a clock that most servers said is wrong is not right because fewer answer now.
func TestClockKeeps(t *testing.T) {
	at := time.Now()
	c := Clock{now: func() time.Time { return at }}
	judge := func(readings ...Reading) Verdict {
		v := c.Keep(Judge(at, at.Add(-24*time.Hour), "the cluster began", readings, 3, true))
		c.Note(v)
		return v
	}
	n2, n3 := Reading{Name: "n2", Ahead: time.Hour}, Reading{Name: "n3", Ahead: time.Hour}
	if v := judge(n2); v.Wrong() {
		t.Fatalf("one that differs: %+v", v)
	}
	for _, step := range []struct {
		what     string
		readings []Reading
		wrong    bool
	}{
		{"two agree", []Reading{n2, n3}, true},
		{"one stopped", []Reading{n2}, true},
		{"no other answers", nil, true},
		{"they are back", []Reading{n2, n3}, true},
		{"one is away, and the other agrees", []Reading{{Name: "n2", Ahead: time.Second}}, false},
		{"no other answers, after that", nil, false},
	} {
		at = at.Add(30 * time.Second)
		if v := judge(step.readings...); v.Wrong() != step.wrong || v.Agreed != step.wrong || (v.Ahead == time.Hour) != step.wrong {
			t.Errorf("%s: %+v", step.what, v)
		}
	}
}
