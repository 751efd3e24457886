package image

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/netnstest"
)

const firstUser = 1 << 20 // of the tests' user namespaces

// inUsers calls fn with a user namespace.
func inUsers(t *testing.T, fn func(users *os.File)) {
	t.Helper()
	if err := netns.TryOwned(firstUser, 1<<16, func(users *os.File) error { fn(users); return nil }); err != nil {
		t.Fatal(err)
	}
}

func ownerOf(t *testing.T, path string) uint32 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Fatal(path, err)
	}
	return st.Uid
}

// TestRootMapped: a container in a user namespace sees the image's owners.
func TestRootMapped(t *testing.T) {
	s := rootStore(t)
	readHere(s)
	var layers [][]byte
	for i := range 100 { // their paths do not fit into the mount's options
		layers = append(layers, archive(t, entry{name: fmt.Sprintf("f%d", i), body: "x", uid: i}))
	}
	img := load(t, s, "a:1", build(t, v1.Config{}, append(layers, archive(t, entry{name: "./", uid: 5}, entry{name: "f0", body: "new", uid: 500}))...))
	none := load(t, s, "b:1", build(t, v1.Config{}))
	inUsers(t, func(users *os.File) {
		if err := s.TryMapped(users); err != nil {
			t.Fatal(err)
		}
		root, err := s.MountMapped(t.Context(), img, "c", users)
		if err != nil {
			t.Fatal(err)
		}
		for name, uid := range map[string]uint32{"": 5, "f0": 500, "f1": 1, "f99": 99} {
			if got := ownerOf(t, filepath.Join(root, name)); got != firstUser+uid {
				t.Errorf("%q belongs to %d, want %d", name, got, firstUser+uid)
			}
		}
		// A change is the container's own and comes back with the same id.
		if err := os.Chown(filepath.Join(root, "f1"), firstUser+7, firstUser+7); err != nil {
			t.Fatal(err)
		}
		if again, err := s.MountMapped(t.Context(), img, "c", users); err != nil || again != root || ownerOf(t, filepath.Join(again, "f1")) != firstUser+7 {
			t.Errorf("mounted again at %s: %v", again, err)
		}
		// Whoever the pod's root is has to come by.
		for dir := filepath.Dir(root); dir != "/"; dir = filepath.Dir(dir) {
			if st, err := os.Stat(dir); err != nil || st.Mode()&0o001 == 0 {
				t.Errorf("%s: %v %v", dir, st.Mode(), err)
			}
		}
		bare, err := s.MountMapped(t.Context(), none, "n", users)
		if err != nil {
			t.Fatal(err)
		}
		if got := ownerOf(t, bare); got != firstUser {
			t.Errorf("the root of an image without layers belongs to %d", got)
		}
		vol, err := s.MountVolumeMapped(t.Context(), img, "pod", "v", users)
		if err != nil {
			t.Fatal(err)
		}
		if got := ownerOf(t, filepath.Join(vol, "f99")); got != firstUser+99 {
			t.Errorf("a volume's file belongs to %d", got)
		}
		if err := s.UnmountVolumes(t.Context(), "pod"); err != nil {
			t.Error(err)
		}
		// Another container of the image has none of it, nor has the image.
		if other := mount(t, s, img, "h"); ownerOf(t, filepath.Join(other, "f1")) != 1 {
			t.Error("the change of one container shows in another")
		}
		for _, id := range []string{"c", "n"} {
			if err := s.Unmount(t.Context(), id); err != nil {
				t.Error(err)
			}
		}
		if _, err := os.Lstat(filepath.Dir(root)); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", filepath.Dir(root), err)
		}
	})
}

// TestRootMappedCleanUp: what is mounted outside of a store's directory can be
// taken away without the store, also half-made.
func TestRootMappedCleanUp(t *testing.T) {
	s := rootStore(t)
	img := load(t, s, "a:1", build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"})))
	if err := CleanUp(s.cfg.Dir); err != nil {
		t.Errorf("nothing: %v", err)
	}
	var root string
	inUsers(t, func(users *os.File) {
		var err error
		if root, err = s.MountMapped(t.Context(), img, "c", users); err != nil {
			t.Fatal(err)
		}
		// As a kill in the middle leaves it.
		layers := s.path("mounts", "c", "layers")
		if err := os.Mkdir(layers, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount(s.path("layers"), layers, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
	})
	if err := CleanUp(s.cfg.Dir); err != nil {
		t.Error(err)
	}
	if err := s.Unmount(t.Context(), "c"); err != nil {
		t.Error(err)
	}
	if b, err := os.ReadFile("/proc/self/mounts"); err != nil || strings.Contains(string(b), root) || strings.Contains(string(b), s.cfg.Dir) {
		t.Errorf("left mounted: %v\n%s", err, b)
	}
}

// What a process that was killed while it tried the kernel has left mounted does not
// keep the next one from starting.
func TestRootLeftMounted(t *testing.T) {
	netnstest.NeedRoot(t)
	dir := t.TempDir()
	left := filepath.Join(dir, "tmp", "mapped-1", "layers", "layers")
	if err := os.MkdirAll(left, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, at := range []string{filepath.Dir(left), left} {
		if err := os.MkdirAll(at, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("none", at, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
	}
	open(t, dir)
	if _, err := os.Stat(filepath.Join(dir, "tmp", "mapped-1")); !os.IsNotExist(err) {
		t.Errorf("it is still there: %v", err)
	}
}
