package image

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
)

// volumeStore is a rootStore whose volumes of owner "o" are gone too when the
// test ends.
func volumeStore(t *testing.T) *Store {
	t.Helper()
	s := rootStore(t)
	t.Cleanup(func() {
		entries, _ := os.ReadDir(s.path("volumes", "o"))
		for _, e := range entries {
			if err := unmountAll(s.VolumePath("o", e.Name())); err != nil {
				t.Error(err)
			}
		}
	})
	return s
}

func mountVolume(t *testing.T, s *Store, img Image, name string) string {
	t.Helper()
	root, err := s.MountVolume(t.Context(), img, "o", name)
	if err != nil {
		t.Fatal(err)
	}
	if root != s.VolumePath("o", name) {
		t.Errorf("mounted at %s, VolumePath says %s", root, s.VolumePath("o", name))
	}
	return root
}

func TestRootVolumeContent(t *testing.T) {
	for _, tt := range []struct {
		name   string
		layers [][]entry
		want   []string
	}{
		{"one layer", [][]entry{{{name: "dir/f", body: "x"}}}, []string{"drwxr-xr-x dir", "-rw-r--r-- dir/f x"}},
		{"merged as for a container", [][]entry{
			{{name: "a", body: "1"}, {name: "b", body: "1"}},
			{{name: ".wh.a"}, {name: "b", body: "2"}},
		}, []string{"-rw-r--r-- b 2"}},
		{"no layers", nil, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := volumeStore(t)
			var layers [][]byte
			for _, l := range tt.layers {
				layers = append(layers, archive(t, l...))
			}
			root := mountVolume(t, s, load(t, s, "a:1", build(t, v1.Config{}, layers...)), "v")
			if d := cmp.Diff(tt.want, tree(t, root)); d != "" {
				t.Error(d)
			}
			if err := os.WriteFile(filepath.Join(root, "new"), nil, 0o600); !errors.Is(err, unix.EROFS) {
				t.Errorf("a write: %v, want %v", err, unix.EROFS)
			}
			var st unix.Statfs_t
			if err := unix.Statfs(root, &st); err != nil || st.Flags&(unix.ST_NOEXEC|unix.ST_NOSUID|unix.ST_NODEV) != unix.ST_NOEXEC|unix.ST_NOSUID|unix.ST_NODEV {
				t.Errorf("mount flags %x (%v)", st.Flags, err)
			}
		})
	}
}

func TestRootVolumeManyLayers(t *testing.T) {
	s := volumeStore(t)
	readHere(s)
	const n = 120
	var layers [][]byte
	for i := range n {
		layers = append(layers, archive(t, entry{name: "f" + strings.Repeat("x", i), body: "x"}))
	}
	root := mountVolume(t, s, load(t, s, "a:1", build(t, v1.Config{}, layers...)), "v")
	if got := tree(t, root); len(got) != n {
		t.Fatalf("sees %d files, want %d", len(got), n)
	}
}

// TestRootVolumeLife: an image below a volume is in use, also for a store that
// was opened since, until the owner's volumes are taken away.
func TestRootVolumeLife(t *testing.T) {
	s := volumeStore(t)
	img := load(t, s, "a:1", build(t, v1.Config{}, archive(t, entry{name: "f", body: "one"})))
	other := load(t, s, "b:1", build(t, v1.Config{}, archive(t, entry{name: "f", body: "two"})))
	if _, ok, err := s.Volume("o", "v"); ok || err != nil {
		t.Fatalf("before it is mounted: %v %v", ok, err)
	}
	root := mountVolume(t, s, img, "v")
	mountVolume(t, s, other, "w")
	if mountVolume(t, s, other, "v"); read(t, root, "f") != "one" {
		t.Error("a mounted volume got another content")
	}
	if err := s.Remove(t.Context(), "a:1"); !errors.Is(err, ErrInUse) {
		t.Errorf("remove below a volume: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	again := open(t, s.cfg.Dir)
	if got, ok, err := again.Volume("o", "v"); err != nil || !ok || got.ID != img.ID {
		t.Errorf("after a restart: %+v %v %v", got, ok, err)
	}
	if owners, err := again.VolumeOwners(); err != nil || !cmp.Equal(owners, []string{"o"}) {
		t.Errorf("owners %v %v", owners, err)
	}
	for _, name := range []string{"a:1", "b:1"} {
		if err := again.Remove(t.Context(), name); !errors.Is(err, ErrInUse) {
			t.Errorf("remove %s: %v", name, err)
		}
	}
	for range 2 {
		if err := again.UnmountVolumes(t.Context(), "o"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Lstat(again.path("volumes", "o")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the owner's folder: %v", err)
	}
	if err := again.Remove(t.Context(), "a:1"); err != nil {
		t.Error(err)
	}
	if dirs := again.layerDirs(t); len(dirs) != 1 {
		t.Errorf("layers %v, want the one of b:1", dirs)
	}
	again.nothingLeft(t)
}

// TestRootVolumeAfterBoot: a record that a boot has left without its mount is
// not taken for one, whatever image it names.
func TestRootVolumeAfterBoot(t *testing.T) {
	s := volumeStore(t)
	img := load(t, s, "a:1", build(t, v1.Config{}, archive(t, entry{name: "f", body: "one"})))
	other := load(t, s, "b:1", build(t, v1.Config{}, archive(t, entry{name: "f", body: "two"})))
	if err := unmountAll(mountVolume(t, s, img, "v")); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := s.Volume("o", "v"); ok || err != nil {
		t.Errorf("not mounted, and yet: %v %v", ok, err)
	}
	if got := read(t, mountVolume(t, s, other, "v"), "f"); got != "two" {
		t.Errorf("content %q", got)
	}
	if _, err := s.MountVolume(t.Context(), Image{ID: "sha256:" + strings.Repeat("0", 64)}, "o", "x"); !errors.Is(err, ErrNotFound) {
		t.Errorf("an unknown image: %v", err)
	}
	for _, bad := range []string{"", "..", "a/b"} {
		if _, err := s.MountVolume(t.Context(), img, bad, "v"); err == nil {
			t.Errorf("owner %q passed", bad)
		}
		if _, err := s.MountVolume(t.Context(), img, "o", bad); err == nil {
			t.Errorf("volume %q passed", bad)
		}
	}
}
