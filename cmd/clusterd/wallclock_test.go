package main

import "testing"

// TestCheckClockBefore: the clock of the machine that tests is good enough to begin a cluster by.
func TestCheckClockBefore(t *testing.T) {
	if err := checkClockBefore("begin"); err != nil {
		t.Error(err)
	}
}
