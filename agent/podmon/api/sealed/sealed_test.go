package sealed

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
)

func TestNew(t *testing.T) {
	f, err := New("program", strings.NewReader("#!/bin/sh\necho it runs\n"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if !Is(f) {
		t.Error("it is not sealed")
	}
	if _, err := f.Write([]byte("x")); err == nil {
		t.Error("it was written to")
	}
	if err := f.Truncate(0); err == nil {
		t.Error("it was cut")
	}
	path := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd())
	if out, err := exec.Command(path).CombinedOutput(); err != nil || string(out) != "it runs\n" {
		t.Errorf("it does not run: %v %s", err, out)
	}
}

func TestIsNot(t *testing.T) {
	f, err := os.Create(t.TempDir() + "/f")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if Is(f) {
		t.Error("an ordinary file passes for a sealed one")
	}
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

func TestNewTellsOfTheProgram(t *testing.T) {
	if _, err := New("program", broken{}); err == nil {
		t.Error("half a program was sealed")
	}
}
