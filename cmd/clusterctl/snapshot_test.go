package main

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// TestPlaceWithoutLinks: a snapshot gets its name on a file system without hard links,
// and replaces nothing there either.
func TestPlaceWithoutLinks(t *testing.T) {
	none := func(string, string) error { return &os.LinkError{Op: "link", Err: syscall.EPERM} }
	dir := t.TempDir()
	part, path := filepath.Join(dir, "part"), filepath.Join(dir, "snapshot")
	for _, link := range []func(string, string) error{none, os.Link} {
		if err := os.WriteFile(part, []byte("new"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := place(link, part, path); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(part); err != nil && !os.IsNotExist(err) { // a link of the same file
			t.Fatal(err)
		}
		if err := os.WriteFile(part, []byte("newer"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := place(link, part, path); err == nil {
			t.Error("a file that was there was replaced")
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != "new" {
			t.Errorf("%q, %v", got, err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}
