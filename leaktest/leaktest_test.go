package leaktest

import (
	"testing"
	"time"

	"go.uber.org/goleak"
)

// program is one of tests that leaves a goroutine, for a while.
type program struct {
	code int
	end  chan struct{}
}

func (p program) Run() int {
	go func() { <-p.end }()
	return p.code
}

// TestPatience: what ends later than goleak looks is waited for; a program that has
// failed is not held up.
func TestPatience(t *testing.T) {
	end := make(chan struct{})
	time.AfterFunc(2*time.Second, func() { close(end) })
	if code := (patient{TestingM: program{0, end}}).Run(); code != 0 {
		t.Errorf("it ended with %d", code)
	}
	if err := goleak.Find(); err != nil {
		t.Error("not waited for:", err)
	}
	end = make(chan struct{})
	defer close(end)
	if code := (patient{TestingM: program{1, end}}).Run(); code != 1 {
		t.Errorf("it ended with %d", code)
	}
}
