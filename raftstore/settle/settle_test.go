package settle

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/raftstore/wire"
)

const minute = int64(time.Minute / time.Millisecond)

func open(t *testing.T, dir string, had bool, last uint64) *Settling {
	t.Helper()
	s, err := Open(dir, had, last, 5*time.Minute, Newest)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// look is one Look a minute after the one before.
func look(t *testing.T, s *Settling, now *int64, others ...Other) {
	t.Helper()
	*now += minute
	was := s.Uses()
	changed, err := s.Look(others, *now, 7)
	if err != nil || changed != (s.Uses() != was) {
		t.Fatalf("changed: %t, %v", changed, err)
	}
}

var (
	knows  = Other{ID: "b", Answered: true, Knows: Newest, Uses: Plain}
	older  = Other{ID: "b", Answered: true}
	silent = Other{ID: "b"}
	uses   = Other{ID: "b", Answered: true, Knows: Newest, Uses: Newest}
	knows2 = Other{ID: "b", Answered: true, Knows: Packed, Uses: Plain}
	uses2  = Other{ID: "b", Answered: true, Knows: Packed, Uses: Packed}
	at2    = Other{ID: "b", Answered: true, Knows: Newest, Uses: Packed}
	joins  = Other{ID: "b", Answered: true, Knows: Newest}
)

func TestSettling(t *testing.T) {
	for name, tt := range map[string]struct {
		had    bool
		others []Other // one of each look
		want   int
	}{
		"founded elsewhere, not asked yet":      {false, nil, 0},
		"joins a store of the new format":       {false, []Other{uses}, Newest},
		"joins a store of the old one":          {false, []Other{knows}, Plain},
		"joins, and no member answers":          {false, []Other{silent, silent, silent, silent, silent, silent, silent, silent}, 0},
		"upgraded":                              {true, []Other{knows, knows, knows}, Plain},
		"upgraded for long enough":              {true, []Other{knows, knows, knows, knows, knows, knows}, Newest},
		"one is older":                          {true, []Other{older, older, older, older, older, older, older}, Plain},
		"one was older in between":              {true, []Other{knows, knows, knows, knows, knows, older, knows, knows, knows, knows, knows}, Plain},
		"… and long before":                     {true, []Other{older, knows, knows, knows, knows, knows, knows}, Newest},
		"what passes while one is away":         {true, []Other{knows, knows, silent, silent, silent, silent, silent, knows}, Plain},
		"what passed before one was away":       {true, []Other{knows, knows, knows, silent, knows, knows, knows, knows}, Newest},
		"another one is ahead":                  {true, []Other{uses}, Newest},
		"a member that joins holds nothing up":  {true, []Other{joins, joins, joins, joins, joins, joins}, Newest},
		"there is no way back":                  {true, []Other{uses, older, silent}, Newest},
		"joins a store of the one between":      {false, []Other{at2}, Packed},
		"… whose members know no more":          {false, []Other{uses2, uses2, uses2, uses2, uses2, uses2, uses2}, Packed},
		"another one is ahead by one":           {true, []Other{at2, at2}, Packed},
		"… and both go on":                      {true, []Other{at2, at2, at2, at2, at2, at2}, Newest},
		"one knows the one between":             {true, []Other{knows2, knows2, knows2, knows2, knows2, knows2, knows2}, Plain},
		"one uses it and went back":             {true, []Other{uses2, knows2}, Packed},
		"the clock of the store leaps by a day": {true, []Other{knows, {ID: "leap"}}, Plain},
	} {
		s, now := open(t, t.TempDir(), tt.had, 0), int64(1)
		for _, o := range tt.others {
			if o.ID == "leap" {
				now += 24 * 60 * minute
				o = knows
			}
			look(t, s, &now, o)
		}
		if got := s.Uses(); got != tt.want {
			t.Errorf("%s: format %d, want %d", name, got, tt.want)
		}
	}
}

func TestAlone(t *testing.T) {
	s, now := open(t, t.TempDir(), true, 0), int64(0)
	for range 6 {
		if s.Uses() != Plain {
			t.Fatal("too early")
		}
		look(t, s, &now)
	}
	if s.Uses() != Newest {
		t.Error("never")
	}
}

// A count goes on at the next start, but not if another version may have run in
// between.
func TestRestart(t *testing.T) {
	for name, tt := range map[string]struct {
		last uint64
		want int
	}{"the log is as it was left": {9, Newest}, "the log has grown": {10, Plain}} {
		dir, now := t.TempDir(), int64(0)
		s := open(t, dir, true, 0)
		for range 5 {
			look(t, s, &now, knows)
		}
		if err := s.Close(9); err != nil {
			t.Fatal(err)
		}
		s = open(t, dir, true, tt.last)
		now += 60 * minute // it was off
		look(t, s, &now, knows)
		if s.Uses() != Plain {
			t.Errorf("%s: time counts in which it did not run", name)
		}
		look(t, s, &now, knows)
		if s.Uses() != tt.want {
			t.Errorf("%s: format %d, want %d", name, s.Uses(), tt.want)
		}
		if tt.want == Newest && open(t, dir, true, 1000).Uses() != Newest {
			t.Errorf("%s: the format is forgotten", name)
		}
	}
}

func TestFounded(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, false, 0)
	if err := s.Found(); err != nil || s.Uses() != Newest || open(t, dir, true, 3).Uses() != Newest {
		t.Errorf("%v, format %d", err, s.Uses())
	}
}

func TestRecords(t *testing.T) {
	for content, want := range map[string]error{
		`{"version":1,"format":4}`:  wire.ErrVersion,
		`{"version":2,"format":2}`:  wire.ErrVersion,
		`{"version":1,"format":2}`:  nil,
		`{"version":1,"form`:        nil,
		"":                          nil,
		`{"version":1,"format":-1}`: nil,
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, File), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := Open(dir, true, 0, time.Hour, Newest)
		if !errors.Is(err, want) || err == nil && s.Uses() < Plain {
			t.Errorf("%s: %v", content, err)
		}
	}
}

func TestStatus(t *testing.T) {
	s, now := open(t, t.TempDir(), true, 0), int64(0)
	for _, tt := range []struct {
		other Other
		want  string
	}{
		{knows, "all members know format 3: it is used in 5m0s"},
		{knows, "all members know format 3: it is used in 4m0s"},
		{silent, "format 3 waits for members that do not answer: [b]; then 4m0s to go"},
		{older, "format 3 waits for members that do not know it: [b]"},
		{uses, ""},
	} {
		look(t, s, &now, tt.other)
		if st := s.Status(); st.Note != tt.want || (st.InUse == Newest) != (tt.want == "") || st.Newest != Newest {
			t.Errorf("%+v, want %q", st, tt.want)
		}
	}
	if !strings.Contains(open(t, t.TempDir(), true, 0).Status().Note, "not been asked") {
		t.Error("a member that knows nothing yet says nothing")
	}
}

// A member that has settled on one format counts towards the next one, over a
// restart, too.
func TestNextFormat(t *testing.T) {
	dir, now := t.TempDir(), int64(0)
	s := open(t, dir, true, 0)
	look(t, s, &now, at2)
	if s.Uses() != Packed {
		t.Fatalf("format %d", s.Uses())
	}
	for range 3 {
		look(t, s, &now, at2)
	}
	if err := s.Close(9); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, true, 9)
	if st := s.Status(); st.InUse != Packed || st.Newest != Newest {
		t.Errorf("%+v", st)
	}
	for range 3 {
		look(t, s, &now, at2)
	}
	if s.Uses() != Newest {
		t.Errorf("format %d", s.Uses())
	}
	// A member that knows no more than the one between does not open the directory.
	if _, err := Open(dir, true, 9, time.Hour, Packed); !errors.Is(err, wire.ErrVersion) {
		t.Errorf("an older version opened it: %v", err)
	}
}
