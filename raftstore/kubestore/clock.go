package kubestore

import (
	"time"

	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/slack"
)

// watchClock is the clock of the watch caches: the real one, but that timers of half a
// second and more end at whole seconds. Each cache has one for bookmarks, which are due
// to the second, and one for what the store has compacted; at rest these were half of
// what woke the process.
type watchClock struct{ clock.RealClock }

func (watchClock) NewTimer(d time.Duration) clock.Timer {
	return watchTimer{clock.RealClock{}.NewTimer(wholeSeconds(d))}
}

type watchTimer struct{ clock.Timer }

func (t watchTimer) Reset(d time.Duration) bool { return t.Timer.Reset(wholeSeconds(d)) }

func wholeSeconds(d time.Duration) time.Duration {
	if d < time.Second/2 {
		return d
	}
	return slack.Align(max(d, time.Second), time.Second)
}
