// Package nlretry lists kernel objects over netlink and tries again when the
// kernel says that the list changed while it was read. An interrupted list can
// miss entries, and a missed route or link would be taken for a missing one.
package nlretry

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// attempts bounds the retries; on a machine that changes links all the time
// the last answer is better than none, so the caller gets the error then.
const attempts = 10

// List calls fn until it gives a consistent answer.
func List[T any](fn func() ([]T, error)) ([]T, error) {
	var (
		out []T
		err error
	)
	for range attempts {
		out, err = fn()
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return out, err
		}
	}
	return out, err
}
