package nodedir

import (
	"errors"
	"testing"
	"time"
)

// TestLockOutlivesItsHolderShortly: a clusterd that was killed and is started
// at once may find that its lock is still held for a moment.
func TestLockOutlivesItsHolderShortly(t *testing.T) {
	dir := Dir(t.TempDir())
	held, err := dir.Lock()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dir.Lock(); !errors.Is(err, ErrInUse) {
		t.Fatalf("a lock that is held: %v", err)
	}
	time.AfterFunc(LockTimeout/10, func() { held.Close() })
	again, err := dir.Lock()
	for range 3 { // a busy machine may come late to close the first
		if errors.Is(err, ErrInUse) {
			again, err = dir.Lock()
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
}
