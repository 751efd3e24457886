package image

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// deepTree makes directories below dir, one in the other, beyond all lengths of paths.
func deepTree(t *testing.T, dir string, depth int) {
	t.Helper()
	at, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range depth {
		name := "deep-1" // as one that was moved up is called
		if err := unix.Mkdirat(at, name, 0o700); err != nil {
			t.Fatal(err)
		}
		below, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(at)
		at = below
	}
	_ = unix.Close(at)
}

// fewFiles lets this process have few more descriptors than it has.
func fewFiles(t *testing.T) {
	t.Helper()
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	few := before
	few.Cur = 200
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &before) })
}

// TestRemoveTree: a tree of any depth goes with few descriptors, links are not followed,
// and more entries than are read at once go, too.
func TestRemoveTree(t *testing.T) {
	parent := t.TempDir()
	dir, outside := filepath.Join(parent, "dir"), filepath.Join(parent, "outside")
	for _, d := range []string{dir, filepath.Join(dir, "wide"), outside} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 1500 {
		if err := os.WriteFile(filepath.Join(dir, "wide", strconv.Itoa(i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Symlink(outside, filepath.Join(dir, "link")), os.WriteFile(filepath.Join(outside, "f"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	deepTree(t, dir, 3000)
	fewFiles(t)
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := removeTree(canceled, dir); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if err := removeTree(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it is still there: %v", err)
	}
	if _, err := os.Stat(filepath.Join(outside, "f")); err != nil {
		t.Error(err)
	}
	if err := removeTree(t.Context(), dir); err != nil {
		t.Errorf("one that is not there: %v", err)
	}
}

// TestOpenWithDeepLeftovers: what a process has left behind, however deep, keeps no store
// from opening, and goes.
func TestOpenWithDeepLeftovers(t *testing.T) {
	dir := t.TempDir()
	if err := open(t, dir).Close(); err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"tmp/layer-1", "layers/7"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
		deepTree(t, filepath.Join(dir, d), 3000)
	}
	fewFiles(t)
	s := open(t, dir)
	s.nothingLeft(t)
	if left := s.layerDirs(t); len(left) > 0 {
		t.Errorf("%q", left)
	}
	until(t, "what was left is removed", func() bool {
		_, err := os.Lstat(filepath.Join(dir, oldDir))
		return errors.Is(err, os.ErrNotExist)
	})
}
