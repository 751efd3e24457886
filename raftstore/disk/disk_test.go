package disk

import (
	"testing"
	"time"
)

func TestStuckDisk(t *testing.T) {
	for _, tc := range []struct {
		usual, now time.Duration
		stuck      bool
	}{
		{0, 0, false},
		{time.Millisecond, time.Millisecond, false},
		{time.Millisecond, 3 * time.Second, true},
		{2 * time.Second, 3 * time.Second, false}, // as all of them
		{2 * time.Second, time.Minute, true},
	} {
		d := &Disk{slow: time.Second, usual: tc.usual}
		done := d.Write()
		d.since = d.since.Add(-tc.now)
		if got := d.Stuck(); got != tc.stuck {
			t.Errorf("a write for %v where %v is usual: stuck %v", tc.now, tc.usual, got)
		}
		done()
		if d.Stuck() {
			t.Error("stuck without a write")
		}
		if tc.now > tc.usual && d.usual <= tc.usual {
			t.Errorf("usual is %v after a write of %v", d.usual, tc.now)
		}
	}
}
