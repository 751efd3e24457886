package loop

import (
	"time"

	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/slack"
)

// Clock is the real one, but for its tickers: those of all queues, which look every
// ten seconds whether an item is due that a timer has not said so of, tick together.
type Clock struct{ clock.RealClock }

// NewTicker returns one whose first tick may come half a period sooner or later.
func (Clock) NewTicker(d time.Duration) clock.Ticker { return ticker{slack.NewTicker(d)} }

type ticker struct{ *slack.Ticker }

func (t ticker) C() <-chan time.Time { return t.Ticker.C }
