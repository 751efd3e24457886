package mvcc

import "sync"

// maxRests bounds how many lists under way are remembered.
const maxRests = 1024

// rest is what a list has left to return behind one of its pages.
type rest struct {
	rev          int64
	prefix, from string
}

// rests remembers how many keys lists under way have left, so that the next
// page need not count them again. It is what this member has served, in no
// snapshot and no hash.
type rests struct {
	mu   sync.Mutex
	by   map[rest]int64
	ring []rest // what by holds, the oldest at next once it is full
	next int
}

func (s *rests) note(r rest, count int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.by[r]; ok {
		return
	}
	if s.by == nil {
		s.by = make(map[rest]int64)
	}
	if len(s.ring) < maxRests {
		s.ring = append(s.ring, r)
	} else {
		delete(s.by, s.ring[s.next])
		s.ring[s.next] = r
		s.next = (s.next + 1) % maxRests
	}
	s.by[r] = count
}

func (s *rests) find(r rest) (int64, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, ok := s.by[r]
	return n, ok
}

// knownCount is how many keys with a prefix there are from a key on, at a
// revision; false where that has to be counted. It is known from the beginning
// of a folder that no key came to or left since that revision, and behind a
// page that this member has served.
func (k *Keyspace) knownCount(rev int64, prefix, from string) (int64, bool) {
	if from <= prefix {
		return k.folders.keysAt(prefix, rev)
	}
	return k.rests.find(rest{rev, prefix, from})
}
