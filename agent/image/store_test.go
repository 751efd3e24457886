package image

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"go.uber.org/goleak"

	"github.com/clusterd/clusterd/leaktest"
)

func TestMain(m *testing.M) {
	if os.Args[0] == "imageworker" { // started by a store of a test
		os.Exit(Program(os.Args))
	}
	if os.Args[0] == "imagestore" {
		os.Exit(imageStore(os.Args[1], os.Args[2], os.Args[3]))
	}
	ignored := []goleak.Option{
		// The library races https against http and leaves the loser to itself.
		goleak.IgnoreAnyFunction("github.com/google/go-containerregistry/pkg/v1/remote/transport.pingParallel.func1"),
		goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"),
		goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"),
	}
	cleanup := goleak.Cleanup(func(code int) {
		for _, in := range []string{"memory", "pids", ""} { // cgroup v1, v2
			dir := filepath.Join("/sys/fs/cgroup", in, testCgroup())
			_ = syscall.Rmdir(dir + "/images")
			_ = syscall.Rmdir(dir)
		}
		os.Exit(code)
	})
	goleak.VerifyTestMain(leaktest.Patient(m, ignored...), append(ignored, cleanup)...)
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
// TestPin: GC leaves a pinned image alone, also one that was opened again, until it is
// unpinned.
func TestPin(t *testing.T) {
	host := serve(t, nil)
	dir := t.TempDir()
	s := open(t, dir)
	push(t, host+"/p:1", build(t, v1.Config{}, archive(t, entry{name: "f", body: "p"})))
	if _, err := s.Pull(t.Context(), host+"/p:1", Auth{}); err != nil {
		t.Fatal(err)
	}
	if err := s.Pin(t.Context(), host+"/none:1", true); !errors.Is(err, ErrNotFound) {
		t.Errorf("an image that is not there: %v", err)
	}
	if err := s.Pin(t.Context(), host+"/p:1", true); err != nil {
		t.Fatal(err)
	}
	if list, err := s.List(t.Context()); err != nil || len(list) != 1 || !list[0].Pinned {
		t.Errorf("pinned: %+v %v", list, err)
	}
	if gone, err := s.GC(t.Context(), GCPolicy{}); err != nil || len(gone) != 0 {
		t.Errorf("removed %+v, %v", gone, err)
	}
	s = open(t, dir)
	if gone, err := s.GC(t.Context(), GCPolicy{}); err != nil || len(gone) != 0 {
		t.Errorf("after a restart: removed %+v, %v", gone, err)
	}
	if err := s.Pin(t.Context(), host+"/p:1", false); err != nil {
		t.Fatal(err)
	}
	if gone, err := s.GC(t.Context(), GCPolicy{}); err != nil || len(gone) != 1 {
		t.Errorf("unpinned: removed %+v, %v", gone, err)
	}
}

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
			Manifest: "sha256:2", Chains: []string{"sha256:3"}, Pinned: true, Preloaded: true,
			Pulled: map[string]pulled{"docker.io/library/nginx": {Everyone: true, With: []pulledWith{{SecretID{"ns", "pull", "4"}, "5"}}}},
		}},
		Layers: map[string]layer{"sha256:3": {Dir: "0", Size: 5}},
		Salt:   "6",
	}
	got, err := json.Marshal(ix)
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"version":1,"images":{"sha256:1":{"refs":["docker.io/library/nginx:1"],"repoDigests":["docker.io/library/nginx@sha256:2"],"manifest":"sha256:2","chains":["sha256:3"],"pinned":true,"preloaded":true,"pulled":{"docker.io/library/nginx":{"everyone":true,"with":[{"namespace":"ns","name":"pull","uid":"4","hash":"5"}]}}}},"layers":{"sha256:3":{"dir":"0","size":5}},"salt":"6"}`
	if string(got) != want {
		t.Fatalf("got  %s\nwant %s", got, want)
	}
	// What was written before there were records of pulls is read, too.
	before := ix.clone()
	before.Salt = ""
	for id, rec := range before.Images {
		rec.Preloaded, rec.Pulled = false, nil
		before.Images[id] = rec
	}
	const first = `{"version":1,"images":{"sha256:1":{"refs":["docker.io/library/nginx:1"],"repoDigests":["docker.io/library/nginx@sha256:2"],"manifest":"sha256:2","chains":["sha256:3"],"pinned":true}},"layers":{"sha256:3":{"dir":"0","size":5}}}`
	for text, ix := range map[string]index{want: ix, first: before} {
		path := filepath.Join(t.TempDir(), indexFile)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
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

// TestDamagedMountRecord: what a power cut left of the record of a mount keeps
// nothing from being opened: nothing is mounted there.
func TestDamagedMountRecord(t *testing.T) {
	for _, content := range []string{"", `{"version":1,"im`} {
		dir := t.TempDir()
		_ = open(t, dir).Close()
		for _, mount := range []string{"mounts/x", "volumes/u/v"} {
			if err := os.MkdirAll(filepath.Join(dir, mount), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, mount, mountFile), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		s, err := Open(Config{Dir: dir})
		if err != nil {
			t.Fatalf("record %q: %v", content, err)
		}
		if err := s.Unmount(t.Context(), "x"); err != nil {
			t.Errorf("record %q: %v", content, err)
		}
		_ = s.Close()
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
