package alloc

import "time"

// SetNow gives a test the clock.
func (a *Addresses) SetNow(now func() time.Time) { a.leases.now = now }
