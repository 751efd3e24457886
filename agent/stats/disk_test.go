package stats

import (
	"errors"
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

// TestDiskUseDeep: below 30 directories of 200 letters a path is too long for the
// kernel; the files there count like any other.
func TestDiskUseDeep(t *testing.T) {
	dir := t.TempDir()
	at, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	const depth = 30
	name := strings.Repeat("d", 200)
	for range depth {
		if err := unix.Mkdirat(at, name, 0o755); err != nil {
			t.Fatal(err)
		}
		next, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(at)
		at = next
		for _, empty := range []string{"a", "z"} { // so that the walk comes back up
			if err := unix.Mkdirat(at, empty, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	fd, err := unix.Openat(at, "file", unix.O_CREAT|unix.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(at)
	f := os.NewFile(uintptr(fd), "file")
	defer f.Close()
	if _, err := f.Write(make([]byte, 1_000_000)); err != nil {
		t.Fatal(err)
	}
	got, err := DiskUse(t.Context(), dir)
	if err != nil || got.Bytes < 1_000_000 || got.Inodes != 1+3*depth+1 {
		t.Errorf("%+v %v, want 1 MB and %d inodes", got, err, 1+3*depth+1)
	}
}

// TestDiskUseMoved: a directory that is moved while the walk is in it does not end
// the walk, nor lead it elsewhere.
func TestDiskUseMoved(t *testing.T) {
	dir := t.TempDir()
	files := map[string]string{"outside/big": strings.Repeat("x", 1_000_000)}
	for _, d := range []string{"a", "b", "c"} {
		files["pod/"+d+"/deep/down/f"] = strings.Repeat("x", 100_000)
	}
	write(t, dir, files)
	pod := filepath.Join(dir, "pod")
	root, err := openDir(unix.AT_FDCWD, pod)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(root)
	u := usage{seen: map[inode]bool{}, buf: make([]byte, 4096)}
	if err := stat(unix.AT_FDCWD, pod, &u.top); err != nil {
		t.Fatal(err)
	}
	way := []level{{file: inodeOf(&u.top), left: []string{"a"}}}
	at, err := openDir(root, ".")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"b", "deep", "down"} {
		next, file, err := u.down(at, name)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(at)
		at, way = next, append(way, level{name: name, file: file})
	}
	if err := os.Rename(filepath.Join(pod, "b/deep"), filepath.Join(dir, "outside/deep")); err != nil {
		t.Fatal(err)
	}
	// From down to deep by "..": it is still the same directory.
	if at, way, err = u.up(root, at, way[:3]); err != nil || len(way) != 3 {
		t.Fatalf("%d levels, %v; want 3", len(way), err)
	}
	// From deep to b: ".." is outside by now.
	if at, way, err = u.up(root, at, way[:2]); err != nil || len(way) != 2 || way[1].name != "b" {
		t.Fatalf("%+v, %v; want to be in b", way, err)
	}
	var st, b unix.Statx_t
	if err := errors.Join(stat(at, "", &st), stat(unix.AT_FDCWD, filepath.Join(pod, "b"), &b)); err != nil || inodeOf(&st) != inodeOf(&b) {
		t.Errorf("not in b: %v", err)
	}
	// And b itself: the top is what is left.
	if err := os.Rename(filepath.Join(pod, "b"), filepath.Join(dir, "outside/b")); err != nil {
		t.Fatal(err)
	}
	down, file, err := u.down(at, ".")
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(at)
	if at, way, err = u.up(root, down, append(way[:1:1], level{name: "b", file: file}, level{name: "deep"})); err != nil || len(way) != 1 {
		t.Fatalf("%+v, %v; want to be at the top", way, err)
	}
	unix.Close(at)
	if got, err := DiskUse(t.Context(), pod); err != nil || got.Bytes < 200_000 || got.Bytes > 300_000 {
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
