package join

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// How often what a member says of itself is written down: so often in one go, as
// when it arrives while the authority is exchanged, and once in so long after that.
// Each is a change of the store, which a member's key would otherwise make as fast
// as it can ask.
const (
	notesAtOnce = 4
	notesEvery  = 5 * time.Second
	// maxNoters bounds the memory of members. When it is full all are forgotten.
	maxNoters = 1 << 14
)

// notes counts them, by the member's id. Its zero value is ready.
type notes struct {
	mu sync.Mutex // guards of
	of map[string]*rate.Limiter
}

// allow reports whether something may be written down for a member now, and counts
// it. A member that is refused says the same when it next asks.
func (n *notes) allow(id string, now time.Time) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	limit := n.of[id]
	if limit == nil {
		if n.of == nil || len(n.of) >= maxNoters {
			n.of = map[string]*rate.Limiter{}
		}
		limit = rate.NewLimiter(rate.Every(notesEvery), notesAtOnce)
		n.of[id] = limit
	}
	return limit.AllowN(now, 1)
}
