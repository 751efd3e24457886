package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// FuzzLoad loads an image file of which everything is hostile: its list, its
// config, a layer. Whatever comes, nothing is written outside the store,
// nothing temporary stays, and an image that was taken is whole.
func FuzzLoad(f *testing.F) {
	layer := archive(f, entry{name: "bin/"}, entry{name: "bin/sh", body: "x", mode: 0o755}, entry{name: "l", typ: tar.TypeSymlink, body: "../../etc"})
	config, err := build(f, v1.Config{Cmd: []string{"sh"}}, layer).RawConfigFile()
	if err != nil {
		f.Fatal(err)
	}
	list := []byte(`[{"Config":"config.json","RepoTags":["a:1"],"Layers":["layer.tar"]}]`)
	f.Add(list, config, layer)
	f.Add([]byte(`[{"Config":"config.json","RepoTags":["A B"],"Layers":["layer.tar"]}]`), config, layer)
	f.Add([]byte(`[{"Config":"../config.json","RepoTags":null,"Layers":["layer.tar","layer.tar"]}]`), config, layer)
	f.Add([]byte(`[{"Config":"config.json","Layers":[]},{"Config":"config.json","Layers":["config.json"]}]`), []byte(`{"rootfs":{"type":"layers","diff_ids":[]}}`), []byte{})
	f.Add(list, bytes.Replace(config, []byte("sha256"), []byte("sha512"), 1), layer)
	f.Add(list, []byte(`{"os":"linux","rootfs":{"diff_ids":[""]},"config":{"Env":null}}`), []byte{0x1f, 0x8b, 8})
	f.Add(list, config, layer[:700])
	f.Fuzz(func(t *testing.T, list, config, layer []byte) {
		var file bytes.Buffer
		w := tar.NewWriter(&file)
		for name, b := range map[string][]byte{"manifest.json": list, "config.json": config, "layer.tar": layer} {
			if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(b))}); err != nil {
				t.Fatal(err)
			}
			if _, err := w.Write(b); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		outer := t.TempDir()
		s, err := Open(Config{Dir: filepath.Join(outer, "store"), Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		images, err := s.Load(t.Context(), io.Reader(&file))
		if err == nil {
			for _, img := range images {
				if got, ok, err := s.Get(img.ID); !ok || err != nil || got.ID != img.ID {
					t.Errorf("%s was taken and is not here: %v", img.ID, err)
				}
				if err := s.Verify(t.Context(), img.ID); err != nil {
					t.Error(err)
				}
			}
		} else if errors.Is(err, ErrDamaged) {
			t.Error(err)
		}
		s.nothingLeft(t)
		if entries, err := os.ReadDir(outer); err != nil || len(entries) != 1 {
			t.Errorf("written outside: %v %v", entries, err)
		}
	})
}
