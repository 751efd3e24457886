package agent

import "testing"

func TestExcessBytes(t *testing.T) {
	gc := ImageGC{High: 85, Low: 80}
	for _, tt := range []struct{ free, want int64 }{
		{1000, 0}, {160, 0}, {151, 0},
		{150, 50 * 4096}, {0, 200 * 4096},
	} {
		if got := excessBytes(1000, tt.free, 4096, gc); got != tt.want {
			t.Errorf("%d of 1000 blocks free: %d bytes too many, want %d", tt.free, got, tt.want)
		}
	}
}
