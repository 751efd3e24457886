package netns

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestNamesAreFileNames(t *testing.T) {
	d, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"", ".", "..", "a/b", "../x", "a\x00b", strings.Repeat("x", 256)} {
		if _, err := d.Create(name); err == nil {
			t.Errorf("Create(%q) passed", name)
		}
		if err := d.Delete(name); err == nil {
			t.Errorf("Delete(%q) passed", name)
		}
	}
}

func TestDeleteUnknownIsNoError(t *testing.T) {
	d, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Delete("absent"); err != nil {
		t.Fatal(err)
	}
}

func TestDoRefusesPlainFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	err := Do(path, func() error { t.Error("ran"); return nil })
	if !errors.Is(err, ErrNotNamespace) {
		t.Fatalf("got %v, want ErrNotNamespace", err)
	}
	err = Do(path+"x", func() error { return nil })
	if !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("got %v, want ErrNotExist", err)
	}
}

func TestOnThreadEndings(t *testing.T) {
	want := errors.New("mine")
	if err := onThread(func() error { return want }); !errors.Is(err, want) {
		t.Fatalf("got %v", err)
	}
	func() {
		defer func() {
			if p := recover(); p != "boom" {
				t.Errorf("recovered %v, want boom", p)
			}
		}()
		_ = onThread(func() error { panic("boom") })
	}()
}
