package loop

import (
	"time"

	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/slack"
)

// Clock is the real one, but for its tickers, of which each queue has two. One looks
// every ten seconds whether an item is due that a timer has not said so of; those of all
// queues tick together. The other writes down, twice a second, how long unfinished work
// has taken (workqueue_unfinished_work_seconds); every workTick is often enough for those
// who read it, and with 60 queues it was what woke the process most.
type Clock struct{ clock.RealClock }

const workTick = 5 * time.Second

// NewTicker returns one whose first tick may come half a period sooner or later. Periods
// below a second become workTick.
func (Clock) NewTicker(d time.Duration) clock.Ticker {
	if d < time.Second {
		d = workTick
	}
	return ticker{slack.NewTicker(d)}
}

type ticker struct{ *slack.Ticker }

func (t ticker) C() <-chan time.Time { return t.Ticker.C }
