package nft

import "sync"

// Fake holds rules in memory, as a stand-in for Filter in tests that have no
// kernel to change. Safe for concurrent use.
type Fake struct {
	// Err, when set, is returned by Apply, which then changes nothing.
	Err error

	mu      sync.Mutex
	rules   []string
	applied int
}

// Apply checks and keeps the ruleset.
func (f *Fake) Apply(r Ruleset) error {
	if err := r.check(); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.Err != nil {
		return f.Err
	}
	f.rules = r.lines()
	f.applied++
	return nil
}

// CleanUp drops all rules.
func (f *Fake) CleanUp() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules = nil
	return nil
}

// List returns the rules as Filter.List does.
func (f *Fake) List() ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.rules...), nil
}

// Applied counts the successful calls of Apply.
func (f *Fake) Applied() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.applied
}
