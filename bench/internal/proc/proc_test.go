package proc

import (
	"os"
	"testing"
	"time"
)

// The kernel tells of this process itself.
func TestOne(t *testing.T) {
	u, err := One(os.Getpid())
	if err != nil || u.RSS < 1<<20 || u.Wakeups < 1 {
		t.Errorf("%+v %v", u, err)
	}
	if _, err := One(0); err == nil {
		t.Error("a process that is not there is measured")
	}
}

// Work is counted, and waiting is not.
func TestCPU(t *testing.T) {
	before, err := CPU(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	var now time.Duration
	for x := 1; now < before+10*time.Millisecond; x++ {
		if now, err = CPU(os.Getpid()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := CPU(1 << 22); err == nil { // beyond the greatest number of a process
		t.Error("a process that is not there is measured")
	}
}
