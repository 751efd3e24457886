package paths

import (
	"strings"
	"testing"
)

func TestFindings(t *testing.T) {
	good := func(change func(*Path)) Path {
		p := Path{Peer: "n2", Address: "10.42.2.1", Expected: true, Sent: 60, RTT: 0.3, Heard: 0.5, MTU: 1500, Streamed: true}
		change(&p)
		return p
	}
	for name, c := range map[string]struct {
		path Path
		want State
		says []string // what the finding says; none: there is none
	}{
		"all well":         {good(func(*Path) {}), OK, nil},
		"nothing yet":      {Path{Peer: "n2", Expected: true, Heard: -1}, Unknown, nil},
		"first two lost":   {Path{Peer: "n2", Expected: true, Sent: 2, Lost: 2, Silent: 2, Heard: -1}, Unknown, nil},
		"dead":             {good(func(p *Path) { p.Silent, p.Lost, p.Heard = 3, 3, 90 }), Down, []string{"10.42.2.1 does not answer", "8474"}},
		"dead, not Ready":  {good(func(p *Path) { p.Silent, p.Lost, p.Heard, p.Expected = 3, 3, 90, false }), Down, nil},
		"never heard":      {good(func(p *Path) { p.Silent, p.Lost, p.Sent, p.Heard = 3, 3, 3, -1 }), Down, []string{"does not answer"}},
		"one way":          {good(func(p *Path) { p.Silent, p.Lost = 3, 3 }), OneWay, []string{"its packets come here", "from n1 to n2"}},
		"damaged":          {good(func(p *Path) { p.Damaged = 2 }), Damage, []string{"2 packets came with changed bytes", "ethtool"}},
		"short":            {good(func(p *Path) { p.Carries = 1400 }), Short, []string{"more than 1400 bytes", "takes 1500", "mtu 1400"}},
		"no streams":       {good(func(p *Path) { p.Stream = "no connection in 5s" }), Stream, []string{"TCP does not: no connection in 5s", "tso off"}},
		"lossy there":      {good(func(p *Path) { p.Lost, p.LostThere = 6, 6 }), Lossy, []string{"6 of 60 packets are lost on the way there"}},
		"lossy back":       {good(func(p *Path) { p.Lost, p.LostBack = 6, 6 }), Lossy, []string{"on the way back"}},
		"lossy both":       {good(func(p *Path) { p.Lost, p.LostBack, p.LostThere = 6, 4, 2 }), Lossy, []string{"(2 on the way there, 4 back)"}},
		"few are lost":     {good(func(p *Path) { p.Lost = 3 }), OK, nil},
		"few were sent":    {good(func(p *Path) { p.Sent, p.Lost = 4, 2 }), OK, nil},
		"the worst counts": {good(func(p *Path) { p.Damaged, p.Carries, p.Lost, p.Stream = 1, 1400, 20, "x" }), Damage, []string{"changed bytes"}},
	} {
		if got := Judge(c.path, HeardWithin(1)); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
		found := Findings(Report{Node: "n1", Paths: []Path{c.path}})
		if len(found) > 1 || (len(found) == 1) != (c.says != nil) {
			t.Errorf("%s: found %v", name, found)
			continue
		}
		for _, words := range c.says {
			if text := found[0].String() + "\n" + found[0].Cure; !strings.Contains(text, words) {
				t.Errorf("%s: %q does not say %q", name, text, words)
			}
		}
	}
}

func TestSummary(t *testing.T) {
	if got := Summary(nil, 3); got != "the ways to 3 other nodes work" {
		t.Error(got)
	}
	var many []Finding
	for _, to := range []string{"n2", "n3", "n4", "n5", "n6", "n7", "n8"} {
		many = append(many, Finding{From: "n1", To: to, What: "is far"})
	}
	if got := Summary(many, 9); got != "n2: is far; n3: is far; n4: is far; n5: is far; n6: is far; and 2 more" {
		t.Error(got)
	}
}
