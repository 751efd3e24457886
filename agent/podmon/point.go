//go:build !faultpoints

package podmon

// point marks a place where podmon may be killed. Tests build podmon with the
// tag faultpoints and have it killed there: see TestRootPodmonKilledAt in
// agent/runtime.
func point(string) {}
