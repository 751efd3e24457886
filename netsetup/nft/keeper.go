package nft

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/clusterd/clusterd/slack"
)

// TableKernel holds tables: *Tables, or FakeTables in tests.
type TableKernel interface {
	Replace(Table) error
	Commit(def Table, c Change) error
	Read(def Table, elements bool) (State, error)
	Generation() (uint32, error)
	Delete(Table) error
}

// KeeperConfig of a Keeper.
type KeeperConfig struct {
	Kernel TableKernel  // required
	Logger *slog.Logger // default slog.Default()
	// Repaired is called when another program's change of the table was undone, with
	// what it was, "the table was gone" say. It must not block. Default: none.
	Repaired func(table, what string)
}

// Keeper keeps one table of the kernel equal to a value. Safe for concurrent
// use; the last Set wins.
type Keeper struct {
	cfg KeeperConfig

	mu   sync.Mutex // guards all below
	want Table
	have State // what the kernel holds, by our own changes
	set  bool  // Set was called
	// The packet filter's generations at the last full look and at the last one without
	// elements.
	gen, light uint32
	unread     int // tries in a row of Set to read the table, in vain
}

// NewKeeper returns a Keeper; it changes nothing yet: a table of a former
// process stays in force until the first Set.
func NewKeeper(cfg KeeperConfig) *Keeper {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Repaired == nil {
		cfg.Repaired = func(string, string) {}
	}
	return &Keeper{cfg: cfg}
}

// Set brings the kernel to the table, in one transaction that alters what
// differs.
func (k *Keeper) Set(want Table) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	// Other definitions are another table: it is replaced as a whole.
	replace := !k.set || !k.have.Whole || want.fingerprint() != k.want.fingerprint()
	k.want, k.set = want, true
	if replace {
		return k.replace()
	}
	c := Diff(k.have, want)
	if c.Empty() {
		return nil
	}
	if err := k.cfg.Kernel.Commit(want, c); err != nil {
		k.cfg.Logger.Warn("the packet filter refused a change; its rules are read and corrected", "table", want.Name, "err", err)
		return k.replace()
	}
	k.have = StateOf(want)
	return nil
}

// replace is restore for a change of our own. After an error what the kernel has is not known; the
// caller holds mu.
func (k *Keeper) replace() error {
	_, err := k.restore()
	if errors.Is(err, ErrChanging) {
		if k.unread++; k.unread < UnreadTries {
			k.have = State{}
			return err
		}
		// What is wanted is in force for that; what a dynamic set held is lost.
		k.cfg.Logger.Warn("rules of the packet filter change all the time; the table is replaced unread", "table", k.want.Name)
		if err = k.cfg.Kernel.Replace(k.want); err == nil {
			k.have = StateOf(k.want)
		}
	}
	if k.unread = 0; err != nil {
		k.have = State{}
	}
	return err
}

// UnreadTries is how often in a row a table is not read, since rules change all the time,
// before a change that waits for it replaces it.
const UnreadTries = 3

// restore reads the kernel's table and alters what differs, which it tells; the
// caller holds mu.
func (k *Keeper) restore() (changed string, err error) {
	have, err := k.cfg.Kernel.Read(k.want, true)
	if errors.Is(err, ErrChanging) {
		return "", err // the table may be as it should be: the next look tells
	}
	if err == nil && have.Whole {
		c := Diff(have, k.want)
		if c.Empty() {
			k.have = StateOf(k.want)
			return "", nil
		}
		if err = k.cfg.Kernel.Commit(k.want, c); err == nil {
			k.have = StateOf(k.want)
			return fmt.Sprintf("%d of its chains and %d of its elements differed", len(c.Chains)+len(c.Drop), c.Elements()), nil
		}
	}
	if err := k.cfg.Kernel.Replace(k.want); err != nil {
		k.have = State{}
		return "", err
	}
	k.have = StateOf(k.want)
	return "the table was gone or another one", nil
}

// StateOf is what a kernel holds after it was given the table.
func StateOf(t Table) State {
	s := State{Whole: true, Chains: map[string][]string{}, Sets: map[string]Elements{}}
	for _, c := range t.Chains {
		s.Chains[c.Name] = ruleTexts(c)
	}
	for _, set := range t.Sets {
		s.Sets[set.Name] = set.Elements
	}
	return s
}

// KeeperPeriod is how often Run checks whether chains were changed, and KeeperFull how
// often it reads all elements if anything was.
const (
	KeeperPeriod = 2 * time.Second
	KeeperFull   = time.Minute
)

// Run puts right what others change, until ctx ends: a table or chain within
// KeeperPeriod, an element within KeeperFull.
func (k *Keeper) Run(ctx context.Context) {
	tick := slack.NewTicker(KeeperPeriod)
	defer tick.Stop()
	var full time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			all := now.Sub(full) >= KeeperFull
			if err := k.check(all); err != nil {
				k.cfg.Logger.Warn("rules of the packet filter are not as they should be", "err", err)
			} else if all {
				full = now
			}
		}
	}
}

// Check undoes the changes of other programs. It reads one number while no rule
// of any table changes.
func (k *Keeper) Check() error { return k.check(true) }

// check is Check, or without full one that leaves the elements out.
func (k *Keeper) check(full bool) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.set {
		return nil
	}
	gen, err := k.cfg.Kernel.Generation()
	if err != nil {
		return err
	}
	if gen == k.gen && k.have.Whole {
		return nil
	}
	if k.have.Whole && !full {
		if gen == k.light {
			return nil
		}
		have, err := k.cfg.Kernel.Read(k.want, false)
		if errors.Is(err, ErrChanging) {
			return err
		}
		if err == nil && have.Whole && have.sameChains(k.want) {
			k.light = gen
			return nil
		}
	}
	known := k.have.Whole
	changed, err := k.restore()
	if err != nil {
		return err
	}
	if known && changed != "" {
		k.cfg.Logger.Warn("rules of the packet filter were changed by another program and are restored", "table", k.want.Name, "what", changed)
		k.cfg.Repaired(k.want.Name, changed)
	}
	k.gen = gen // one that was ours costs a look more
	return nil
}

// CleanUp removes the table; what was set is forgotten.
func (k *Keeper) CleanUp(t Table) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.set, k.have = false, State{}
	return k.cfg.Kernel.Delete(t)
}
