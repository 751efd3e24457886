package image

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	regs "github.com/clusterd/clusterd/agent/image/registry"
)

// entry is one line of a layer's archive, in short.
type entry struct {
	name string
	typ  byte   // default: a directory when the name ends with a slash, else a file
	body string // a file's content, a link's target
	mode int64  // default 0755 for directories, 0644 for files
	uid  int
	pax  map[string]string
}

var modTime = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func archive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Typeflag: e.typ, Mode: e.mode, Uid: e.uid, Gid: e.uid, ModTime: modTime, PAXRecords: e.pax}
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
			if strings.HasSuffix(e.name, "/") {
				h.Typeflag = tar.TypeDir
			}
		}
		if h.Mode == 0 {
			h.Mode = 0o644
			if h.Typeflag == tar.TypeDir {
				h.Mode = 0o755
			}
		}
		if os.Geteuid() != 0 {
			h.Uid, h.Gid = os.Getuid(), os.Getgid()
		}
		body := ""
		switch h.Typeflag {
		case tar.TypeReg:
			body = e.body
			h.Size = int64(len(body))
		case tar.TypeSymlink, tar.TypeLink:
			h.Linkname = e.body
		case tar.TypeChar:
			h.Devmajor, h.Devminor = 1, 3
			if e.body == "0:0" {
				h.Devmajor, h.Devminor = 0, 0
			}
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// build makes an image for this platform from layers.
func build(t testing.TB, cfg v1.Config, layers ...[]byte) v1.Image {
	t.Helper()
	return buildFor(t, v1.Platform{OS: "linux", Architecture: runtime.GOARCH}, cfg, layers...)
}

func buildFor(t testing.TB, p v1.Platform, cfg v1.Config, layers ...[]byte) v1.Image {
	t.Helper()
	img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: p.OS, Architecture: p.Architecture, Variant: p.Variant, Config: cfg})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range layers {
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil })
		if err != nil {
			t.Fatal(err)
		}
		if img, err = mutate.AppendLayers(img, l); err != nil {
			t.Fatal(err)
		}
	}
	return img
}

// serve runs a registry on the loopback; wrap may look at each request.
func serve(t testing.TB, wrap func(http.Handler) http.Handler) (host string) {
	t.Helper()
	h := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	if wrap != nil {
		h = wrap(h)
	}
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	host = strings.TrimPrefix(srv.URL, "http://")
	served.Store(host, true)
	return host
}

// served are the hosts of serve, which speak no TLS.
var served sync.Map

// registries are settings that name all of served.
func registries() *regs.Settings {
	text := "registries:\n"
	served.Range(func(host, _ any) bool {
		text += fmt.Sprintf("  %q: {plainHTTP: true}\n", host)
		return true
	})
	s, err := regs.Parse([]byte(text))
	if err != nil {
		panic(err)
	}
	return s
}

func push(t testing.TB, ref string, img v1.Image) {
	t.Helper()
	r, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(r, img); err != nil {
		t.Fatal(err)
	}
}

func open(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := Open(Config{Dir: dir, Registries: registries, Isolation: isolation(t), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// layerDirs are the directories of all layers on disk.
func (s *Store) layerDirs(t testing.TB) []string {
	t.Helper()
	dirs, err := filepath.Glob(s.path("layers", "*"))
	if err != nil {
		t.Fatal(err)
	}
	return dirs
}

// nothingLeft checks that no temporary file stayed.
func (s *Store) nothingLeft(t testing.TB) {
	t.Helper()
	left, err := filepath.Glob(s.path("tmp", "*"))
	if err != nil || len(left) > 0 {
		t.Errorf("temporary files left: %v %v", left, err)
	}
}

func read(t testing.TB, elem ...string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(elem...))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// isolation has this test's program read what comes from registries, as root; other users
// and the race detector's programs cannot, and do it themselves.
func isolation(t testing.TB) *Isolation {
	if os.Geteuid() != 0 || raceDetector {
		return nil
	}
	return &Isolation{
		Program: func() (*os.File, error) { return os.Open("/proc/self/exe") },
		Cgroup:  testCgroup() + "/images",
		Memory:  512 << 20,
	}
}

func testCgroup() string { return fmt.Sprintf("/clusterd-test-%d", os.Getpid()) }

// readHere has the store read images in this process, for tests of something else with
// more layers than there is time to start processes for.
func readHere(s *Store) {
	s.work.close()
	s.work = localWorker{}
}
