// Package e2e tests whole clusters of real machines, as near as one machine
// allows: each test starts three nodes, does something to them, and in the end
// looks whether anything of them is left. One file a behaviour.
package e2e
