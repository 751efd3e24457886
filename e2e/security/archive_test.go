package security

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// entry is one line of a layer's archive, in short.
type entry struct {
	name  string
	typ   byte   // default: a directory when the name ends with a slash, else a file
	body  string // a file's content, a link's target
	mode  int64  // default 0755
	major int64  // of a device
	minor int64
	pax   map[string]string
}

// layer is an archive of entries.
func layer(entries ...entry) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Typeflag: e.typ, Mode: e.mode, Devmajor: e.major, Devminor: e.minor, ModTime: time.Unix(1, 0), PAXRecords: e.pax}
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
			if strings.HasSuffix(e.name, "/") {
				h.Typeflag = tar.TypeDir
			}
		}
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		switch h.Typeflag {
		case tar.TypeReg:
			h.Size = int64(len(e.body))
		case tar.TypeSymlink, tar.TypeLink:
			h.Linkname = e.body
		}
		if err := w.WriteHeader(h); err != nil {
			panic(fmt.Errorf("%s: %w", e.name, err))
		}
		if h.Typeflag == tar.TypeReg {
			if _, err := io.WriteString(w, e.body); err != nil {
				panic(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		panic(err)
	}
	return b.Bytes()
}

// blob is bytes and what is said of them, which may be untrue.
type blob struct {
	body []byte
	kind types.MediaType
	desc map[string]any // takes the place of what is true
}

func digest(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }

func (b blob) descriptor() map[string]any {
	d := map[string]any{"mediaType": b.kind, "digest": digest(b.body), "size": len(b.body)}
	for key, value := range b.desc {
		d[key] = value
	}
	return d
}

// picture is an image before it is packed; its parts may be changed.
type picture struct {
	layers   []blob
	config   blob
	manifest blob
	index    blob
	files    []entry // further files of the archive
}

// base are the layers of the escape image, uncompressed.
func base(t *testing.T, archive string) [][]byte {
	t.Helper()
	img, err := tarball.ImageFromPath(archive, nil)
	if err != nil {
		t.Fatal(err)
	}
	list, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	var out [][]byte
	for _, l := range list {
		r, err := l.Uncompressed()
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		_ = r.Close()
		out = append(out, b)
	}
	return out
}

// newPicture is an image of layers and a configuration; all that is said of them is true.
func newPicture(config v1.Config, layers ...[]byte) *picture {
	p := &picture{}
	file := v1.ConfigFile{OS: "linux", Architecture: runtime.GOARCH, Config: config, RootFS: v1.RootFS{Type: "layers"}}
	for _, l := range layers {
		p.layers = append(p.layers, blob{body: l, kind: types.OCIUncompressedLayer})
		hash, err := v1.NewHash(digest(l))
		if err != nil {
			panic(err)
		}
		file.RootFS.DiffIDs = append(file.RootFS.DiffIDs, hash)
	}
	p.config = blob{body: asJSON(file), kind: types.OCIConfigJSON}
	return p
}

// add puts a layer on top, of which the configuration says the bytes as they come.
func (p *picture) add(body []byte, kind types.MediaType) {
	p.layers = append(p.layers, blob{body: body, kind: kind})
	var file v1.ConfigFile
	if err := json.Unmarshal(p.config.body, &file); err != nil {
		panic(err)
	}
	file.RootFS.DiffIDs = append(file.RootFS.DiffIDs, v1.Hash{Algorithm: "sha256", Hex: strings.TrimPrefix(digest(body), "sha256:")})
	p.config.body = asJSON(file)
}

// top is the last layer, which no other image has.
func (p *picture) top() *blob { return &p.layers[len(p.layers)-1] }

func asJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

// seal makes manifest and index of the parts.
func (p *picture) seal(ref string) *picture {
	var layers []any
	for _, l := range p.layers {
		layers = append(layers, l.descriptor())
	}
	if p.manifest.body == nil {
		p.manifest.body = asJSON(map[string]any{"schemaVersion": 2, "mediaType": types.OCIManifestSchema1, "config": p.config.descriptor(), "layers": layers})
	}
	if p.manifest.kind == "" {
		p.manifest.kind = types.OCIManifestSchema1
	}
	if p.index.body == nil {
		d := p.manifest.descriptor()
		d["annotations"] = map[string]string{"io.containerd.image.name": ref, "org.opencontainers.image.ref.name": ref}
		p.index.body = asJSON(map[string]any{"schemaVersion": 2, "manifests": []any{d}})
	}
	return p
}

// blobs are all parts.
func (p *picture) blobs() []blob { return append([]blob{p.config, p.manifest}, p.layers...) }

// archive is an OCI layout of it.
func (p *picture) archive() []byte {
	entries := []entry{{name: "oci-layout", body: `{"imageLayoutVersion":"1.0.0"}`, mode: 0o644}, {name: "index.json", body: string(p.index.body), mode: 0o644}}
	for _, b := range p.blobs() {
		entries = append(entries, entry{name: "blobs/sha256/" + strings.TrimPrefix(digest(b.body), "sha256:"), body: string(b.body), mode: 0o644})
	}
	return layer(append(entries, p.files...)...)
}

// zipped is n zeros in gzip, after what comes before.
func zipped(before []byte, n int64) []byte {
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		panic(err)
	}
	if _, err := w.Write(before); err != nil {
		panic(err)
	}
	zeros := make([]byte, 1<<20)
	for ; n > 0; n -= int64(len(zeros)) {
		if _, err := w.Write(zeros[:min(n, int64(len(zeros)))]); err != nil {
			panic(err)
		}
	}
	if err := w.Close(); err != nil {
		panic(err)
	}
	return b.Bytes()
}

// repeated is the same bytes n times, in gzip.
func repeated(one []byte, n int) []byte {
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, gzip.BestSpeed)
	if err != nil {
		panic(err)
	}
	const at = 1024
	many := bytes.Repeat(one, at)
	for i := 0; i < n; i += at {
		if _, err := w.Write(many); err != nil {
			panic(err)
		}
	}
	if err := w.Close(); err != nil {
		panic(err)
	}
	return b.Bytes()
}

// program is the file of that name in layers.
func program(t *testing.T, name string, layers [][]byte) []byte {
	t.Helper()
	for _, l := range layers {
		r := tar.NewReader(bytes.NewReader(l))
		for {
			h, err := r.Next()
			if err != nil {
				break
			}
			if h.Name == name {
				b, err := io.ReadAll(r)
				if err != nil {
					t.Fatal(err)
				}
				return b
			}
		}
	}
	t.Fatalf("no file %s in the image", name)
	return nil
}

// header is the first block of a file whose size is said, without the file.
func header(name string, size int64) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Size: size, Mode: 0o644}); err != nil {
		panic(err)
	}
	return b.Bytes()
}

// kept writes an archive where clusterctl finds it.
func (s *suite) kept(name string, b []byte) string {
	s.t.Helper()
	file := filepath.Join(s.dir, name+".tar")
	if err := os.WriteFile(file, b, 0o600); err != nil {
		s.t.Fatal(err)
	}
	return file
}
