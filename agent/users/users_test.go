package users

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestParseArea(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want Range
	}{
		{"65536-131071", Range{65536, 65536}},
		{"100000-300000", Range{100000, 200001}},
		{"65536-4294967294", Range{65536, 4294967294 - 65536 + 1}},
		{DefaultIDRange.String(), DefaultIDRange},
		{"", Range{}},
		{"65536", Range{}},
		{"65535-200000", Range{}},
		{"0-65535", Range{}},
		{"65536-131070", Range{}},
		{"131072-65536", Range{}},
		{"65536-4294967295", Range{}}, // (uid_t) -1 is nobody's
		{"65536-4294967296", Range{}},
		{"-1-70000", Range{}},
		{"65536-131071-1", Range{}},
	} {
		got, err := ParseIDRange(tt.in)
		if got != tt.want || (err == nil) != (tt.want != Range{}) {
			t.Errorf("%q: %v, %v; want %v", tt.in, got, err, tt.want)
		}
	}
}

func TestRanges(t *testing.T) {
	// Room for four, of which one is granted to others in part.
	r := New(Config{Area: Range{First: Count, Count: 4*Count + Count - 1}, Granted: []Range{{First: 2*Count + 7, Count: 1}}})
	take := func(pod string) Range {
		t.Helper()
		got, err := r.Take(pod)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	a := take("a")
	if a != (Range{Count, Count}) || take("a") != a {
		t.Errorf("the first: %v, and again %v", a, take("a"))
	}
	// A pod that was here before, from another area: it blocks two.
	r.Keep("old", Range{First: 3*Count + 1, Count: Count})
	if got, err := r.Take("b"); !errors.Is(err, ErrFull) {
		t.Errorf("none is free, got %v, %v", got, err)
	}
	if r.Held() != 2 {
		t.Errorf("%d pods hold ranges, want 2", r.Held())
	}
	r.Free("old")
	r.Free("nobody")
	b, c := take("b"), take("c")
	if b != (Range{3 * Count, Count}) || c != (Range{4 * Count, Count}) {
		t.Errorf("%v, %v", b, c)
	}
	if _, err := r.Take("d"); !errors.Is(err, ErrFull) {
		t.Errorf("a fourth: %v", err)
	}
	r.Free("a")
	if d := take("d"); d != a {
		t.Errorf("what was given back: %v, want %v", d, a)
	}
}

func TestRangesAreDisjoint(t *testing.T) {
	r := New(Config{Area: DefaultIDRange})
	var all []Range
	for i := range 500 {
		got, err := r.Take(fmt.Sprint(i))
		if err != nil {
			t.Fatal(err)
		}
		if got.First < Count || slices.ContainsFunc(all, got.overlaps) {
			t.Fatalf("%v overlaps %v or the host's", got, all)
		}
		all = append(all, got)
		if i%3 == 0 {
			r.Free(fmt.Sprint(i))
			all = all[:len(all)-1]
		}
	}
}

func TestGranted(t *testing.T) {
	dir := t.TempDir()
	uids, gids := filepath.Join(dir, "subuid"), filepath.Join(dir, "subgid")
	if err := os.WriteFile(uids, []byte("# people\nalice:100000:65536\nkubelet:65536:7208960\n\nbob:x:1\n1000:165536:65536"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(gids, []byte("alice:200000:65536\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	got, err := Granted(uids, gids, filepath.Join(dir, "none"))
	if want := []Range{{100000, 65536}, {165536, 65536}, {200000, 65536}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	if _, err := Granted(dir); err == nil {
		t.Error("a folder was read")
	}
}

func TestSupportedAsksAgain(t *testing.T) {
	asked, fault := 0, error(nil)
	r := New(Config{Area: DefaultIDRange, Probe: func() error { asked++; return fault }})
	for range 3 {
		if err := r.Supported(); err != nil {
			t.Error(err)
		}
	}
	if asked != 1 {
		t.Errorf("asked %d times for what works", asked)
	}
	fault = errors.New("the kernel is too old")
	r = New(Config{Area: DefaultIDRange, Probe: func() error { asked++; return fault }})
	for range 3 {
		if err := r.Supported(); !errors.Is(err, fault) {
			t.Error(err)
		}
	}
	if asked != 2 {
		t.Errorf("a fault was asked for %d times in a moment", asked-1)
	}
	fault = nil
	r.probed = r.probed.Add(-2 * probeAgain)
	if err := r.Supported(); err != nil {
		t.Errorf("the fault is over: %v", err)
	}
}
