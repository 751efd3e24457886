package durable

import (
	"os"
	"path/filepath"
	"sync"
	"testing"
)

func content(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// holds fails the test unless the directory holds that many names.
func holds(t *testing.T, dir string, n int) {
	t.Helper()
	if left, err := os.ReadDir(dir); err != nil || len(left) != n {
		t.Errorf("in the folder: %v %v, want %d names", left, err, n)
	}
}

func TestReplaceFile(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "state.json")
	for _, want := range []string{"the old one is longer", "new", ""} {
		if err := ReplaceFile(name, []byte(want), 0o640); err != nil {
			t.Fatal(err)
		}
		if got := content(t, name); got != want {
			t.Errorf("%q, want %q", got, want)
		}
		if info, err := os.Stat(name); err != nil || info.Mode() != 0o640 {
			t.Errorf("mode %v %v, want 0640", info.Mode(), err)
		}
	}
	holds(t, dir, 1)
}

func TestReplaceFileFails(t *testing.T) {
	dir := t.TempDir()
	if err := ReplaceFile(filepath.Join(dir, "none", "state.json"), nil, 0o600); err == nil {
		t.Error("written into a folder that is not there")
	}
	taken := filepath.Join(dir, "folder")
	if err := os.MkdirAll(filepath.Join(taken, "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := ReplaceFile(taken, nil, 0o600); err == nil {
		t.Error("a folder was replaced by a file")
	}
	holds(t, dir, 1)
}

func TestReplaceFileAtOnce(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "state.json")
	var wg sync.WaitGroup
	for _, s := range []string{"aaaaaaaa", "bbbbbbbb", "cccccccc"} {
		wg.Go(func() {
			if err := ReplaceFile(name, []byte(s), 0o600); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got := content(t, name); got != "aaaaaaaa" && got != "bbbbbbbb" && got != "cccccccc" {
		t.Errorf("%q is of no writer", got)
	}
	holds(t, dir, 1)
}

func TestCommit(t *testing.T) {
	dir, aside := t.TempDir(), t.TempDir()
	f, err := os.CreateTemp(aside, "part-")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString("whole"); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, "blob")
	if err := Commit(f, name); err != nil {
		t.Fatal(err)
	}
	if got := content(t, name); got != "whole" {
		t.Errorf("%q", got)
	}
	holds(t, aside, 0)
	if f, err = os.CreateTemp(aside, "part-"); err != nil {
		t.Fatal(err)
	}
	if err := Commit(f, filepath.Join(dir, "none", "blob")); err == nil {
		t.Error("committed into a folder that is not there")
	}
	holds(t, aside, 0)
}

func TestRename(t *testing.T) {
	dir, other := t.TempDir(), t.TempDir()
	from, to := filepath.Join(dir, "a"), filepath.Join(other, "b")
	if err := os.Mkdir(from, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Rename(from, to); err != nil {
		t.Fatal(err)
	}
	holds(t, dir, 0)
	holds(t, other, 1)
	if err := Rename(from, to); err == nil {
		t.Error("what is not there has another name")
	}
}
