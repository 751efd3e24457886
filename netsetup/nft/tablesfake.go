package nft

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// FakeTables holds tables in memory, as a stand-in for Tables in tests that
// have no kernel to change. It refuses what the kernel refuses: an element that
// is there, or is not, and the end of a chain that something leads to. Safe for
// concurrent use.
type FakeTables struct {
	mu     sync.Mutex
	tables map[string]*fakeTable
	gen    uint32
	// Commits and Elements count the transactions and the elements they altered.
	Commits, Altered int
}

type fakeTable struct {
	fingerprint string
	chains      map[string][]string
	sets        map[string]Elements
}

// Replace is Tables.Replace.
func (f *FakeTables) Replace(want Table) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	t := &fakeTable{want.fingerprint(), map[string][]string{}, map[string]Elements{}}
	for _, c := range want.Chains {
		t.chains[c.Name] = ruleTexts(c)
	}
	for _, s := range want.Sets {
		t.sets[s.Name] = maps.Clone(s.Elements)
		if t.sets[s.Name] == nil {
			t.sets[s.Name] = Elements{}
		}
	}
	if err := t.whole(); err != nil {
		return err
	}
	if f.tables == nil {
		f.tables = map[string]*fakeTable{}
	}
	f.tables[want.Name] = t
	f.gen++
	return nil
}

// whole reports a verdict or rule that leads nowhere.
func (t *fakeTable) whole() error {
	targets := func(text string) error {
		words := strings.Fields(text)
		for i, w := range words {
			if (w == "goto" || w == "jump") && i+1 < len(words) {
				if _, ok := t.chains[words[i+1]]; !ok {
					return fmt.Errorf("no chain %q: no such file or directory", words[i+1])
				}
			}
		}
		return nil
	}
	for _, rules := range t.chains {
		for _, r := range rules {
			if err := targets(r); err != nil {
				return err
			}
		}
	}
	for _, s := range t.sets {
		for _, data := range s {
			if strings.HasPrefix(data, "goto ") {
				if err := targets(data); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// Commit is Tables.Commit.
func (f *FakeTables) Commit(def Table, c Change) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	old, ok := f.tables[def.Name]
	if !ok {
		return fmt.Errorf("table %s: no such file or directory", def.Name)
	}
	t := &fakeTable{old.fingerprint, maps.Clone(old.chains), map[string]Elements{}}
	for name, s := range old.sets {
		t.sets[name] = maps.Clone(s)
	}
	for _, chain := range c.Chains {
		t.chains[chain.Name] = ruleTexts(chain)
	}
	for set, elements := range c.Remove {
		for key := range elements {
			if _, ok := t.sets[set][key]; !ok {
				return fmt.Errorf("set %s: remove %x: %w", set, key, unix.ENOENT)
			}
			delete(t.sets[set], key)
		}
	}
	for set, elements := range c.Add {
		for key, data := range elements {
			if have, ok := t.sets[set][key]; ok && have != data {
				return fmt.Errorf("set %s: add %x: file exists", set, key)
			}
			t.sets[set][key] = data
		}
	}
	for _, name := range c.Drop {
		delete(t.chains, name)
	}
	if err := t.whole(); err != nil {
		return err
	}
	f.tables[def.Name] = t
	f.gen++
	f.Commits++
	f.Altered += c.Elements()
	return nil
}

// Read is Tables.Read.
func (f *FakeTables) Read(def Table, elements bool) (State, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	t, ok := f.tables[def.Name]
	if !ok || t.fingerprint != def.fingerprint() {
		return State{}, nil
	}
	s := State{Whole: true, Chains: maps.Clone(t.chains), Sets: map[string]Elements{}}
	for _, d := range def.Sets {
		if elements && !d.Dynamic {
			s.Sets[d.Name] = maps.Clone(t.sets[d.Name])
		}
	}
	return s, nil
}

// Elements is Tables.Elements.
func (f *FakeTables) Elements(table string, s Set) (Elements, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if t, ok := f.tables[table]; ok {
		return maps.Clone(t.sets[s.Name]), nil
	}
	return nil, nil
}

// Generation is Tables.Generation.
func (f *FakeTables) Generation() (uint32, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.gen, nil
}

// Delete is Tables.Delete.
func (f *FakeTables) Delete(t Table) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.tables, t.Name)
	f.gen++
	return nil
}

// Names are the tables that there are.
func (f *FakeTables) Names() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Sorted(maps.Keys(f.tables))
}
