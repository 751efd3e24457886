package stats

import (
	"sync"
	"time"
)

// rates turns counters of processor time into rates, from one question to the
// next.
type rates struct {
	mu   sync.Mutex
	last map[string]sample
}

type sample struct {
	value uint64
	at    time.Time
	rate  *uint64
}

// minPeriod is the shortest time over which a rate says something.
const minPeriod = time.Second

// of gives the rate in billionths of a processor since the last question, nil
// at the first one. Questions in quick succession get the same answer.
func (r *rates) of(key string, value uint64, at time.Time) *uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.last == nil {
		r.last = map[string]sample{}
	}
	before, known := r.last[key]
	if !known || value < before.value {
		r.last[key] = sample{value: value, at: at}
		return nil
	}
	past := at.Sub(before.at)
	if past < minPeriod {
		return before.rate
	}
	rate := uint64(float64(value-before.value) / past.Seconds())
	r.last[key] = sample{value, at, &rate}
	return &rate
}

// keep forgets all but the given keys and the node itself.
func (r *rates) keep(alive map[string]bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key := range r.last {
		if !alive[key] && key != "node" {
			delete(r.last, key)
		}
	}
}
