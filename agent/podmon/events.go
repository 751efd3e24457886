package podmon

import (
	"sync"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

// eventBuffer is how many events a subscriber may lag behind before it is cut
// off; it then lists and subscribes again.
const eventBuffer = 1024

// hub passes events on to subscribers. Its sender never waits.
type hub struct {
	mu   sync.Mutex
	subs map[chan api.Event]struct{}
}

// subscribe gives a channel that is closed when its reader lags too far behind
// or cancel is called.
func (h *hub) subscribe() (events <-chan api.Event, cancel func()) {
	ch := make(chan api.Event, eventBuffer)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.subs == nil {
		h.subs = map[chan api.Event]struct{}{}
	}
	h.subs[ch] = struct{}{}
	return ch, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.drop(ch)
	}
}

func (h *hub) drop(ch chan api.Event) {
	if _, ok := h.subs[ch]; ok {
		delete(h.subs, ch)
		close(ch)
	}
}

func (h *hub) send(e api.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for ch := range h.subs {
		select {
		case ch <- e:
		default:
			h.drop(ch)
		}
	}
}
