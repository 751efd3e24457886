package main

import (
	"errors"
	"testing"
	"time"
)

// TestLockOutlivesItsHolderShortly: a clusterd that was killed and is started
// at once may find that its lock is still held for a moment.
func TestLockOutlivesItsHolderShortly(t *testing.T) {
	dir := dataDir(t.TempDir())
	held, err := dir.lock()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dir.lock(); !errors.Is(err, errInUse) {
		t.Fatalf("a lock that is held: %v", err)
	}
	time.AfterFunc(lockTimeout/10, func() { held.Close() })
	again, err := dir.lock()
	for range 3 { // a busy machine may come late to close the first
		if errors.Is(err, errInUse) {
			again, err = dir.lock()
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
}
