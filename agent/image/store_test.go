package image

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// The library races https against http and leaves the loser to itself.
		goleak.IgnoreAnyFunction("github.com/google/go-containerregistry/pkg/v1/remote/transport.pingParallel.func1"),
		goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"),
		goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"),
	)
}

func TestNormalize(t *testing.T) {
	digest := "@sha256:" + strings.Repeat("a", 64)
	for ref, want := range map[string]string{
		"nginx":                             "docker.io/library/nginx:latest",
		"nginx:1.27":                        "docker.io/library/nginx:1.27",
		"me/app":                            "docker.io/me/app:latest",
		"docker.io/nginx":                   "docker.io/library/nginx:latest",
		"index.docker.io/library/nginx":     "docker.io/library/nginx:latest",
		"clusterd.local/hello:1":            "clusterd.local/hello:1",
		"localhost:5000/a/b:v1":             "localhost:5000/a/b:v1",
		"127.0.0.1:5000/a":                  "127.0.0.1:5000/a:latest",
		"nginx" + digest:                    "docker.io/library/nginx" + digest,
		"nginx:1.27" + digest:               "docker.io/library/nginx" + digest,
		"quay.io/a__b/c-d.e":                "quay.io/a__b/c-d.e:latest",
		"sha256:" + strings.Repeat("0", 64): "sha256:" + strings.Repeat("0", 64),
	} {
		if got, err := Normalize(ref); err != nil || got != want {
			t.Errorf("%s: got %s, %v; want %s", ref, got, err, want)
		}
	}
	for _, ref := range []string{"", "UPPER//bad", "Nginx", "a b", "nginx:", "nginx:a b", "nginx@sha256:123", "-a/b", "a/../b", "a//b", "https://x/y", "nginx:" + strings.Repeat("x", 200), "a/b_-c"} {
		if got, err := Normalize(ref); !errors.Is(err, ErrInvalidName) {
			t.Errorf("%q: got %q, %v; want ErrInvalidName", ref, got, err)
		}
	}
}

func TestNameFor(t *testing.T) {
	two := Image{ID: "sha256:1", RepoDigests: []string{"a.io/x/app@sha256:2", "docker.io/library/app@sha256:3"}}
	for _, tt := range []struct {
		img       Image
		ref, want string
	}{
		{two, "a.io/x/app:1", "a.io/x/app@sha256:2"},
		{two, "app", "docker.io/library/app@sha256:3"},
		{two, "a.io/x/ap:1", "a.io/x/app@sha256:2"},
		{two, "NOT A NAME", "a.io/x/app@sha256:2"},
		{Image{ID: "sha256:1"}, "app", "sha256:1"},
	} {
		if got := tt.img.NameFor(tt.ref); got != tt.want {
			t.Errorf("%v as %q: %q, want %q", tt.img.RepoDigests, tt.ref, got, tt.want)
		}
	}
}

func TestPull(t *testing.T) {
	host := serve(t, nil)
	s := open(t, t.TempDir())
	base := archive(t, entry{name: "etc/"}, entry{name: "etc/os", body: "base"})
	img := build(t, v1.Config{Cmd: []string{"run"}, Env: []string{"A=1"}}, base, archive(t, entry{name: "app", body: "one"}))
	ref := host + "/team/app:1"
	push(t, ref, img)

	got, err := s.Ensure(t.Context(), ref, Auth{})
	if err != nil {
		t.Fatal(err)
	}
	id, _ := img.ConfigName()
	digest, _ := img.Digest()
	want := Image{
		ID: id.String(), Refs: []string{ref}, RepoDigests: []string{host + "/team/app@" + digest.String()},
		Size: int64(len("base") + len("one")), Config: v1.Config{Cmd: []string{"run"}, Env: []string{"A=1"}},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Fatal(d)
	}
	// By name, digest and ID; without asking again.
	for _, r := range []string{ref, got.RepoDigests[0], got.ID} {
		if again, ok, err := s.Get(r); err != nil || !ok || again.ID != got.ID {
			t.Errorf("Get(%s): %v %v %v", r, again.ID, ok, err)
		}
		if again, err := s.Ensure(t.Context(), r, Auth{Username: "nobody"}); err != nil || again.ID != got.ID {
			t.Errorf("Ensure(%s): %v %v", r, again.ID, err)
		}
	}
	if _, ok, err := s.Get("nginx"); ok || err != nil {
		t.Errorf("an image that is not here: %v %v", ok, err)
	}
	if _, _, err := s.Get("UPPER//bad"); !errors.Is(err, ErrInvalidName) {
		t.Errorf("a bad name: %v", err)
	}

	// A second image on the same base unpacks one layer more; the name moves.
	second := build(t, v1.Config{}, base, archive(t, entry{name: "app", body: "two!"}))
	push(t, ref, second)
	if again, err := s.Ensure(t.Context(), ref, Auth{}); err != nil || again.ID != got.ID {
		t.Fatalf("Ensure asked the registry: %v %v", again.ID, err)
	}
	moved, err := s.Pull(t.Context(), ref, Auth{})
	if err != nil {
		t.Fatal(err)
	}
	if moved.ID == got.ID || len(s.layerDirs(t)) != 3 {
		t.Fatalf("moved to %s; layers %v", moved.ID, s.layerDirs(t))
	}
	if now, _, _ := s.Get(ref); now.ID != moved.ID {
		t.Fatal("the name did not move")
	}
	if old, ok, _ := s.Get(got.ID); !ok || len(old.Refs) != 0 {
		t.Fatalf("the old image: %v %v", ok, old.Refs)
	}
	list, err := s.List(t.Context())
	if err != nil || len(list) != 2 {
		t.Fatalf("List: %v %v", list, err)
	}
	s.nothingLeft(t)
	// Only configs and manifests stay as blobs.
	blobs, _ := filepath.Glob(s.path("blobs", "*"))
	if len(blobs) != 4 {
		t.Errorf("blobs: %v", blobs)
	}

	// All of it is there after a restart.
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Pull(t.Context(), ref, Auth{}); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	again, err := open(t, s.cfg.Dir).List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(list, again); d != "" {
		t.Fatalf("after a restart: %s", d)
	}
}

func TestPullByDigest(t *testing.T) {
	host := serve(t, nil)
	s := open(t, t.TempDir())
	img := build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"}))
	push(t, host+"/a:1", img)
	digest, _ := img.Digest()
	got, err := s.Ensure(t.Context(), host+"/a@"+digest.String(), Auth{})
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Refs) != 0 || len(got.RepoDigests) != 1 {
		t.Fatalf("%+v", got)
	}
}

func TestPlatforms(t *testing.T) {
	host := serve(t, nil)
	amd := buildFor(t, v1.Platform{OS: "linux", Architecture: "amd64"}, v1.Config{Cmd: []string{"amd64"}}, archive(t, entry{name: "f", body: "amd64"}))
	arm6 := buildFor(t, v1.Platform{OS: "linux", Architecture: "arm", Variant: "v6"}, v1.Config{Cmd: []string{"v6"}}, archive(t, entry{name: "f", body: "v6"}))
	arm7 := buildFor(t, v1.Platform{OS: "linux", Architecture: "arm", Variant: "v7"}, v1.Config{Cmd: []string{"v7"}}, archive(t, entry{name: "f", body: "v7"}))
	ix := mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: arm6, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "arm", Variant: "v6"}}},
		mutate.IndexAddendum{Add: amd, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "amd64"}}},
		mutate.IndexAddendum{Add: arm7, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "arm", Variant: "v7"}}},
	)
	r, err := name.ParseReference(host + "/multi:1")
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.WriteIndex(r, ix); err != nil {
		t.Fatal(err)
	}
	push(t, host+"/single:1", amd)
	for _, tt := range []struct{ arch, ref, want, err string }{
		{"amd64", "/multi:1", "amd64", ""},
		{"arm", "/multi:1", "v7", ""},
		{"s390x", "/multi:1", "", "no image for this platform: this node is linux/s390x, the image is for linux/amd64, linux/arm/v6, linux/arm/v7"},
		{"arm64", "/single:1", "", "no image for this platform: this node is linux/arm64, the image is for linux/amd64"},
	} {
		s, err := Open(Config{Dir: t.TempDir(), Platform: v1.Platform{OS: "linux", Architecture: tt.arch}})
		if err != nil {
			t.Fatal(err)
		}
		img, err := s.Ensure(t.Context(), host+tt.ref, Auth{})
		if tt.err == "" {
			if err != nil || img.Config.Cmd[0] != tt.want {
				t.Errorf("%s: %v %v", tt.arch, img.Config.Cmd, err)
			}
		} else {
			var pe *PullError
			if !errors.As(err, &pe) || pe.Reason != ReasonPlatform || !strings.HasSuffix(err.Error(), tt.err) {
				t.Errorf("%s: %v", tt.arch, err)
			}
		}
		_ = s.Close()
	}
}

// answer makes every request fail in one way.
func answer(status int, body string) func(http.Handler) http.Handler {
	return func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/v2/" {
				return
			}
			w.WriteHeader(status)
			_, _ = io.WriteString(w, body)
		})
	}
}

func TestPullErrors(t *testing.T) {
	s := open(t, t.TempDir())
	for _, tt := range []struct {
		name   string
		host   string
		reason Reason
		text   string
	}{
		{"unknown image", serve(t, nil), ReasonNotFound, "the registry says: NAME_UNKNOWN: Unknown name"},
		{"denied", serve(t, answer(403, `{"errors":[{"code":"DENIED","message":"requested access to the resource is denied"}]}`)), ReasonUnauthorized, "the registry says: DENIED: requested access to the resource is denied"},
		{"no words", serve(t, answer(418, "")), ReasonOther, "the registry says: unexpected status code 418"},
		{"nobody there", "127.0.0.1:1", ReasonUnreachable, "connection refused"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ref := tt.host + "/nobody/nothing:1"
			_, err := s.Ensure(t.Context(), ref, Auth{})
			var pe *PullError
			if !errors.As(err, &pe) {
				t.Fatalf("got %v", err)
			}
			if pe.Reason != tt.reason || !strings.Contains(err.Error(), tt.text) || !strings.HasPrefix(err.Error(), "pull "+ref+": ") {
				t.Fatalf("reason %s, %v", pe.Reason, err)
			}
		})
	}
	if _, err := s.Ensure(t.Context(), "Bad//Name", Auth{}); !errors.Is(err, ErrInvalidName) {
		t.Errorf("bad name: %v", err)
	}
	var pe *PullError
	if _, err := s.Ensure(t.Context(), "sha256:"+strings.Repeat("0", 64), Auth{}); !errors.As(err, &pe) || pe.Reason != ReasonNotFound {
		t.Errorf("unknown ID: %v", err)
	}
	s.nothingLeft(t)
}

func TestPlainHTTPIsRefused(t *testing.T) {
	guard := plainHTTPGuard{http.DefaultTransport, []string{"10.1.2.3:5000"}}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://10.9.9.9:5000/v2/", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := guard.RoundTrip(req); !errors.Is(err, ErrNoTLS) { //nolint:bodyclose // there is none
		t.Fatalf("got %v", err)
	}
	for host, want := range map[string]bool{"localhost": true, "127.0.0.1": true, "::1": true, "a.localhost": true, "10.0.0.1": false, "registry.local": false} {
		if isLoopback(host) != want {
			t.Errorf("%s: %v", host, !want)
		}
	}
}

func TestAuth(t *testing.T) {
	host := serve(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if u, p, _ := r.BasicAuth(); r.Method == http.MethodGet && (u != "me" || p != "secret") {
				w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
				w.WriteHeader(http.StatusUnauthorized)
				_, _ = io.WriteString(w, `{"errors":[{"code":"UNAUTHORIZED","message":"authentication required"}]}`)
				return
			}
			h.ServeHTTP(w, r)
		})
	})
	img := build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"}))
	r, err := name.ParseReference(host + "/private:1")
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(r, img, remote.WithAuth(Auth{Username: "me", Password: "secret"}.authenticator())); err != nil {
		t.Fatal(err)
	}
	s := open(t, t.TempDir())
	for _, a := range []Auth{{}, {Username: "me", Password: "wrong"}} {
		var pe *PullError
		if _, err := s.Ensure(t.Context(), r.String(), a); !errors.As(err, &pe) || pe.Reason != ReasonUnauthorized || pe.Says != "UNAUTHORIZED: authentication required" {
			t.Errorf("%+v: %v", a, err)
		}
	}
	if _, err := s.Ensure(t.Context(), r.String(), Auth{Username: "me", Password: "secret"}); err != nil {
		t.Error(err)
	}
}

// TestDamagedLayer: a registry sends other bytes than it announced.
func TestDamagedLayer(t *testing.T) {
	img := build(t, v1.Config{}, archive(t, entry{name: "f", body: strings.Repeat("x", 1000)}))
	layers, _ := img.Layers()
	digest, _ := layers[0].Digest()
	host := serve(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, digest.Hex) {
				size, _ := layers[0].Size()
				_, _ = io.WriteString(w, strings.Repeat("!", int(size)))
				return
			}
			h.ServeHTTP(w, r)
		})
	})
	push(t, host+"/a:1", img)
	s := open(t, t.TempDir())
	_, err := s.Ensure(t.Context(), host+"/a:1", Auth{})
	var pe *PullError
	if !errors.As(err, &pe) {
		t.Fatalf("got %v", err)
	}
	if list, _ := s.List(t.Context()); len(list) != 0 || len(s.layerDirs(t)) != 0 {
		t.Fatalf("kept: %v %v", list, s.layerDirs(t))
	}
	s.nothingLeft(t)
}

// TestLyingConfig: the layer has the digest of the manifest, but is not what
// the config says it unpacks to.
func TestLyingConfig(t *testing.T) {
	img := build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"}))
	cf, _ := img.ConfigFile()
	cf = cf.DeepCopy()
	cf.RootFS.DiffIDs[0].Hex = strings.Repeat("0", 64)
	lying, err := mutate.ConfigFile(img, cf)
	if err != nil {
		t.Fatal(err)
	}
	host := serve(t, nil)
	push(t, host+"/a:1", lying)
	s := open(t, t.TempDir())
	_, err = s.Ensure(t.Context(), host+"/a:1", Auth{})
	var pe *PullError
	if !errors.As(err, &pe) || pe.Reason != ReasonCorrupt || !errors.Is(err, ErrDigest) {
		t.Fatalf("got %v", err)
	}
	if len(s.layerDirs(t)) != 0 {
		t.Fatal("the layer was kept")
	}
}

func TestStalledDownload(t *testing.T) {
	img, err := random.Image(100_000, 1)
	if err != nil {
		t.Fatal(err)
	}
	release := make(chan struct{})
	host := serve(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			layers, _ := img.Layers()
			digest, _ := layers[0].Digest()
			if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, digest.Hex) {
				_, _ = io.WriteString(w, "some bytes")
				w.(http.Flusher).Flush()
				<-release
				return
			}
			h.ServeHTTP(w, r)
		})
	})
	defer close(release)
	push(t, host+"/a:1", img)
	s, err := Open(Config{Dir: t.TempDir(), StallTimeout: 200 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	_, err = s.Ensure(t.Context(), host+"/a:1", Auth{})
	var pe *PullError
	if !errors.As(err, &pe) || pe.Reason != ReasonUnreachable || !errors.Is(err, ErrStalled) {
		t.Fatalf("got %v", err)
	}
}

// TestSharedPull lets many ask for one image at once.
func TestSharedPull(t *testing.T) {
	var manifests atomic.Int32
	gate := make(chan struct{})
	host := serve(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/manifests/") {
				manifests.Add(1)
				<-gate
			}
			h.ServeHTTP(w, r)
		})
	})
	push(t, host+"/a:1", build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"})))
	s := open(t, t.TempDir())

	// One that gives up does not take the others along.
	impatient, cancel := context.WithCancel(t.Context())
	const n = 8
	var wg sync.WaitGroup
	errs := make(chan error, n)
	for i := range n {
		ctx := t.Context()
		if i == 0 {
			ctx = impatient
		}
		wg.Go(func() {
			_, err := s.Ensure(ctx, host+"/a:1", Auth{})
			if i == 0 {
				if !errors.Is(err, context.Canceled) {
					errs <- err
				}
				return
			}
			errs <- err
		})
	}
	key := pullKey{ref: host + "/a:1"}
	waitFor(t, "everyone to wait", func() bool {
		s.pulls.mu.Lock()
		defer s.pulls.mu.Unlock()
		c := s.pulls.calls[key]
		return c != nil && c.waiters == n
	})
	cancel()
	waitFor(t, "one to give up", func() bool {
		s.pulls.mu.Lock()
		defer s.pulls.mu.Unlock()
		return s.pulls.calls[key].waiters == n-1
	})
	close(gate)
	wg.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			t.Error(err)
		}
	}
	if got := manifests.Load(); got != 1 {
		t.Errorf("the registry was asked %d times", got)
	}
}

// TestAbandonedPull: the last caller gives up, the next one starts anew.
func TestAbandonedPull(t *testing.T) {
	stuck, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	host := serve(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			first := false
			if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/manifests/") {
				once.Do(func() { first = true })
			}
			if first {
				close(stuck)
				<-release
			}
			h.ServeHTTP(w, r)
		})
	})
	defer close(release)
	push(t, host+"/a:1", build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"})))
	s := open(t, t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-stuck; cancel() }()
	if _, err := s.Ensure(ctx, host+"/a:1", Auth{}); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	if _, err := s.Ensure(t.Context(), host+"/a:1", Auth{}); err != nil {
		t.Fatal(err)
	}
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline, tick := time.After(2*time.Minute), time.Tick(2*time.Millisecond)
	for !ok() {
		select {
		case <-tick:
		case <-deadline:
			t.Fatalf("waited for %s", what)
		}
	}
}

// TestCrash leaves behind what a kill at any moment may leave.
func TestCrash(t *testing.T) {
	host := serve(t, nil)
	s := open(t, t.TempDir())
	push(t, host+"/a:1", build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"})))
	img, err := s.Ensure(t.Context(), host+"/a:1", Auth{})
	if err != nil {
		t.Fatal(err)
	}
	_ = s.Close()
	// A layer that got its place before the image was committed, downloads,
	// half unpacked layers, a half made mount.
	for _, d := range []string{"layers/7/etc", "layers/what", "tmp/layer-123/etc", "mounts/half"} {
		if err := os.MkdirAll(s.path(d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{"blobs/" + strings.Repeat("0", 64), "tmp/blob-1", "tmp/file-2"} {
		if err := os.WriteFile(s.path(f), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s = open(t, s.cfg.Dir)
	s.nothingLeft(t)
	if dirs := s.layerDirs(t); len(dirs) != 1 {
		t.Errorf("layers: %v", dirs)
	}
	if blobs, _ := filepath.Glob(s.path("blobs", "*")); len(blobs) != 2 {
		t.Errorf("blobs: %v", blobs)
	}
	if got, ok, err := s.Get(host + "/a:1"); !ok || err != nil || got.ID != img.ID {
		t.Errorf("the image: %v %v", ok, err)
	}
	if ids, err := s.Mounts(); err != nil || len(ids) != 1 {
		t.Errorf("mounts: %v %v", ids, err)
	}
	if err := s.Unmount(t.Context(), "half"); err != nil {
		t.Error(err)
	}
	_ = s.Close()

	// An image whose layer was taken away is no image.
	if err := os.RemoveAll(s.layerDirs(t)[0]); err != nil {
		t.Fatal(err)
	}
	s = open(t, s.cfg.Dir)
	if _, ok, err := s.Get(host + "/a:1"); ok || err != nil {
		t.Errorf("a damaged image is still listed (%v)", err)
	}
	if _, err := s.Ensure(t.Context(), host+"/a:1", Auth{}); err != nil {
		t.Errorf("pull again: %v", err)
	}
}

func TestOpenRefuses(t *testing.T) {
	if _, err := Open(Config{}); err == nil {
		t.Error("no folder: passed")
	}
	for content, want := range map[string]string{
		`{"version":9}`: "format version 9, this program knows 1",
		`{"version":1,"layers":{"sha256:a":{"dir":"../../etc"}}}`: "not a number",
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, indexFile), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(Config{Dir: dir}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v", content, err)
		}
	}
}

func TestRemoveAndGC(t *testing.T) {
	host := serve(t, nil)
	s := open(t, t.TempDir())
	base := archive(t, entry{name: "base", body: "b"})
	pull := func(ref, body string) Image {
		t.Helper()
		push(t, host+ref, build(t, v1.Config{}, base, archive(t, entry{name: "f", body: body})))
		img, err := s.Pull(t.Context(), host+ref, Auth{})
		if err != nil {
			t.Fatal(err)
		}
		return img
	}
	a, b, c := pull("/a:1", "a"), pull("/b:1", "b"), pull("/c:1", "c")
	if a2 := pull("/a:2", "a"); a2.ID != a.ID || len(a2.Refs) != 2 {
		t.Fatalf("second name: %+v", a2)
	}
	if err := s.Remove(t.Context(), host+"/a:2"); err != nil {
		t.Fatal(err)
	}
	if got, ok, _ := s.Get(a.ID); !ok || len(got.Refs) != 1 {
		t.Fatalf("after taking one name of two: %v %v", ok, got.Refs)
	}
	if err := s.Remove(t.Context(), host+"/a:2"); !errors.Is(err, ErrNotFound) {
		t.Fatalf("again: %v", err)
	}
	if err := s.Remove(t.Context(), host+"/a:1"); err != nil {
		t.Fatal(err)
	}
	if _, ok, _ := s.Get(a.ID); ok || len(s.layerDirs(t)) != 3 {
		t.Fatalf("after the last name: %v, layers %v", ok, s.layerDirs(t))
	}
	if gone, err := s.GC(t.Context(), GCPolicy{MinAge: time.Hour}); err != nil || len(gone) != 0 {
		t.Fatalf("young images: %v %v", gone, err)
	}
	gone, err := s.GC(t.Context(), GCPolicy{Keep: []string{host + "/c:1", "nobody", "Bad//Name"}})
	if err != nil || len(gone) != 1 || gone[0].ID != b.ID {
		t.Fatalf("GC: %v %v", gone, err)
	}
	if list, _ := s.List(t.Context()); len(list) != 1 || list[0].ID != c.ID || len(s.layerDirs(t)) != 2 {
		t.Fatalf("left: %v %v", list, s.layerDirs(t))
	}
	if err := s.Remove(t.Context(), c.ID); err != nil {
		t.Fatal(err)
	}
	if len(s.layerDirs(t)) != 0 {
		t.Fatalf("layers: %v", s.layerDirs(t))
	}
	if blobs, _ := filepath.Glob(s.path("blobs", "*")); len(blobs) != 0 {
		t.Fatalf("blobs: %v", blobs)
	}
	s.nothingLeft(t)
}

// TestGCStopsWhenEnough: the images that have not been used for longest go, and
// no more than are needed.
func TestGCStopsWhenEnough(t *testing.T) {
	host := serve(t, nil)
	s := open(t, t.TempDir())
	ids := map[string]string{}
	for i, name := range []string{"/old:1", "/older:1", "/new:1"} {
		push(t, host+name, build(t, v1.Config{}, archive(t, entry{name: "f", body: strings.Repeat(name, 1000)})))
		img, err := s.Pull(t.Context(), host+name, Auth{})
		if err != nil {
			t.Fatal(err)
		}
		ids[name] = img.ID
		s.mu.Lock()
		s.lastUsed[img.ID] = time.Now().Add([]time.Duration{-time.Hour, -2 * time.Hour, -time.Minute}[i])
		s.mu.Unlock()
	}
	gone, err := s.GC(t.Context(), GCPolicy{Bytes: 1})
	if err != nil || len(gone) != 1 || gone[0].ID != ids["/older:1"] {
		t.Fatalf("the first: %+v %v", gone, err)
	}
	gone, err = s.GC(t.Context(), GCPolicy{Bytes: 1 << 40, MinAge: 30 * time.Minute})
	if err != nil || len(gone) != 1 || gone[0].ID != ids["/old:1"] {
		t.Fatalf("the next: %+v %v", gone, err)
	}
}

// TestIndexGolden pins the format of images.json.
func TestIndexGolden(t *testing.T) {
	ix := index{
		Version: indexVersion,
		Images: map[string]imageRecord{"sha256:1": {
			Refs: []string{"docker.io/library/nginx:1"}, RepoDigests: []string{"docker.io/library/nginx@sha256:2"},
			Manifest: "sha256:2", Chains: []string{"sha256:3"}, Pinned: true,
		}},
		Layers: map[string]layer{"sha256:3": {Dir: "0", Size: 5}},
	}
	got, err := json.Marshal(ix)
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"version":1,"images":{"sha256:1":{"refs":["docker.io/library/nginx:1"],"repoDigests":["docker.io/library/nginx@sha256:2"],"manifest":"sha256:2","chains":["sha256:3"],"pinned":true}},"layers":{"sha256:3":{"dir":"0","size":5}}}`
	if string(got) != want {
		t.Fatalf("got  %s\nwant %s", got, want)
	}
	path := filepath.Join(t.TempDir(), indexFile)
	if err := os.WriteFile(path, got, 0o600); err != nil {
		t.Fatal(err)
	}
	back, err := readIndex(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(ix, back); d != "" {
		t.Fatal(d)
	}
}

// TestDamagedIndex: an index that cannot be read is set aside, and images are
// pulled again.
func TestDamagedIndex(t *testing.T) {
	host := serve(t, nil)
	push(t, host+"/a:1", build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"})))
	s := open(t, t.TempDir())
	if _, err := s.Ensure(t.Context(), host+"/a:1", Auth{}); err != nil {
		t.Fatal(err)
	}
	_ = s.Close()
	if err := os.Truncate(s.path(indexFile), 20); err != nil {
		t.Fatal(err)
	}
	s = open(t, s.cfg.Dir)
	if list, err := s.List(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("%v %v", list, err)
	}
	if _, err := s.Ensure(t.Context(), host+"/a:1", Auth{}); err != nil {
		t.Errorf("pull again: %v", err)
	}
	if _, err := os.Stat(s.path(indexFile + ".damaged")); err != nil {
		t.Error(err)
	}
}

// TestVerify: whatever is changed in a layer is found, the image goes, with all
// that share the layer, and comes again whole.
func TestVerify(t *testing.T) {
	host := serve(t, nil)
	base := archive(t, entry{name: "bin/"}, entry{name: "bin/sh", body: "program", mode: 0o755}, entry{name: "sh", typ: tar.TypeSymlink, body: "bin/sh"}, entry{name: "etc/"})
	push(t, host+"/a:1", build(t, v1.Config{}, base, archive(t, entry{name: "a", body: "a"})))
	push(t, host+"/b:1", build(t, v1.Config{}, base, archive(t, entry{name: "b", body: "b"})))
	push(t, host+"/c:1", build(t, v1.Config{}, archive(t, entry{name: "c", body: "c"})))
	damages := map[string]func(dir string) error{
		"a file is gone":    func(dir string) error { return os.Remove(filepath.Join(dir, "bin/sh")) },
		"a file is cut":     func(dir string) error { return os.Truncate(filepath.Join(dir, "bin/sh"), 3) },
		"a file is written": func(dir string) error { return os.WriteFile(filepath.Join(dir, "bin/sh"), []byte("malware"), 0) },
		"a mode is changed": func(dir string) error { return os.Chmod(filepath.Join(dir, "bin/sh"), 0o700) },
		"a folder is gone":  func(dir string) error { return os.Remove(filepath.Join(dir, "etc")) },
		"a link leads elsewhere": func(dir string) error {
			return errors.Join(os.Remove(filepath.Join(dir, "sh")), os.Symlink("etc", filepath.Join(dir, "sh")))
		},
		"something is new": func(dir string) error { return os.WriteFile(filepath.Join(dir, "etc/new"), nil, 0o644) },
		"all is gone":      func(dir string) error { return os.RemoveAll(dir) },
	}
	for name, damage := range damages {
		t.Run(name, func(t *testing.T) {
			s := open(t, t.TempDir())
			var ids []string
			for _, ref := range []string{"/a:1", "/b:1", "/c:1"} {
				img, err := s.Ensure(t.Context(), host+ref, Auth{})
				if err != nil {
					t.Fatal(err)
				}
				ids = append(ids, img.ID)
			}
			if err := s.VerifyAll(t.Context()); err != nil {
				t.Fatal(err)
			}
			if list, _ := s.List(t.Context()); len(list) != 3 {
				t.Fatalf("whole images were dropped: %v", list)
			}
			shared := s.layers[s.index.Images[ids[0]].Chains[0]].Dir
			if err := damage(s.layerPath(shared)); err != nil {
				t.Fatal(err)
			}
			if err := s.Verify(t.Context(), ids[2]); err != nil {
				t.Errorf("the image beside it: %v", err)
			}
			if err := s.Verify(t.Context(), ids[0]); !errors.Is(err, ErrDamaged) {
				t.Errorf("got %v", err)
			}
			if list, _ := s.List(t.Context()); len(list) != 1 || list[0].ID != ids[2] {
				t.Errorf("left: %v", list)
			}
			for i, ref := range []string{"/a:1", "/b:1"} {
				img, err := s.Ensure(t.Context(), host+ref, Auth{})
				if err != nil || img.ID != ids[i] {
					t.Fatalf("pull again: %v", err)
				}
				if err := s.Verify(t.Context(), img.ID); err != nil {
					t.Errorf("pulled again: %v", err)
				}
			}
			now := s.layers[s.index.Images[ids[0]].Chains[0]].Dir
			if now == shared {
				t.Error("the damaged layer is used again")
			}
			if got := read(t, s.layerPath(now), "bin/sh"); got != "program" {
				t.Errorf("content %q", got)
			}
			_ = s.Close()
			if s = open(t, s.cfg.Dir); len(s.layerDirs(t)) != 4 {
				t.Errorf("layers %v: the damaged one is not removed", s.layerDirs(t))
			}
		})
	}
}
