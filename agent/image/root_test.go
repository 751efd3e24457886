package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netnstest"
)

// rootStore is a store whose mounts are gone when the test ends.
func rootStore(t *testing.T) *Store {
	t.Helper()
	netnstest.NeedRoot(t)
	s := open(t, t.TempDir())
	t.Cleanup(func() {
		ids, err := s.Mounts()
		if err != nil {
			t.Error(err)
		}
		for _, id := range ids {
			if err := s.Unmount(t.Context(), id); err != nil && !errors.Is(err, t.Context().Err()) {
				t.Error(err)
			}
			_ = s.unmount(id)
		}
		if b, err := os.ReadFile("/proc/self/mounts"); err != nil || strings.Contains(string(b), s.cfg.Dir) {
			t.Errorf("mounts left below %s (%v)", s.cfg.Dir, err)
		}
	})
	return s
}

func load(t *testing.T, s *Store, ref string, img v1.Image) Image {
	t.Helper()
	imgs, err := s.Load(t.Context(), bytes.NewReader(dockerSave(t, map[string]v1.Image{ref: img})))
	if err != nil {
		t.Fatal(err)
	}
	return imgs[0]
}

func mount(t *testing.T, s *Store, img Image, id string) string {
	t.Helper()
	root, err := s.Mount(t.Context(), img, id)
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// TestRootMerged stacks layers and looks at what a container sees.
func TestRootMerged(t *testing.T) {
	for _, tt := range []struct {
		name   string
		layers [][]entry
		want   []string
	}{
		{"a file deleted and one made again", [][]entry{
			{{name: "a", body: "1"}, {name: "b", body: "1"}, {name: "c", body: "1"}},
			{{name: ".wh.a"}, {name: ".wh.b"}, {name: "d", body: "2"}},
			{{name: "b", body: "3"}},
		}, []string{"-rw-r--r-- b 3", "-rw-r--r-- c 1", "-rw-r--r-- d 2"}},
		{"an opaque folder", [][]entry{
			{{name: "d/old", body: "1"}, {name: "d/sub/x", body: "1"}, {name: "e/x", body: "1"}},
			{{name: "d/.wh..wh..opq"}, {name: "d/new", body: "2"}, {name: "e/y", body: "2"}},
		}, []string{"drwxr-xr-x d", "-rw-r--r-- d/new 2", "drwxr-xr-x e", "-rw-r--r-- e/x 1", "-rw-r--r-- e/y 2"}},
		{"opaque, written after its content", [][]entry{
			{{name: "d/old", body: "1"}},
			{{name: "d/new", body: "2"}, {name: "d/.wh..wh..opq"}},
		}, []string{"drwxr-xr-x d", "-rw-r--r-- d/new 2"}},
		{"a folder deleted and made again", [][]entry{
			{{name: "d/old", body: "1"}},
			{{name: ".wh.d"}},
			{{name: "d/"}, {name: "d/new", body: "3"}},
		}, []string{"drwxr-xr-x d", "-rw-r--r-- d/new 3"}},
		{"deleted and made again in one layer", [][]entry{
			{{name: "d/old", body: "1"}, {name: "f", body: "1"}},
			{{name: ".wh.d"}, {name: "d/"}, {name: "d/new", body: "2"}, {name: ".wh.f"}, {name: "f", body: "2"}},
		}, []string{"drwxr-xr-x d", "-rw-r--r-- d/new 2", "-rw-r--r-- f 2"}},
		{"made again and deleted below, in one layer", [][]entry{
			{{name: "d/old", body: "1"}},
			{{name: "d/"}, {name: "d/new", body: "2"}, {name: ".wh.d"}},
		}, []string{"drwxr-xr-x d", "-rw-r--r-- d/new 2"}},
		{"a whiteout as overlayfs writes it", [][]entry{
			{{name: "a", body: "1"}},
			{{name: "a", typ: tar.TypeChar, body: "0:0"}},
		}, nil},
		{"a link below, deleted on the way", [][]entry{
			{{name: "usr/lib/"}, {name: "lib", typ: tar.TypeSymlink, body: "usr/lib"}},
			{{name: "lib/x", body: "2"}},
			{{name: "lib/.wh.x"}, {name: "lib/y", body: "3"}},
		}, []string{"Lrwxrwxrwx lib -> usr/lib", "drwxr-xr-x usr", "drwxr-xr-x usr/lib", "-rw-r--r-- usr/lib/y 3"}},
		{"a file in a folder's place and back", [][]entry{
			{{name: "d/x", body: "1"}},
			{{name: "d", body: "file"}},
			{{name: "d/"}, {name: "d/y", body: "3"}},
		}, []string{"drwxr-xr-x d", "-rw-r--r-- d/y 3"}},
		{"no layers", nil, nil},
		{"the root's own mode", [][]entry{{{name: "./", mode: 0o711}, {name: "f", body: "x"}}, {{name: "g", body: "y"}}}, []string{"-rw-r--r-- f x", "-rw-r--r-- g y"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := rootStore(t)
			var layers [][]byte
			for _, l := range tt.layers {
				layers = append(layers, archive(t, l...))
			}
			root := mount(t, s, load(t, s, "a:1", build(t, v1.Config{}, layers...)), "c1")
			if d := cmp.Diff(tt.want, tree(t, root)); d != "" {
				t.Fatal(d)
			}
			if tt.name == "the root's own mode" {
				if fi, err := os.Stat(root); err != nil || fi.Mode().Perm() != 0o711 {
					t.Fatalf("root: %v %v", fi.Mode(), err)
				}
			}
		})
	}
}

func TestRootAttributes(t *testing.T) {
	s := rootStore(t)
	capability := "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	img := load(t, s, "a:1", build(t, v1.Config{}, archive(t,
		entry{name: "home/", uid: 1000, mode: 0o700},
		entry{name: "home/f", body: "x", uid: 1000, mode: 0o4711, pax: map[string]string{xattrRecord + "user.note": "hi"}},
		entry{name: "null", typ: tar.TypeChar},
		entry{name: "ping", body: "x", mode: 0o755, pax: map[string]string{
			xattrRecord + "security.capability":    capability,
			xattrRecord + "trusted.overlay.opaque": "y",
		}},
	)))
	root := mount(t, s, img, "c1")
	var st unix.Stat_t
	for _, tt := range []struct {
		name string
		mode uint32
		uid  uint32
	}{{"home", unix.S_IFDIR | 0o700, 1000}, {"home/f", unix.S_IFREG | 0o4711, 1000}, {"null", unix.S_IFCHR | 0o644, 0}, {"ping", unix.S_IFREG | 0o755, 0}} {
		if err := unix.Lstat(filepath.Join(root, tt.name), &st); err != nil {
			t.Fatal(err)
		}
		if st.Mode != tt.mode || st.Uid != tt.uid || st.Gid != tt.uid {
			t.Errorf("%s: mode %o, owner %d:%d", tt.name, st.Mode, st.Uid, st.Gid)
		}
	}
	attr := func(path, name string) string {
		b := make([]byte, 100)
		n, err := unix.Lgetxattr(path, name, b)
		if err != nil {
			return ""
		}
		return string(b[:n])
	}
	if got := attr(filepath.Join(root, "home/f"), "user.note"); got != "hi" {
		t.Errorf("user.note = %q", got)
	}
	if got := attr(filepath.Join(root, "ping"), "security.capability"); got != capability {
		t.Errorf("capability = %q", got)
	}
	if got := attr(filepath.Join(s.layerDirs(t)[0], "ping"), "trusted.overlay.opaque"); got != "" {
		t.Errorf("an image set overlayfs's own mark: %q", got)
	}
}

func TestRootContainers(t *testing.T) {
	s := rootStore(t)
	img := load(t, s, "a:1", build(t, v1.Config{}, archive(t, entry{name: "f", body: "image"})))
	other := load(t, s, "b:1", build(t, v1.Config{}, archive(t, entry{name: "f", body: "other"})))
	one, two := mount(t, s, img, "one"), mount(t, s, img, "two")
	if err := os.WriteFile(filepath.Join(one, "f"), []byte("changed"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := read(t, two, "f"); got != "image" {
		t.Fatalf("the other container sees %q", got)
	}
	if again := mount(t, s, img, "one"); again != one || read(t, one, "f") != "changed" {
		t.Fatal("a second Mount lost the changes")
	}
	if _, err := s.Mount(t.Context(), other, "one"); err == nil {
		t.Fatal("another image on the same id passed")
	}
	if _, err := s.Mount(t.Context(), Image{ID: "sha256:" + strings.Repeat("0", 64)}, "three"); !errors.Is(err, ErrNotFound) {
		t.Fatalf("an unknown image: %v", err)
	}
	for _, id := range []string{"", "..", "a/b"} {
		if _, err := s.Mount(t.Context(), img, id); err == nil {
			t.Errorf("id %q passed", id)
		}
	}
	if err := s.Remove(t.Context(), "a:1"); !errors.Is(err, ErrInUse) {
		t.Fatalf("remove below containers: %v", err)
	}
	// The store comes and goes, the containers stay.
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	again := open(t, s.cfg.Dir)
	if ids, err := again.Mounts(); err != nil || len(ids) != 2 {
		t.Fatalf("Mounts: %v %v", ids, err)
	}
	if got := read(t, mount(t, again, img, "one"), "f"); got != "changed" {
		t.Fatalf("after a restart: %q", got)
	}
	// One that is in use is taken from under its user.
	f, err := os.Open(filepath.Join(one, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for range 2 {
		for _, id := range []string{"one", "two"} {
			if err := again.Unmount(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := again.Remove(t.Context(), "a:1"); err != nil {
		t.Fatal(err)
	}
	if dirs := again.layerDirs(t); len(dirs) != 1 {
		t.Fatalf("layers: %v", dirs)
	}
	again.nothingLeft(t)
}

// TestRootManyLayers mounts more layers than fit into the options by their
// paths.
func TestRootManyLayers(t *testing.T) {
	s := rootStore(t)
	readHere(s)
	const n = 120
	var layers [][]byte
	for i := range n {
		layers = append(layers, archive(t, entry{name: fmt.Sprintf("f%03d", i), body: "x"}))
	}
	root := mount(t, s, load(t, s, "a:1", build(t, v1.Config{}, layers...)), "c1")
	if got := tree(t, root); len(got) != n {
		t.Fatalf("sees %d files, want %d", len(got), n)
	}
}

// TestRootOddFolder: the data directory's name has characters that mean something
// to overlayfs.
func TestRootOddFolder(t *testing.T) {
	netnstest.NeedRoot(t)
	dir := filepath.Join(t.TempDir(), `a:b,c\d`)
	s := open(t, dir)
	root := mount(t, s, load(t, s, "a:1", build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"}))), "c1")
	defer func() {
		if err := s.Unmount(t.Context(), "c1"); err != nil {
			t.Error(err)
		}
	}()
	if got := read(t, root, "f"); got != "x" {
		t.Fatal(got)
	}
}

// TestRootNoDescriptorsLeft unpacks often and counts open files.
func TestRootNoDescriptorsLeft(t *testing.T) {
	s := rootStore(t)
	count := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	load(t, s, "warm:up", build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"})))
	runtime.GC()
	before := count()
	for i := range 20 {
		load(t, s, fmt.Sprintf("a:%d", i), build(t, v1.Config{},
			archive(t, entry{name: "usr/lib/x", body: fmt.Sprint(i)}, entry{name: "lib", typ: tar.TypeSymlink, body: "usr/lib"}),
			archive(t, entry{name: "lib/y/z", body: "1"}, entry{name: "k", typ: tar.TypeLink, body: "lib/x"}, entry{name: ".wh.lib"})))
	}
	if after := count(); after > before+2 {
		t.Fatalf("%d open files, before %d", after, before)
	}
}
