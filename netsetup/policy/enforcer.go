package policy

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/clusterd/clusterd/netsetup/nft"
)

// Kernel holds tables: *nft.Tables.
type Kernel interface {
	Replace(nft.Table) error
	Commit(def nft.Table, c nft.Change) error
	Read(def nft.Table, elements bool) (nft.State, error)
	Generation() (uint32, error)
	Delete(name string) error
}

// Enforcer keeps the kernel's table in step with groups. Safe for concurrent
// use.
type Enforcer struct {
	kernel Kernel
	log    *slog.Logger

	mu   sync.Mutex // guards all below
	want nft.Table
	have nft.State // what the kernel holds, by our own changes
	set  bool      // Set was called
	gen  uint32    // the packet filter's generation at the last look
}

// New returns an Enforcer; it changes nothing yet: rules of a former process
// stay in force until the first Set.
func New(k Kernel, log *slog.Logger) *Enforcer {
	if log == nil {
		log = slog.Default()
	}
	return &Enforcer{kernel: k, log: log}
}

// Set brings the kernel to the groups, in one transaction.
func (e *Enforcer) Set(groups []Group) error {
	want := Compile(groups)
	e.mu.Lock()
	defer e.mu.Unlock()
	first := !e.set
	e.want, e.set = want, true
	if first || !e.have.Whole {
		return e.restore()
	}
	c := nft.Diff(e.have, want)
	if c.Empty() {
		return nil
	}
	if err := e.kernel.Commit(want, c); err != nil {
		e.log.Warn("the packet filter refused a change of policies; its rules are read and put right", "err", err)
		return e.restore()
	}
	e.have = stateOf(want)
	return nil
}

// restore reads the kernel's table and alters what differs; the caller holds
// mu.
func (e *Enforcer) restore() error {
	have, err := e.kernel.Read(e.want, true)
	if err == nil && have.Whole {
		c := nft.Diff(have, e.want)
		if !c.Empty() {
			err = e.kernel.Commit(e.want, c)
		}
		if err == nil {
			e.have = stateOf(e.want)
			return nil
		}
	}
	if err := e.kernel.Replace(e.want); err != nil {
		e.have = nft.State{}
		return fmt.Errorf("rules of network policies: %w", err)
	}
	e.have = stateOf(e.want)
	return nil
}

// stateOf is what a kernel holds after it was given the table.
func stateOf(t nft.Table) nft.State {
	s := nft.State{Whole: true, Chains: map[string][]string{}, Sets: map[string]nft.Elements{}}
	for _, c := range t.Chains {
		s.Chains[c.Name] = c.Comments()
	}
	for _, set := range t.Sets {
		s.Sets[set.Name] = set.Elements
	}
	return s
}

// checkEvery is how often Run asks whether somebody changed rules.
const checkEvery = 2 * time.Second

// Run puts right what others change, until ctx ends.
func (e *Enforcer) Run(ctx context.Context) {
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if err := e.Check(); err != nil {
				e.log.Warn("the rules of network policies are not as they should be", "err", err)
			}
		}
	}
}

// Check puts right what others changed. It is a look at one number while nobody
// changes a rule of any table.
func (e *Enforcer) Check() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.set {
		return nil
	}
	gen, err := e.kernel.Generation()
	if err != nil {
		return err
	}
	if gen == e.gen && e.have.Whole {
		return nil
	}
	if err := e.restore(); err != nil {
		return err
	}
	e.gen = gen // one that was ours costs a look more
	return nil
}

// CleanUp removes the table.
func (e *Enforcer) CleanUp() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.set, e.have = false, nft.State{}
	return e.kernel.Delete(TableName)
}
