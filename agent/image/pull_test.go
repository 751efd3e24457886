package image

import (
	"context"
	"errors"
	"io"
	"net/http"
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
)

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
		s, err := Open(Config{Dir: t.TempDir(), Registries: registries, Platform: v1.Platform{OS: "linux", Architecture: tt.arch}})
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
	if err := remote.Write(r, img, remote.WithAuth(authenticator(Auth{Username: "me", Password: "secret"}))); err != nil {
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
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	layer, err := layers[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigName()
	if err != nil {
		t.Fatal(err)
	}
	for _, end := range []string{layer.Hex, config.Hex, "/manifests/1"} {
		release, pushed := make(chan struct{}), false
		host := serve(t, func(h http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, end) && pushed {
					_, _ = io.WriteString(w, "some bytes")
					w.(http.Flusher).Flush()
					<-release
					return
				}
				h.ServeHTTP(w, r)
			})
		})
		push(t, host+"/a:1", img)
		pushed = true
		s, err := Open(Config{Dir: t.TempDir(), Registries: registries, StallTimeout: 200 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		_, err = s.Ensure(t.Context(), host+"/a:1", Auth{})
		var pe *PullError
		if !errors.As(err, &pe) || pe.Reason != ReasonUnreachable || !errors.Is(err, ErrStalled) {
			t.Errorf("%s: got %v", end, err)
		}
		close(release)
		if err := s.Close(); err != nil {
			t.Error(err)
		}
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

// TestAbandonedPull: the last caller gives up, the next one starts again.
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
