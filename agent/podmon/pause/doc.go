//go:build !cgo

// Package pause links the pause process into podmon. Without cgo it is empty,
// so that tools can load it; podmon itself cannot be built that way.
package pause
