package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/klauspost/compress/zstd"
)

// dockerSave is an archive as docker save makes it.
func dockerSave(t *testing.T, images map[string]v1.Image) []byte {
	t.Helper()
	tags := map[name.Tag]v1.Image{}
	for ref, img := range images {
		tag, err := name.NewTag(ref)
		if err != nil {
			t.Fatal(err)
		}
		tags[tag] = img
	}
	var b bytes.Buffer
	if err := tarball.MultiWrite(tags, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// ociTar is a tar of an OCI layout; each image has its annotations and platform.
func ociTar(t *testing.T, add func(layout.Path)) []byte {
	t.Helper()
	dir := t.TempDir()
	p, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	add(p)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.AddFS(os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestLoad(t *testing.T) {
	img := build(t, v1.Config{Cmd: []string{"x"}}, archive(t, entry{name: "f", body: "x"}), archive(t, entry{name: "g", body: "y"}))
	other := build(t, v1.Config{}, archive(t, entry{name: "h", body: "z"}))
	foreign := buildFor(t, v1.Platform{OS: "linux", Architecture: "s390x"}, v1.Config{}, archive(t, entry{name: "h", body: "s390x"}))
	oci := ociTar(t, func(p layout.Path) {
		for _, x := range []struct {
			img  v1.Image
			arch string
		}{{foreign, "s390x"}, {img, ""}} {
			opts := []layout.Option{layout.WithAnnotations(map[string]string{annotationRef: "clusterd.local/hello:1"})}
			if x.arch != "" {
				opts = append(opts, layout.WithPlatform(v1.Platform{OS: "linux", Architecture: x.arch}))
			}
			if err := p.AppendImage(x.img, opts...); err != nil {
				t.Fatal(err)
			}
		}
	})
	gz := func(b []byte) []byte {
		var out bytes.Buffer
		w := gzip.NewWriter(&out)
		_, _ = w.Write(b)
		_ = w.Close()
		return out.Bytes()
	}
	zs := func(b []byte) []byte {
		w, err := zstd.NewWriter(nil)
		if err != nil {
			t.Fatal(err)
		}
		return w.EncodeAll(b, nil)
	}
	two := dockerSave(t, map[string]v1.Image{"clusterd.local/hello:1": img, "nginx:1": other})
	for name, tt := range map[string]struct {
		archive []byte
		want    []string
	}{
		"docker save":       {dockerSave(t, map[string]v1.Image{"clusterd.local/hello:1": img}), []string{"clusterd.local/hello:1"}},
		"docker save, gzip": {gz(two), []string{"clusterd.local/hello:1", "docker.io/library/nginx:1"}},
		"OCI":               {oci, []string{"clusterd.local/hello:1"}},
		"OCI, zstd":         {zs(oci), []string{"clusterd.local/hello:1"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t, t.TempDir())
			for range 2 { // twice is once
				imgs, err := s.Load(t.Context(), bytes.NewReader(tt.archive))
				if err != nil {
					t.Fatal(err)
				}
				if len(imgs) != len(tt.want) {
					t.Fatalf("loaded %d images", len(imgs))
				}
			}
			list, err := s.List(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			var refs []string
			for _, i := range list {
				refs = append(refs, i.Refs...)
				if !i.Pinned {
					t.Errorf("%v is not pinned", i.Refs)
				}
			}
			if d := cmp.Diff(tt.want, refs); d != "" {
				t.Fatal(d)
			}
			got, _, _ := s.Get("clusterd.local/hello:1")
			if id, _ := img.ConfigName(); got.ID != id.String() || got.Size != 2 {
				t.Errorf("ID %s, size %d", got.ID, got.Size)
			}
			if gone, err := s.GC(t.Context(), GCPolicy{}); err != nil || len(gone) != 0 {
				t.Errorf("GC took %v (%v)", gone, err)
			}
			s.nothingLeft(t)
		})
	}
}

func TestLoadRefuses(t *testing.T) {
	img := build(t, v1.Config{}, archive(t, entry{name: "f", body: strings.Repeat("x", 5000)}))
	good := dockerSave(t, map[string]v1.Image{"a:1": img})
	damaged := ociTar(t, func(p layout.Path) {
		if err := p.AppendImage(img, layout.WithAnnotations(map[string]string{annotationRef: "a/b:1"})); err != nil {
			t.Fatal(err)
		}
		cf, err := img.RawConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		blob := filepath.Join(string(p), "blobs", "sha256", strings.TrimPrefix(digestOf(cf), "sha256:"))
		if err := os.WriteFile(blob, bytes.Replace(cf, []byte("linux"), []byte("linux"), 1)[:len(cf)-1], 0o600); err != nil {
			t.Fatal(err)
		}
	})
	foreign := ociTar(t, func(p layout.Path) {
		f := buildFor(t, v1.Platform{OS: "linux", Architecture: "s390x"}, v1.Config{})
		if err := p.AppendImage(f, layout.WithAnnotations(map[string]string{annotationRef: "a/b:1"})); err != nil {
			t.Fatal(err)
		}
	})
	for name, tt := range map[string]struct {
		archive []byte
		want    error
	}{
		"nothing":        {nil, ErrNotAnArchive},
		"text":           {[]byte(strings.Repeat("hello ", 200)), ErrNotAnArchive},
		"another tar":    {archive(t, entry{name: "etc/passwd", body: "x"}), ErrNotAnArchive},
		"cut short":      {good[:len(good)/2], ErrNotAnArchive},
		"no gzip":        {[]byte{0x1f, 0x8b, 0, 0, 0, 0}, nil},
		"damaged config": {damaged, nil},
		"other platform": {foreign, ErrPlatform},
		"empty manifest": {archive(t, entry{name: "manifest.json", body: "[]"}), nil},
		"bad manifest":   {archive(t, entry{name: "manifest.json", body: "{"}), nil},
		"missing config": {archive(t, entry{name: "manifest.json", body: `[{"Config":"x.json","RepoTags":["a:1"],"Layers":[]}]`}), nil},
		"bad name":       {archive(t, entry{name: "manifest.json", body: `[{"Config":"x.json","RepoTags":["A B"],"Layers":[]}]`}), ErrInvalidName},
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t, t.TempDir())
			_, err := s.Load(t.Context(), bytes.NewReader(tt.archive))
			if err == nil || tt.want != nil && !errors.Is(err, tt.want) {
				t.Fatalf("got %v", err)
			}
			s.nothingLeft(t)
			if list, _ := s.List(t.Context()); len(list) != 0 {
				t.Fatalf("added %v", list)
			}
		})
	}
	t.Run("given up", func(t *testing.T) {
		s := open(t, t.TempDir())
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := s.Load(ctx, io.MultiReader(bytes.NewReader(good))); !errors.Is(err, context.Canceled) {
			t.Fatalf("got %v", err)
		}
	})
}

// TestDockerLayerLinks: docker save writes a layer that several images have once, and
// links to it.
func TestDockerLayerLinks(t *testing.T) {
	name := filepath.Join(t.TempDir(), "a.tar")
	b := archive(t,
		entry{name: "a/layer.tar", body: "the layer"}, entry{name: "b/layer.tar", typ: tar.TypeSymlink, body: "../a/layer.tar"},
		entry{name: "loop", typ: tar.TypeSymlink, body: "loop"}, entry{name: "d/"}, entry{name: "out", typ: tar.TypeSymlink, body: "../../etc/passwd"})
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, layer := range []string{"a/layer.tar", "b/layer.tar"} {
		r, err := openDockerLayer(f, dockerLayer{layer})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(r); err != nil || string(got) != "the layer" {
			t.Errorf("%s: %q %v", layer, got, err)
		}
	}
	for _, layer := range []string{"loop", "d/", "out", "none", "/etc/passwd"} {
		if _, err := openDockerLayer(f, dockerLayer{layer}); !isBadLayer(err) || !strings.Contains(err.Error(), layer) {
			t.Errorf("%s: %v", layer, err)
		}
	}
}
