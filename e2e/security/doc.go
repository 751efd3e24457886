// Package security attacks a whole cluster of three servers and two agents, as
// somebody would who has stolen a key or a token, may make pods, or reaches a port.
// Attacks are entries of tables; a group of them that is shut altogether shows
// nothing unless the same calls succeed for who may make them, so entries say that,
// too. `make security-test` runs it; docs/security.md tells what it found.
package security
