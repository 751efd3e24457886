package image

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestOwn: the image is made of the program that is there, under its own name
// only, and again when the program is another.
func TestOwn(t *testing.T) {
	const ref = "clusterd.local/self:built-in"
	program := filepath.Join(t.TempDir(), "program")
	write := func(body string) {
		if err := os.WriteFile(program, []byte(body), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	reopen := func() *Store {
		s, err := Open(Config{Dir: dir, Logger: slog.New(slog.DiscardHandler), Own: Own{Ref: ref, Program: program, Path: "/bin/self"}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		return s
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	write("one")
	s := reopen()
	if _, ok, err := s.Get(ref); ok || err != nil {
		t.Fatal("there before it was made", err)
	}
	img, err := s.Ensure(ctx, ref, Auth{})
	if err != nil {
		t.Fatal(err)
	}
	if img.Config.Entrypoint[0] != "/bin/self" || img.Config.User != ownUser || img.Pinned {
		t.Errorf("%+v", img)
	}
	layers := s.layerDirs(t)
	if len(layers) != 1 || read(t, layers[0], "bin", "self") != "one" {
		t.Fatalf("layers %v", layers)
	}
	if fi, err := os.Stat(filepath.Join(layers[0], "bin", "self")); err != nil || fi.Mode().Perm() != 0o755 {
		t.Error(fi, err)
	}
	if again, err := s.Pull(ctx, ref, Auth{}); err != nil || again.ID != img.ID {
		t.Error("another image of the same program", again.ID, err)
	}
	s.nothingLeft(t)
	_ = s.Close()

	write("two, by an upgrade")
	s = reopen()
	if _, ok, err := s.Get(ref); ok || err != nil {
		t.Error("the old program's image is given for the new one's", err)
	}
	if _, ok, _ := s.Get(img.ID); !ok {
		t.Error("the old one, which may be in use, is gone")
	}
	next, err := s.Ensure(ctx, ref, Auth{})
	if err != nil || next.ID == img.ID {
		t.Fatal(next.ID, err)
	}
	if got, ok, err := s.Get(ref); !ok || err != nil || got.ID != next.ID {
		t.Error(got.ID, ok, err)
	}
	_ = s.Close()

	if err := os.Remove(program); err != nil {
		t.Fatal(err)
	}
	s = reopen()
	_, err = s.Ensure(ctx, ref, Auth{})
	var pull *PullError
	if !errors.As(err, &pull) || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no program: %v", err)
	}
}
