package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
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

// TestResetUnmountsBehindLinks: volumes below a directory that is reached by a symbolic
// link are unmounted before the directory is removed.
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

// TestRemoveDirKeepsMounts: nothing is removed while anything is mounted below.
func TestRemoveDirKeepsMounts(t *testing.T) {
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
		if err := removeDir(path); err == nil || !strings.Contains(err.Error(), "volumes/v is mounted") {
			t.Errorf("%s: %v", path, err)
		}
	}
	if !exists(data) || !exists(filepath.Join(folder, "config.yaml")) {
		t.Fatal("something was removed")
	}
	if err := unmountBelow(link); err != nil {
		t.Fatal(err)
	}
	if err := removeDir(link); err != nil {
		t.Fatal(err)
	}
	if exists(folder) || exists(link) || !exists(data) {
		t.Error("the folder and its link should be gone, and the volume's content be there")
	}
}

// TestHostDirs: a reset knows the directories outside of the data directory that the node
// ran with, also those of earlier starts.
func TestHostDirs(t *testing.T) {
	cfg := defaultConfig()
	cfg.Data = t.TempDir()
	dir, base := nodedir.Dir(cfg.Data), t.TempDir()
	for _, name := range []string{"one", "two", "one"} {
		cfg.KubeletRoot, cfg.LogLinks = filepath.Join(base, name), filepath.Join(base, name+"-links")
		cfg.PodLogLinks = filepath.Join(base, "pod-links")
		if err := noteHostDirs(dir, cfg); err != nil {
			t.Fatal(err)
		}
	}
	cfg.KubeletRoot, cfg.LogLinks, cfg.PodLogLinks, cfg.CgroupRoot = "", "", "", "/clusterd-test-of-reset"
	got, err := readHostDirs(dir)
	if err != nil || !slices.Equal(got.KubeletRoots, []string{filepath.Join(base, "one"), filepath.Join(base, "two")}) || len(got.LogLinks) != 3 || !slices.Contains(got.LogLinks, filepath.Join(base, "pod-links")) {
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

// TestResetStopsBeforeTheDir: a step that fails leaves the data directory, and says so.
func TestResetStopsBeforeTheDir(t *testing.T) {
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

// terminal is a pseudo-terminal: what a person types into, and what the program reads.
func terminal(t *testing.T) (person, program *os.File) {
	t.Helper()
	person, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip("no pseudo-terminals here: ", err)
	}
	t.Cleanup(func() { person.Close() })
	if err := unix.IoctlSetPointerInt(int(person.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetInt(int(person.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	program, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { program.Close() })
	return person, program
}

// TestResetAsks: a person is asked and can say no; a script is not asked.
func TestResetAsks(t *testing.T) {
	data := t.TempDir()
	for _, tt := range []struct {
		typed  string
		yes    bool
		asks   bool
		goesOn bool
	}{
		{typed: "\n", asks: true},
		{typed: "n\n", asks: true},
		{typed: "y\n", asks: true, goesOn: true},
		{typed: "yes\n", asks: true, goesOn: true},
		{yes: true, goesOn: true},
	} {
		person, program := terminal(t)
		if _, err := person.WriteString(tt.typed); err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		err := confirmReset(tt.yes, data, program, &out)
		if (err == nil) != tt.goesOn || strings.Contains(out.String(), "Go on?") != tt.asks || tt.asks && !strings.Contains(out.String(), data) {
			t.Errorf("typed %q, --yes %v: %v, said %q", tt.typed, tt.yes, err, out.String())
		}
	}
	if err := os.MkdirAll(filepath.Join(data, "claims", "pvc-1"), 0o700); err != nil {
		t.Fatal(err)
	}
	person, asking := terminal(t)
	if _, err := person.WriteString("n\n"); err != nil {
		t.Fatal(err)
	}
	var named strings.Builder
	if err := confirmReset(false, data, asking, &named); err == nil || !strings.Contains(named.String(), "1 volumes in it go as well") || !strings.Contains(named.String(), "pvc-1") {
		t.Errorf("with a volume: %v, %q", err, named.String())
	}
	var out strings.Builder
	if err := confirmReset(false, data, strings.NewReader(""), &out); err != nil || out.Len() > 0 {
		t.Errorf("a script was asked: %v, %q", err, out.String())
	}
	_, program := terminal(t)
	if err := confirmReset(false, data+"/none", program, &out); err != nil || out.Len() > 0 {
		t.Errorf("asked about a folder that is not there: %v, %q", err, out.String())
	}
}
