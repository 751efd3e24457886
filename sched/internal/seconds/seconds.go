// Package seconds turns numbers of seconds, as objects hold them, into durations.
package seconds

import (
	"math"
	"time"
)

// longest is the longest time in seconds that a time.Duration can hold: 292 years.
const longest = int64(math.MaxInt64 / time.Second)

// Duration is that many seconds, or the longest time there is, into the past or into
// the future, where a time.Duration cannot hold them.
func Duration(n int64) time.Duration {
	return time.Duration(min(max(n, -longest), longest)) * time.Second
}
