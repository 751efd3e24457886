package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// script runs a script of hack/ in dir.
func script(t *testing.T, dir, name, arg string, env ...string) (string, error) {
	t.Helper()
	path, err := filepath.Abs("../../hack/" + name)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, arg)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// TestOwn: after `sudo make demo` a clone can be built in without sudo.
func TestOwn(t *testing.T) {
	b, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	for _, target := range []string{"build", "image", "deb"} { // which the others go through
		if !regexp.MustCompile(`(?m)^` + target + `:.*\n(\t.*\n)*\t@hack/own\.sh\n`).Match(b) {
			t.Errorf("make %s leaves what it made to root", target)
		}
	}
	if os.Geteuid() != 0 {
		t.Skip("only root gives files away")
	}
	dir := t.TempDir()
	for _, name := range []string{"bin/clusterd", "dist/a.deb", "README.md"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	owner := func(name string) uint32 {
		t.Helper()
		st, err := os.Lstat(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return st.Sys().(*syscall.Stat_t).Uid
	}
	for _, env := range [][]string{{"SUDO_UID=", "SUDO_GID="}, {"SUDO_UID=0", "SUDO_GID=0"}} {
		if out, err := script(t, dir, "own.sh", "", env...); err != nil || owner("bin") != 0 {
			t.Errorf("%q: bin is %d's, %v: %s", env, owner("bin"), err, out)
		}
	}
	if out, err := script(t, dir, "own.sh", "", "SUDO_UID=4711", "SUDO_GID=4712"); err != nil {
		t.Fatal(err, out)
	}
	for name, want := range map[string]uint32{"bin": 4711, "bin/clusterd": 4711, "dist/a.deb": 4711, "README.md": 0} {
		if got := owner(name); got != want {
			t.Errorf("%s is %d's, want %d", name, got, want)
		}
	}
}

// TestGoVersion: a Go that cannot build this is named before it fails with a sentence
// about go.mod.
func TestGoVersion(t *testing.T) {
	for version, want := range map[string]string{
		"go1.19.8":     "go is 1.19.8, and 1.26",
		"go1.9":        "go is 1.9, and",
		"":             "go is of an unknown version",
		"go1.27rc1":    "",
		"go1.26.0":     "",
		"go1.26.3 X:a": "",
	} {
		fake := filepath.Join(t.TempDir(), "go")
		if err := os.WriteFile(fake, []byte("#!/bin/sh\necho '"+version+"'\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		out, err := script(t, "../..", "deps.sh", "go", "GO="+fake)
		if (err == nil) != (want == "") || !strings.Contains(out, want) {
			t.Errorf("%q: %v: %s", version, err, out)
		}
	}
}
