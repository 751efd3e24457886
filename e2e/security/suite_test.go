package security

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
)

// attack is one thing that an attacker tries.
type attack struct {
	name string
	try  func(*suite) verdict
	// control does the same as somebody who may. It must succeed: otherwise the attack
	// would be refused whoever made it. nil: another entry of the group speaks for it.
	control func(*suite) error
}

// verdict is what came of an attack.
type verdict struct {
	open bool
	said string // how it was shut, or what it opened
	err  error  // it could not be tried
}

func shut(format string, args ...any) verdict { return verdict{said: fmt.Sprintf(format, args...)} }
func open(format string, args ...any) verdict {
	return verdict{open: true, said: fmt.Sprintf(format, args...)}
}
func broken(err error) verdict { return verdict{err: err} }

// group is what one attacker tries. prepare returns the attacks; it makes what they need.
type group struct {
	name    string
	prepare func(*suite) []attack
}

// groups are in the order in which they are tried: the last ones take members away.
var groups = []group{
	{"an agent's key", agentKey},
	{"a join token", joinTokens},
	{"a service account's token", accountTokens},
	{"rights of a service account", accountRights},
	{"pods under restricted", restrictedPods},
	{"strangers at the API", strangers},
	{"images", hostileImages},
	{"out of a container", escapes},
	{"malformed messages", malformed},
	{"a server's key without a vote", nonVoterKey},
	{"a removed server's key", removedKeys},
	{"a token that has ended", endedToken},
}

// exceptions are attacks that are open, each by its group and name, with the words of
// docs/security.md that say so.
var exceptions = map[string]string{
	"out of a container: the metadata address":                            "A pod reaches what its node reaches",
	"rights of a service account: takes a server's address for a Service": "Whoever may write Services may take an address for one",
}

// tally is a line of the table.
type tally struct {
	name                   string
	tried, shut, controls  int
	known, opened, untried []string
}

// TestSecurity tries every attack on one cluster.
func TestSecurity(t *testing.T) {
	s := start(t)
	page, err := os.ReadFile("../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	for name, words := range exceptions {
		if !strings.Contains(strings.Join(strings.Fields(string(page)), " "), words) {
			t.Errorf("the exception %q is not in docs/security.md: %q", name, words)
		}
	}
	s.noteEndingToken()
	var table []*tally
	found := map[string]bool{}
	for _, g := range groups {
		line := &tally{name: g.name}
		table = append(table, line)
		t.Run(strings.ReplaceAll(g.name, " ", "_"), func(t *testing.T) {
			s.t = t
			for _, a := range g.prepare(s) {
				s.tryOne(t, line, g.name+": "+a.name, a, found)
			}
			if line.tried > 0 && line.controls == 0 {
				t.Error("no control was made: that all is refused shows nothing")
			}
		})
		s.t = t
	}
	t.Log("\n" + render(table))
	if t.Failed() || slices.ContainsFunc(table, func(l *tally) bool { return l.tried == 0 }) {
		return // not all groups were asked for
	}
	for name := range exceptions {
		if !found[name] {
			t.Errorf("the exception %q is no attack of the tables, or it is shut: take it out", name)
		}
	}
}

// tryOne makes one attack and its control, and notes what came of it.
func (s *suite) tryOne(t *testing.T, line *tally, full string, a attack, found map[string]bool) {
	v := a.try(s)
	line.tried++
	switch {
	case v.err != nil:
		line.untried = append(line.untried, full)
		t.Errorf("%s: could not be tried: %v", full, v.err)
	case v.open && exceptions[full] != "":
		found[full] = true
		line.known = append(line.known, full)
		t.Logf("%s: open, as documented: %s", full, v.said)
	case v.open:
		line.opened = append(line.opened, full)
		t.Errorf("%s: OPEN: %s", full, v.said)
	default:
		line.shut++
		t.Logf("%s: shut: %.200s", full, v.said)
	}
	if a.control == nil {
		return
	}
	line.controls++
	if err := a.control(s); err != nil {
		t.Errorf("%s: who may do it cannot either: %v", full, err)
	}
}

// render is the table, and below it what is not shut.
func render(table []*tally) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "tried\tshut\tknown\topen\tuntried\tcontrols\t  group")
	sum := tally{name: "all"}
	row := func(l *tally) {
		fmt.Fprintf(w, "%d\t%d\t%d\t%d\t%d\t%d\t  %s\n", l.tried, l.shut, len(l.known), len(l.opened), len(l.untried), l.controls, l.name)
	}
	for _, l := range table {
		row(l)
		sum.tried, sum.shut, sum.controls = sum.tried+l.tried, sum.shut+l.shut, sum.controls+l.controls
		sum.known, sum.opened, sum.untried = append(sum.known, l.known...), append(sum.opened, l.opened...), append(sum.untried, l.untried...)
	}
	row(&sum)
	_ = w.Flush()
	for what, names := range map[string][]string{"known": sum.known, "OPEN": sum.opened, "untried": sum.untried} {
		for _, name := range slices.Sorted(slices.Values(names)) {
			fmt.Fprintf(&b, "%s: %s\n", what, name)
		}
	}
	return b.String()
}
