//go:build !amd64

package main

// machineCalls are the system calls that only one architecture has.
func machineCalls() []way { return nil }
