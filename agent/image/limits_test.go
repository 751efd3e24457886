package image

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"golang.org/x/sys/unix"
)

// TestHostileSizes: what a registry serves costs no more than the limits, and
// the error names the one that was reached.
func TestHostileSizes(t *testing.T) {
	pkg := func(n int) string { return strings.Repeat("x", n) }
	files := func(n int) (out []entry) {
		for i := range n {
			out = append(out, entry{name: fmt.Sprintf("f%d", i)})
		}
		return out
	}
	small := func() v1.Image { return build(t, v1.Config{}, archive(t, entry{name: "f", body: "small"})) }
	for _, tt := range []struct {
		name   string
		limits Limits
		img    v1.Image
		want   string // empty: it is pulled
	}{
		{"nothing odd", Limits{Config: 4096, Manifest: 4096, Layers: 1, Download: 4096, Unpacked: 5, Files: 1}, small(), ""},
		{"config", Limits{Config: 4096}, build(t, v1.Config{Labels: map[string]string{"big": pkg(8192)}}), "bytes, the limit is 4 KiB"},
		{"manifest", Limits{Manifest: 4096}, mutate.Annotations(small(), map[string]string{"big": pkg(8192)}).(v1.Image), "a manifest has more bytes than allowed, the limit is 4 KiB"},
		{"layers", Limits{Layers: 1}, build(t, v1.Config{}, archive(t, entry{name: "a"}), archive(t, entry{name: "b"})), "the image has 2 layers, the limit is 1"},
		{"download", Limits{Download: 10}, small(), "layers 1 to 1 have more than that to download, the limit is 10 bytes"},
		{"unpacked", Limits{Unpacked: 1 << 20}, build(t, v1.Config{}, archive(t, entry{name: "a", body: pkg(1 << 19)}), archive(t, entry{name: "b", body: pkg(1<<19 + 1)})),
			"unpack layer 2 of 2: \"b\": too large: unpacked, the image takes more than allowed, the limit is 1 MiB"},
		{"entries", Limits{Files: 99}, build(t, v1.Config{}, archive(t, files(100)...)), "the layer has more entries than allowed, the limit is 99"},
		{"ratio", Limits{Ratio: 20, RatioFrom: 1 << 16}, build(t, v1.Config{}, archive(t, entry{name: "zeros", body: pkg(1 << 20)})), "the limit is 20 times its size beyond 64 KiB"},
		{"ratio of a small layer", Limits{Ratio: 20, RatioFrom: 1 << 20}, build(t, v1.Config{}, archive(t, entry{name: "zeros", body: pkg(1 << 20)})), ""},
		{"sparse", Limits{Ratio: 20, RatioFrom: 1 << 20}, build(t, v1.Config{}, sparse(t, 1<<30)), "the limit is 20 times its size beyond 1 MiB"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ref := serve(t, nil) + "/big/image:1"
			push(t, ref, tt.img)
			s := openLimited(t, tt.limits)
			img, err := s.Pull(t.Context(), ref, Auth{})
			if tt.want == "" {
				if err != nil || img.ID == "" {
					t.Fatalf("%+v %v", img, err)
				}
				return
			}
			var pe *PullError
			if !errors.As(err, &pe) || pe.Reason != ReasonTooLarge || !errors.Is(err, ErrTooLarge) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
			s.nothingLeft(t)
		})
	}
}

func openLimited(t *testing.T, l Limits) *Store {
	t.Helper()
	s := open(t, t.TempDir())
	s.cfg.Limits = l.withDefaults()
	return s
}

// sparse is an archive of a few KiB with a file of n bytes, all of them a hole
// (GNU tar's PAX format 1.0).
func sparse(t *testing.T, n int64) []byte {
	t.Helper()
	b := archive(t, entry{name: "GNUSparseFile.0/hole", body: "0\n" + strings.Repeat("\x00", 510), pax: map[string]string{
		"XNU.sparse.major": "1", "XNU.sparse.minor": "0", "XNU.sparse.name": "hole", "XNU.sparse.realsize": fmt.Sprint(n),
	}})
	return bytes.ReplaceAll(b, []byte("XNU.sparse."), []byte("GNU.sparse.")) // the package tar writes none
}

// TestLyingSizes: a manifest that announces less than is sent bounds what is
// taken, and a size below zero does not mean "any".
func TestLyingSizes(t *testing.T) {
	img := build(t, v1.Config{}, archive(t, entry{name: "f", body: strings.Repeat("x", 1<<16)}))
	raw, err := img.RawManifest()
	if err != nil {
		t.Fatal(err)
	}
	m, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct{ was, is, want string }{
		"layer":             {fmt.Sprintf(`"size":%d`, m.Layers[0].Size), `"size":1`, "error verifying"},
		"config":            {fmt.Sprintf(`"size":%d`, m.Config.Size), `"size":1`, "error verifying"},
		"config below zero": {fmt.Sprintf(`"size":%d`, m.Config.Size), `"size":-1`, "a config of -1 bytes"},
		"layer below zero":  {fmt.Sprintf(`"size":%d`, m.Layers[0].Size), `"size":-1`, "layer 1 with -1 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			lie := strings.Replace(string(raw), tt.was, tt.is, 1)
			if lie == string(raw) {
				t.Fatalf("no %s in %s", tt.was, raw)
			}
			ref := serve(t, func(h http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/manifests/") {
						w.Header().Set("Content-Type", string(m.MediaType))
						_, _ = io.WriteString(w, lie)
						return
					}
					h.ServeHTTP(chunked{w}, r)
				})
			}) + "/lying/image:1"
			push(t, ref, img)
			s := open(t, t.TempDir())
			if _, err := s.Pull(t.Context(), ref, Auth{}); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
			s.nothingLeft(t)
		})
	}
}

// chunked hides the length of an answer.
type chunked struct{ http.ResponseWriter }

func (c chunked) WriteHeader(status int) {
	c.Header().Del("Content-Length")
	c.ResponseWriter.WriteHeader(status)
}

func (c chunked) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p)
	c.ResponseWriter.(http.Flusher).Flush()
	return n, err
}

// TestLoadLimits: files are no more trusted than registries.
func TestLoadLimits(t *testing.T) {
	img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{Config: v1.Config{Labels: map[string]string{"big": strings.Repeat("x", 8192)}}})
	if err != nil {
		t.Fatal(err)
	}
	s := openLimited(t, Limits{Config: 4096})
	raw, err := img.RawConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := newContent(raw, s.cfg.Limits, s.cfg.Platform); !errors.Is(err, ErrTooLarge) || !strings.Contains(err.Error(), "4 KiB") {
		t.Errorf("config: %v", err)
	}
	dir := t.TempDir()
	b := &budget{Limits: Limits{Unpacked: 10}.withDefaults(), dir: dir}
	if _, err := extract(t.Context(), bytes.NewReader(archive(t, entry{name: "f", body: "0123456789x"})), dir, nil, b); !errors.Is(err, ErrTooLarge) {
		t.Errorf("unpacked: %v", err)
	}
}

// TestFreeDisk: what is kept free is said in bytes, and a disk smaller than
// that is not refused as a whole.
func TestFreeDisk(t *testing.T) {
	dir := t.TempDir()
	free := func(keep int64, dir string) error { return (&budget{Limits: Limits{Free: keep}, dir: dir}).look() }
	if err := free(1, dir); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat("/proc/self"); err != nil {
		t.Fatal(err)
	}
	if err := free(1<<62, "/proc"); err != nil { // it has no blocks: 5 % of nothing
		t.Error(err)
	}
	if err := free(1, dir+"/none"); !errors.Is(err, unix.ENOENT) {
		t.Error(err)
	}
}

// TestFreeInodes: files without a byte take inodes, and some are left for the rest of
// the node.
func TestFreeInodes(t *testing.T) {
	for _, tt := range []struct {
		all, left int64
		full      bool
	}{{0, 0, false}, {1000, 1000, false}, {1000, 50, false}, {1000, 49, true}} {
		if err := freeInodes("/d", tt.all, tt.left); errors.Is(err, unix.ENOSPC) != tt.full {
			t.Errorf("%d of %d left: %v", tt.left, tt.all, err)
		}
	}
	// The disk is looked at while the files are made: a directory that is gone shows it.
	b := &budget{Limits: Limits{}.withDefaults(), dir: t.TempDir() + "/none"}
	for i := range 3 * freeFiles {
		if err := b.entry(""); err != nil {
			if i+1 != freeFiles || !errors.Is(err, unix.ENOENT) {
				t.Errorf("after %d entries: %v", i+1, err)
			}
			return
		}
	}
	t.Error("the disk is not looked at")
}

// TestNoRoomLeavesNothing: layers of an image that is too large are not kept for a
// next try, which would fail the same.
func TestNoRoomLeavesNothing(t *testing.T) {
	host := serve(t, nil)
	img := build(t, v1.Config{}, archive(t, entry{name: "small", body: "x"}), archive(t, entry{name: "large", body: strings.Repeat("x", 5000)}))
	push(t, host+"/a:1", img)
	s := openLimited(t, Limits{Unpacked: 4000})
	if _, err := s.Ensure(t.Context(), host+"/a:1", Auth{}); !errors.Is(err, ErrTooLarge) {
		t.Fatal(err)
	}
	if left := s.layerDirs(t); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
	blobs, err := os.ReadDir(s.path("blobs"))
	if err != nil || len(blobs) != 0 {
		t.Errorf("left: %v, %v", blobs, err)
	}
}

// TestRefusedLeavesOthers: an image that its manifest shows to be too large has left
// nothing; what a pull has brought that was cut off is still there for its next try.
func TestRefusedLeavesOthers(t *testing.T) {
	first, second := archive(t, entry{name: "one", body: "x"}), archive(t, entry{name: "two", body: "y"})
	img := build(t, v1.Config{}, first, second)
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	last, err := layers[1].Digest()
	if err != nil {
		t.Fatal(err)
	}
	kept, err := layers[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	var s *Store
	var cut atomic.Bool
	host := serve(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if cut.Load() && r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, last.Hex) {
				for r.Context().Err() == nil { // once the other one is here
					if _, err := os.Stat(s.blobPath(partKey(kept.Hex, r.Host+"/cut"))); err == nil {
						break
					}
					time.Sleep(time.Millisecond)
				}
				panic(http.ErrAbortHandler)
			}
			h.ServeHTTP(w, r)
		})
	})
	push(t, host+"/cut:1", img)
	push(t, host+"/many:1", build(t, v1.Config{}, archive(t, entry{name: "a"}), archive(t, entry{name: "b"}), archive(t, entry{name: "c"})))
	s = openLimited(t, Limits{Layers: 2})
	cut.Store(true)
	if _, err := s.Ensure(t.Context(), host+"/cut:1", Auth{}); err == nil {
		t.Fatal("it was not cut off")
	}
	if _, err := os.Stat(s.blobPath(partKey(kept.Hex, host+"/cut"))); err != nil {
		t.Fatal("the first layer is not kept:", err)
	}
	if _, err := s.Ensure(t.Context(), host+"/many:1", Auth{}); !errors.Is(err, ErrTooLarge) {
		t.Fatal(err)
	}
	if _, err := os.Stat(s.blobPath(partKey(kept.Hex, host+"/cut"))); err != nil {
		t.Error("what another pull has brought is gone:", err)
	}
}
