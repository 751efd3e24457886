package leaktest

import (
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { Main(m) }

// linger waits for end to be closed.
func linger(end <-chan struct{}) { <-end }

// TestWait: a goroutine that ends later than goleak waits for is no leak, and one that
// stays is named.
func TestWait(t *testing.T) {
	end := make(chan struct{})
	over := sync.OnceFunc(func() { close(end) })
	defer over()
	go linger(end)
	if err := wait(0); err == nil || !strings.Contains(err.Error(), "linger") {
		t.Errorf("one that stays: %v", err)
	}
	if err := wait(time.Hour, goleak.IgnoreAnyFunction("github.com/clusterd/clusterd/leaktest.linger")); err != nil {
		t.Errorf("one that is ignored: %v", err)
	}
	time.AfterFunc(time.Second, over)
	if err := wait(time.Minute); err != nil {
		t.Errorf("one that ends after a second: %v", err)
	}
}

// tests is a testing.M that has run.
type tests int

func (c tests) Run() int { return int(c) }

// TestPatient: the code of the tests is kept, and after a failure nothing is waited for.
func TestPatient(t *testing.T) {
	end := make(chan struct{})
	defer close(end)
	go linger(end)
	if code := Patient(tests(1)).Run(); code != 1 {
		t.Errorf("code %d", code)
	}
	if code := Patient(tests(0), goleak.IgnoreAnyFunction("github.com/clusterd/clusterd/leaktest.linger")).Run(); code != 0 {
		t.Errorf("code %d", code)
	}
}
