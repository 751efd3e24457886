// Package netsetup is the room of kernel networking from plain values; its
// packages do the work. It holds only the test that joins them all: two nodes,
// pods on each, packets between. See DESIGN.md.
package netsetup
