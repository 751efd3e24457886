package proc

import (
	"os"
	"testing"
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
