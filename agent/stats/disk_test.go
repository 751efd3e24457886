package stats

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netnstest"
)

func TestDiskUseCountsNamesOnce(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"a/f": strings.Repeat("x", 100_000), "b/g": ""})
	for _, name := range []string{"a/g", "b/f"} {
		if err := os.Link(filepath.Join(dir, "a/f"), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	got, err := DiskUse(t.Context(), filepath.Join(dir, "a"), filepath.Join(dir, "b"))
	if err != nil || got.Bytes < 100_000 || got.Bytes > 150_000 {
		t.Errorf("%+v %v", got, err)
	}
}

// TestRootDiskUseMounts: what is mounted below is somebody else's, also when it
// is of the same file system.
func TestRootDiskUseMounts(t *testing.T) {
	netnstest.NeedRoot(t)
	dir := t.TempDir()
	write(t, dir, map[string]string{"host/big": strings.Repeat("x", 1_000_000), "pod/bind/x": "", "pod/file": "", "pod/tmp/x": ""})
	for _, name := range []string{"bind", "file", "tmp"} {
		at, source := filepath.Join(dir, "pod", name), filepath.Join(dir, "host")
		var err error
		switch name {
		case "file":
			err = unix.Mount(filepath.Join(source, "big"), at, "", unix.MS_BIND, "")
		case "bind":
			err = unix.Mount(source, at, "", unix.MS_BIND, "")
		default:
			err = unix.Mount("tmpfs", at, "tmpfs", 0, "")
		}
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		}()
	}
	write(t, dir, map[string]string{"pod/tmp/big": strings.Repeat("x", 1_000_000)})
	got, err := DiskUse(t.Context(), filepath.Join(dir, "pod"))
	if err != nil || got.Inodes != 1 || got.Bytes > 100_000 {
		t.Errorf("%+v %v, want the folder alone", got, err)
	}
}
