package join

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Token bucket of each member for changes of what it says of itself. Each is a write
// to the store, which a member could otherwise cause as fast as it can send requests.
const (
	notesAtOnce = 4               // burst, as when it joins while the CA is rotated
	notesEvery  = 5 * time.Second // then one in this time
	// maxNoters bounds the number of buckets. When it is reached all are dropped.
	maxNoters = 1 << 14
)

// notes holds the buckets by the member's id. Its zero value is ready.
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
