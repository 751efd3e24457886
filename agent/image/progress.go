package image

import (
	"cmp"
	"slices"
	"sync/atomic"
)

// Progress is how far a pull is.
type Progress struct {
	Ref string // full name
	// Done of Total compressed bytes are here; layers that were here before count in
	// neither.
	Done, Total int64
}

// progress is that of one pull under way.
type progress struct {
	ref   string
	total int64
	done  atomic.Int64
	// look, if set, is called when much has changed at once.
	look func()
}

// Pulling are the pulls that fetch layers now, by name; of several of one name, with
// different credentials, the one that is furthest.
func (s *Store) Pulling() []Progress {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Progress
	for p := range s.pulling {
		out = append(out, Progress{p.ref, p.done.Load(), p.total})
	}
	slices.SortFunc(out, func(a, b Progress) int { return cmp.Or(cmp.Compare(a.Ref, b.Ref), cmp.Compare(b.Done, a.Done)) })
	return slices.CompactFunc(out, func(a, b Progress) bool { return a.Ref == b.Ref })
}

// begin puts a pull among those under way until end is called.
func (s *Store) begin(p *progress) (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pulling == nil {
		s.pulling = map[*progress]struct{}{}
	}
	s.pulling[p] = struct{}{}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.pulling, p)
	}
}
