package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// mountAt mounts a file system with a file in it, which has to be there to the end.
func mountAt(t *testing.T, dir string) (file string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	disk := t.TempDir()
	file = filepath.Join(disk, "data")
	if err := os.WriteFile(file, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(disk, dir, "", unix.MS_BIND, ""); err != nil {
		t.Skipf("cannot mount here: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return file
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// TestResetUnmountsBehindLinks: volumes below a folder that is reached by a symbolic
// link are unmounted before the folder is removed.
func TestResetUnmountsBehindLinks(t *testing.T) {
	base := t.TempDir()
	root, link := filepath.Join(base, "disk"), filepath.Join(base, "kubelet")
	data := mountAt(t, filepath.Join(root, "pods", "uid", "volumes", "kubernetes.io~csi", "v", "mount"))
	if err := os.WriteFile(filepath.Join(root, ".clusterd"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(root, link); err != nil {
		t.Fatal(err)
	}
	if err := removeDriven(link); err != nil {
		t.Fatal(err)
	}
	if !exists(data) {
		t.Fatal("the content of a volume was removed")
	}
	if exists(filepath.Join(root, "pods")) {
		t.Error("the pods' folder is still there")
	}
}

// TestRemoveFolderKeepsMounts: nothing is removed while anything is mounted below.
func TestRemoveFolderKeepsMounts(t *testing.T) {
	base := t.TempDir()
	folder, link := filepath.Join(base, "disk"), filepath.Join(base, "data")
	data := mountAt(t, filepath.Join(folder, "volumes", "v"))
	if err := os.Symlink(folder, link); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "config.yaml"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{folder, link} {
		if err := removeFolder(path); err == nil || !strings.Contains(err.Error(), "volumes/v is mounted") {
			t.Errorf("%s: %v", path, err)
		}
	}
	if !exists(data) || !exists(filepath.Join(folder, "config.yaml")) {
		t.Fatal("something was removed")
	}
	if err := unmountBelow(link); err != nil {
		t.Fatal(err)
	}
	if err := removeFolder(link); err != nil {
		t.Fatal(err)
	}
	if exists(folder) || exists(link) || !exists(data) {
		t.Error("the folder and its link should be gone, and the volume's content be there")
	}
}

// TestHostFolders: a reset knows the folders outside of the data folder that the node
// ran with, also those of earlier starts.
func TestHostFolders(t *testing.T) {
	cfg := defaultConfig()
	cfg.Data = t.TempDir()
	dir, base := dataDir(cfg.Data), t.TempDir()
	for _, name := range []string{"one", "two", "one"} {
		cfg.KubeletRoot, cfg.LogLinks = filepath.Join(base, name), filepath.Join(base, name+"-links")
		if err := dir.noteHostFolders(cfg); err != nil {
			t.Fatal(err)
		}
	}
	cfg.KubeletRoot, cfg.LogLinks, cfg.CgroupRoot = "", "", "/clusterd-test-of-reset"
	got, err := dir.readHostFolders()
	if err != nil || !slices.Equal(got.KubeletRoots, []string{filepath.Join(base, "one"), filepath.Join(base, "two")}) || len(got.LogLinks) != 2 {
		t.Fatalf("%+v, %v", got, err)
	}
	links := filepath.Join(base, "two-links")
	pods := filepath.Join(base, "two", "pods")
	for _, d := range []string{links, pods} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, target := range map[string]string{"ours": filepath.Join(cfg.Data, "log", "pods", "x"), "others": "/var/log/pods/x"} {
		if err := os.Symlink(target, filepath.Join(links, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(base, "two", ".clusterd"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := resetOutside(got, cfg.Data); err != nil {
		t.Fatal(err)
	}
	if exists(pods) || exists(filepath.Join(links, "ours")) || !exists(filepath.Join(links, "others")) {
		t.Error("what was made outside of the data folder is not undone, or more than that")
	}
}

// TestResetStopsBeforeTheFolder: a step that fails leaves the data folder, and says so.
func TestResetStopsBeforeTheFolder(t *testing.T) {
	folder := t.TempDir()
	var out bytes.Buffer
	err := finishReset(&out, folder, []resetStep{
		{"mounts", func() error { return os.ErrPermission }},
		{"cgroups", func() error { return nil }},
	})
	if err == nil || !strings.Contains(err.Error(), "remove mounts") || !strings.Contains(err.Error(), folder+" stays") || !exists(folder) {
		t.Errorf("%v; the folder is there: %t", err, exists(folder))
	}
	if err := finishReset(&out, folder, []resetStep{{"mounts", func() error { return nil }}}); err != nil || exists(folder) {
		t.Errorf("%v; the folder is there: %t", err, exists(folder))
	}
}
