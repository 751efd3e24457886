package pod

import "testing"

func TestCPUWeight(t *testing.T) {
	for shares, want := range map[uint64]uint64{2: 1, 512: 59, 1024: 100, 262144: 10000} {
		if got := cpuWeight(shares); got != want {
			t.Errorf("%d shares: weight %d, want %d", shares, got, want)
		}
	}
}
