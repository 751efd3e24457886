package subresource

import "testing"

func TestReadsTooSoon(t *testing.T) {
	for agent, want := range map[string]bool{
		"kubectl/v1.32.3 (linux/amd64) kubernetes/32cc146":   true,
		"kubectl1.33/v1.33.7 (linux/amd64) kubernetes/abc":   true,
		"kubectl/v1.34.0 (linux/amd64) kubernetes/abc":       false,
		"kubectl/v1.37.2 (linux/amd64) kubernetes/$Format":   false,
		"clusterctl/v0.1.0 (linux/amd64) kubernetes/$Format": false,
		"":                        false,
		"kubectl/v1.x":            false,
		"my-kubectl/v1.20.0 else": false,
	} {
		if got := readsTooSoon(agent); got != want {
			t.Errorf("%q: %v, want %v", agent, got, want)
		}
	}
}
