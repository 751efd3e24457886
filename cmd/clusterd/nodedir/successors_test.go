package nodedir

import (
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/pki"
)

// TestSuccessorFiles: an authority that was made is read back with its key, listed with the time at
// which it was written, and gone once it is dropped.
func TestSuccessorFiles(t *testing.T) {
	now := time.Now()
	dir := KeyDir{Dir: Dir(t.TempDir())}
	ca, err := pki.NewCA("test", now)
	if err != nil {
		t.Fatal(err)
	}
	made, err := ca.NewSuccessor(now)
	if err == nil {
		err = dir.WriteSuccessor(made)
	}
	if err != nil {
		t.Fatal(err)
	}
	if got, err := dir.ReadSuccessor(made.ID()); err != nil || got == nil || got.ID() != made.ID() || !got.HasKey() {
		t.Errorf("read back: %v, %v", got, err)
	}
	if got, err := dir.ReadSuccessor(ca.ID()); got != nil || err != nil {
		t.Errorf("one that was never written: %v, %v", got, err)
	}
	files, err := dir.Successors()
	if written, ok := files[made.ID()]; err != nil || len(files) != 1 || !ok || now.Sub(written).Abs() > time.Minute {
		t.Errorf("listed: %v, %v", files, err)
	}
	for range 2 {
		if err := dir.DropSuccessor(made.ID()); err != nil {
			t.Error(err)
		}
	}
	if files, err := dir.Successors(); err != nil || len(files) != 0 {
		t.Errorf("%v is left, %v", files, err)
	}
}
