package imageworkerbin

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestOpen: with imageworker embedded it can be executed and not be written to; without,
// the error says what to do.
func TestOpen(t *testing.T) {
	f, err := Open()
	if errors.Is(err, ErrAbsent) {
		if _, err := os.Stat("imageworker"); err == nil {
			t.Fatal("imageworker is there but not embedded")
		}
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte("x"), 0); err == nil {
		t.Error("it can be changed")
	}
	cmd := exec.Command("/proc/self/fd/3") // which is no connection to a parent
	cmd.ExtraFiles = []*os.File{f}
	var exit *exec.ExitError
	if out, err := cmd.CombinedOutput(); !errors.As(err, &exit) || exit.ExitCode() != 2 || !strings.Contains(string(out), "started by clusterd") {
		t.Errorf("by hand: %v %s", err, out)
	}
}
