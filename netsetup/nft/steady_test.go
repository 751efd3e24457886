package nft

import (
	"errors"
	"testing"
)

// TestSteady: what was read while rules changed is read again.
func TestSteady(t *testing.T) {
	torn := errors.New("torn")
	for _, tt := range []struct {
		name    string
		changes int // readings that a change comes into
		reads   int
		err     error
	}{
		{"at rest", 0, 1, nil},
		{"a change", 1, 2, nil},
		{"some changes", 5, 6, nil},
		{"one after the other", readTries, readTries, ErrChanging},
	} {
		gen, reads := uint32(7), 0
		s, err := steady(func() (uint32, error) { return gen, nil }, func() (State, error) {
			reads++
			if reads <= tt.changes {
				gen++
				return State{}, torn
			}
			return State{Whole: true}, nil
		})
		if !errors.Is(err, tt.err) || reads != tt.reads || s.Whole != (tt.err == nil) {
			t.Errorf("%s: whole %t after %d readings, %v; want %d, %v", tt.name, s.Whole, reads, err, tt.reads, tt.err)
		}
	}
	if _, err := steady(func() (uint32, error) { return 0, nil }, func() (State, error) { return State{}, torn }); !errors.Is(err, torn) {
		t.Errorf("a fault at rest: %v", err)
	}
	if _, err := steady(func() (uint32, error) { return 0, torn }, nil); !errors.Is(err, torn) {
		t.Errorf("no generation: %v", err)
	}
}

// changing is a kernel whose rules change all the time.
type changing struct {
	*FakeTables
	replaced int
	rest     bool // nothing changes
}

func (c *changing) Read(t Table, elements bool) (State, error) {
	if c.rest {
		return c.FakeTables.Read(t, elements)
	}
	return State{}, ErrChanging
}

func (c *changing) Replace(t Table) error {
	c.replaced++
	return c.FakeTables.Replace(t)
}

// TestNoReplaceOfWhatIsNotKnown: a table that could not be read as a whole is not
// thrown away.
func TestNoReplaceOfWhatIsNotKnown(t *testing.T) {
	kernel := &changing{FakeTables: &FakeTables{}}
	k := NewKeeper(KeeperConfig{Kernel: kernel})
	if err := k.Set(Table{Name: "t"}); !errors.Is(err, ErrChanging) || kernel.replaced != 0 {
		t.Errorf("set: %v, replaced %d times", err, kernel.replaced)
	}
	if err := k.Check(); !errors.Is(err, ErrChanging) || kernel.replaced != 0 {
		t.Errorf("check: %v, replaced %d times", err, kernel.replaced)
	}
}

// TestOtherDefinitionsAreNotForgotten: a table whose definitions changed while it could not
// be read is replaced with the next Set.
func TestOtherDefinitionsAreNotForgotten(t *testing.T) {
	kernel := &changing{FakeTables: &FakeTables{}, rest: true}
	k := NewKeeper(KeeperConfig{Kernel: kernel})
	chain := func(policy ...string) Table {
		table := Table{Name: "t"}
		for _, name := range policy {
			table.Sets = append(table.Sets, Set{Name: name})
		}
		return table
	}
	if err := k.Set(chain("one")); err != nil {
		t.Fatal(err)
	}
	kernel.rest, kernel.replaced = false, 0
	if err := k.Set(chain("one", "two")); !errors.Is(err, ErrChanging) {
		t.Fatal(err)
	}
	kernel.rest = true
	if err := k.Set(chain("one", "two")); err != nil || kernel.replaced != 1 {
		t.Errorf("%v, replaced %d times", err, kernel.replaced)
	}
}

// The bug: while others changed rules all the time, a change of ours was never made.
func TestChangesDoNotWaitForEver(t *testing.T) {
	kernel := &changing{FakeTables: &FakeTables{}}
	k := NewKeeper(KeeperConfig{Kernel: kernel})
	want := Table{Name: "t", Sets: []Set{{Name: "s", Elements: Elements{"key": ""}}}}
	for i := range UnreadTries - 1 {
		if err := k.Set(want); !errors.Is(err, ErrChanging) || kernel.replaced != 0 {
			t.Fatalf("try %d: %v, replaced %d times", i, err, kernel.replaced)
		}
	}
	if err := k.Set(want); err != nil || kernel.replaced != 1 {
		t.Errorf("the last try: %v, replaced %d times", err, kernel.replaced)
	}
	if err := k.Check(); !errors.Is(err, ErrChanging) || kernel.replaced != 1 {
		t.Errorf("what is in force is not replaced: %v, %d times", err, kernel.replaced)
	}
}

// reads counts how a table is read.
type reads struct {
	*FakeTables
	whole, light int
}

func (r *reads) Read(t Table, elements bool) (State, error) {
	if elements {
		r.whole++
	} else {
		r.light++
	}
	return r.FakeTables.Read(t, elements)
}

// The bug: each change of anybody's rules had all elements read within 2 s.
func TestLightLook(t *testing.T) {
	kernel := &reads{FakeTables: &FakeTables{}}
	k := NewKeeper(KeeperConfig{Kernel: kernel})
	want := Table{Name: "t", Sets: []Set{{Name: "s", Elements: Elements{"key": ""}}}}
	if err := k.Set(want); err != nil {
		t.Fatal(err)
	}
	if err := k.Check(); err != nil { // ours
		t.Fatal(err)
	}
	kernel.whole = 0
	foreign := func() {
		t.Helper()
		if err := kernel.Replace(Table{Name: "foreign"}); err != nil {
			t.Fatal(err)
		}
	}
	foreign()
	for range 3 {
		if err := k.check(false); err != nil {
			t.Fatal(err)
		}
	}
	if kernel.whole != 0 || kernel.light != 1 {
		t.Errorf("one foreign change: all read %d times, the chains %d times", kernel.whole, kernel.light)
	}
	if err := kernel.Delete(want); err != nil {
		t.Fatal(err)
	}
	if err := k.check(false); err != nil || kernel.whole != 1 {
		t.Errorf("the table was gone: %v, all read %d times", err, kernel.whole)
	}
	if s, err := kernel.FakeTables.Read(want, true); err != nil || !s.Whole || len(s.Sets["s"]) != 1 {
		t.Errorf("it is not back: %+v, %v", s, err)
	}
	// An element is missed by the light look, and found by the full one.
	var c Change
	c.Take("s", "key", "")
	if err := kernel.Commit(want, c); err != nil {
		t.Fatal(err)
	}
	if err := k.check(false); err != nil {
		t.Fatal(err)
	}
	if err := k.check(true); err != nil {
		t.Fatal(err)
	}
	if s, err := kernel.FakeTables.Read(want, true); err != nil || len(s.Sets["s"]) != 1 {
		t.Errorf("the element is not back: %+v, %v", s, err)
	}
}
