// Package fault breaks a running cluster, at random from a seed, while it is
// being used, and checks what must hold whatever broke:
//
//   - every acknowledged write is there, with that value or a later one, and no
//     read on any node ever goes back;
//   - a watcher on each node gets every revision once and in order;
//   - every member's keyspace has the same hash;
//   - a Deployment has exactly its pods, Ready, and the nodes run exactly their
//     containers;
//   - after Down nothing is left on the machine.
//
// Run it by hand for longer than CI does:
//
//	make build image
//	CLUSTERD_E2E=netns go test ./e2e/fault -run Random -v -timeout 1h -seed 7 -for 30m
//
// TRACK.md lists what it has found.
package fault
