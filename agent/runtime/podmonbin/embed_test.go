package podmonbin

import (
	"errors"
	"os"
	"os/exec"
	"testing"
)

// TestOpen: with podmon embedded it can be executed and not be written to;
// without, the error says what to do.
func TestOpen(t *testing.T) {
	f, err := Open()
	if errors.Is(err, ErrAbsent) {
		if _, err := os.Stat("podmon"); err == nil {
			t.Fatal("podmon is there but not embedded")
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
	cmd := exec.Command("/proc/self/fd/3")
	cmd.ExtraFiles = []*os.File{f}
	var exit *exec.ExitError
	if out, err := cmd.CombinedOutput(); !errors.As(err, &exit) || exit.ExitCode() != 2 {
		t.Errorf("usage: %v %s", err, out)
	}
}
