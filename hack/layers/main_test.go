package main

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// TestLayers: modes, links and contents are the folder's, and what a registry serves is
// the same image.
func TestLayers(t *testing.T) {
	dir, out := t.TempDir(), filepath.Join(t.TempDir(), "image.tar")
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "program"), []byte("text"), 0o600),
		os.Chmod(filepath.Join(dir, "program"), 0o755|os.ModeSetuid), os.Symlink("program", filepath.Join(dir, "link")), os.Mkdir(filepath.Join(dir, "empty"), 0o700)); err != nil {
		t.Fatal(err)
	}
	config := v1.Config{Cmd: []string{"/program"}, User: "7"}
	if err := run(out, "", "example.org/a/image:1", "amd64", config, []string{dir}); err != nil {
		t.Fatal(err)
	}
	img, err := tarball.ImageFromPath(out, nil)
	if err != nil {
		t.Fatal(err)
	}
	file, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if file.Config.User != "7" || len(file.Config.Cmd) != 1 {
		t.Errorf("%+v", file.Config)
	}
	layers, err := img.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%d layers, %v", len(layers), err)
	}
	text, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer text.Close()
	var got []string
	for r := tar.NewReader(text); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, h.Name+" "+h.FileInfo().Mode().String()+" "+h.Linkname)
	}
	const want = "empty/ drwx------ |link Lrwxrwxrwx program|program urwxr-xr-x "
	if s := strings.Join(got, "|"); s != want {
		t.Errorf("%s\nwant %s", s, want)
	}

	registry := t.TempDir()
	if err := run("", registry, "example.org/a/image:1", "amd64", config, []string{dir}); err != nil {
		t.Fatal(err)
	}
	digest, err := os.ReadFile(filepath.Join(registry, "image/manifests/1"))
	if err != nil {
		t.Fatal(err)
	}
	hex := strings.TrimPrefix(strings.TrimSpace(string(digest)), "sha256:")
	manifest, err := os.ReadFile(filepath.Join(registry, "image/manifests/sha256", hex[:2], hex, "data"))
	if err != nil || !strings.Contains(string(manifest), "layers") {
		t.Errorf("manifest %q, %v", manifest, err)
	}
	if blobs, err := filepath.Glob(filepath.Join(registry, "image/blobs/sha256/*/*/data")); err != nil || len(blobs) != 2 {
		t.Errorf("blobs %q, %v: want the layer and the config", blobs, err)
	}
	for _, wrong := range [][]string{{out, registry}, {"", ""}} {
		if err := run(wrong[0], wrong[1], "example.org/a/image:1", "amd64", config, []string{dir}); err == nil {
			t.Errorf("%q: no error", wrong)
		}
	}
	if err := run(out, "", "example.org/a/image:1", "amd64", config, []string{out}); err == nil || !strings.Contains(err.Error(), "not a folder") {
		t.Errorf("a file: %v", err)
	}
}
