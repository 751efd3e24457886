package doors

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"
)

// door is one request and how it has to be answered.
type door struct {
	name string
	by   string // the client: one of clients
	// try sends the request, marked with the id for the audit log, to a server.
	try  func(s *suite, server, id string) (answer, error)
	code int
	says string // a part of the message
	line string // of kubectl: what the audit log has, see ctl
}

// answer is how a request was answered.
type answer struct {
	code    int
	message string
}

// The clients.
const (
	raw      = "raw HTTP"
	clientGo = "client-go"
	kubectl  = "kubectl"
)

// shut is whether a door is one that has to be refused: others are controls.
func (d door) shut() bool { return d.code >= http.StatusMultipleChoices }

// group is what one kind of attacker tries. prepare makes what its doors need.
type group struct {
	name    string
	prepare func(*suite) []door
}

var groups = []group{
	{"another namespace", otherNamespace},
	{"what is another node's", otherNode},
	{"more rights", moreRights},
	{"being somebody else", somebodyElse},
	{"certificates for others", certificateRequests},
	{"tokens", tokens},
	{"certificates", certificates},
	{"names of the system", systemNames},
	{"privileged under restricted", restricted},
	{"webhooks that fail", webhooks},
}

// tally is a line of the table.
type tally struct {
	name                         string
	tried, shut, controls, lines int
	by                           map[string]int
}

// sent is a door that was tried, whose lines are looked for when the group is done.
type sent struct {
	door
	id, server string
}

// TestDoors tries all doors on one cluster.
func TestDoors(t *testing.T) {
	s := start(t)
	var table []*tally
	for _, g := range groups {
		line := &tally{name: g.name, by: map[string]int{}}
		table = append(table, line)
		t.Run(strings.ReplaceAll(g.name, " ", "_"), func(t *testing.T) {
			s.t = t
			s.tryGroup(line, g.prepare(s))
		})
	}
	for _, one := range []struct {
		name string
		run  func(*suite, *tally)
	}{{"another key for tokens", tokenKeys}, {"quota, 50 writers", quotaRace}, {"10 000 idle watches", idleWatches}} {
		line := &tally{name: one.name, by: map[string]int{}}
		table = append(table, line)
		t.Run(strings.ReplaceAll(one.name, " ", "_"), func(t *testing.T) {
			s.t = t
			one.run(s, line)
		})
	}
	s.t = t
	t.Log("\n" + render(table))
}

func (s *suite) tryGroup(line *tally, doors []door) {
	var all []sent
	names := map[string]bool{}
	for _, d := range doors {
		if names[d.name+d.by] {
			s.t.Errorf("the door %q is there twice", d.name)
		}
		names[d.name+d.by] = true
		if d.by == kubectl {
			if s.lines[d.line] {
				s.t.Errorf("%s: another door leaves the line %q", d.name, d.line)
			}
			s.lines[d.line] = true
		}
		server, id := s.next()
		got, err := d.try(s, server, id)
		isShut := d.shut()
		if isShut {
			line.tried++
			line.by[d.by]++
		} else {
			line.controls++
		}
		full := fmt.Sprintf("%s, by %s at %s", d.name, d.by, server)
		switch {
		case err != nil:
			s.t.Errorf("%s: could not be tried: %v", full, err)
		case isShut && got.code != 0 && got.code < 300:
			s.t.Errorf("%s: OPEN: %d %.300s", full, got.code, got.message)
		case got.code != d.code || !strings.Contains(got.message, d.says):
			s.t.Errorf("%s: %d %.500q, want %d with %q", full, got.code, got.message, d.code, d.says)
		case isShut:
			line.shut++
			s.t.Logf("%s: shut: %d %.200s", full, got.code, got.message)
		}
		if err == nil {
			all = append(all, sent{d, id, server})
		}
	}
	if line.controls == 0 {
		s.t.Error("no control was made: that all is refused shows nothing")
	}
	line.lines = s.oneLineEach(all)
}

// oneLineEach waits until each of the requests is in the audit log, and looks that it is
// there once: at the server that was asked, with the code of its answer. It returns
// how many of those that were refused are.
func (s *suite) oneLineEach(all []sent) (good int) {
	s.t.Helper()
	err := s.within(waitLimit, func(context.Context) error {
		if err := s.log.read(); err != nil {
			return err
		}
		for _, d := range all {
			if len(s.log.of(d)) == 0 {
				return fmt.Errorf("%s (%s at %s, %s) is in no log", d.name, d.by, d.server, d.id)
			}
		}
		return nil
	})
	if err != nil {
		s.t.Error(err)
	}
	for _, d := range all {
		lines := s.log.of(d)
		switch {
		case len(lines) != 1:
			s.t.Errorf("%s, by %s: %d lines in the audit logs, want one: %+v", d.name, d.by, len(lines), lines)
		case lines[0].server != d.server || lines[0].ResponseStatus.Code != d.code:
			s.t.Errorf("%s, by %s: asked at %s and answered %d, and the line is at %s and says %d", d.name, d.by, d.server, d.code, lines[0].server, lines[0].ResponseStatus.Code)
		case d.shut():
			good++
		}
	}
	return good
}

// render is the table.
func render(table []*tally) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "tried\tshut\taudited\tby raw HTTP\tclient-go\tkubectl\tcontrols\t  doors")
	sum := &tally{name: "all", by: map[string]int{}}
	for _, l := range append(slices.Clone(table), sum) {
		fmt.Fprintf(w, "%d\t%d\t%d\t%d\t%d\t%d\t%d\t  %s\n", l.tried, l.shut, l.lines, l.by[raw], l.by[clientGo], l.by[kubectl], l.controls, l.name)
		sum.tried, sum.shut, sum.lines, sum.controls = sum.tried+l.tried, sum.shut+l.shut, sum.lines+l.lines, sum.controls+l.controls
		for by, n := range l.by {
			sum.by[by] += n
		}
	}
	_ = w.Flush()
	return b.String()
}

// soon is a control that counts as soon as it does: rights and webhooks need a moment
// to be known at all servers.
func (s *suite) soon(what string, d door) {
	s.t.Helper()
	for _, n := range s.Nodes()[:servers] {
		if err := s.within(waitLimit, func(context.Context) error {
			got, err := d.try(s, n.Name, newID())
			if err == nil && (got.code != d.code || !strings.Contains(got.message, d.says)) {
				err = fmt.Errorf("%d %.300s", got.code, got.message)
			}
			return err
		}); err != nil {
			s.t.Fatalf("waited %s for: %s at %s; but: %v", waitLimit, what, n.Name, err)
		}
	}
}

// errNotRefused is what client-go's call did.
var errNotRefused = errors.New("it was not refused")

// waitLimit is how long anything may take on a busy machine.
const waitLimit = 2 * time.Minute

// ok is the code of controls that read.
const ok = http.StatusOK
