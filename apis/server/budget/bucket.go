package budget

import "time"

// bucket is a token bucket that counts what was used instead of what is left.
// Times are unix milliseconds of the store's clock and may come out of order.
type bucket struct {
	used float64 // bytes, as of at; at most twice the burst
	at   int64
}

// limits are what every bucket has: burst bytes at once, rate bytes a
// millisecond after that.
type limits struct{ burst, rate float64 }

// limitsFor lets a writer fill at most half of the history in any window: a
// quarter at once, and a quarter in the course of the window.
func limitsFor(historyBytes int64, window time.Duration) limits {
	quarter := float64(historyBytes) / 4
	return limits{burst: quarter, rate: quarter / float64(max(1, window.Milliseconds()))}
}

// use counts bytes that were written at millis. It refuses nothing: what is in
// the log was written.
func (b *bucket) use(l limits, millis int64, bytes float64) {
	b.drain(l, millis)
	// A writer far beyond its share waits one window at most.
	b.used = min(b.used+bytes, 2*l.burst)
}

// wait is how long after millis a writer with so many bytes under way may write
// again: 0 is now. A write may begin while there is any room left, however
// large it is.
func (b *bucket) wait(l limits, millis int64, pending float64) time.Duration {
	b.drain(l, millis)
	over := b.used + pending - l.burst
	if over < 0 {
		return 0
	}
	return time.Duration(over/l.rate+1) * time.Millisecond
}

func (b *bucket) drain(l limits, millis int64) {
	if millis > b.at {
		b.used = max(0, b.used-float64(millis-b.at)*l.rate)
		b.at = millis
	}
}
