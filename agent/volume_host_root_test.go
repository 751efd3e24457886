package agent_test

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// sharedDir is a directory of the host whose mounts reach those who ask for them.
func sharedDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for unix.Unmount(dir, unix.MNT_DETACH) == nil { // with all below it
		}
	})
	if err := unix.Mount("", dir, "", unix.MS_SHARED, ""); err != nil {
		t.Fatal(err)
	}
	return dir
}

// mountTmpfs mounts a tmpfs with one file "f" on a new directory.
func mountTmpfs(t *testing.T, dir, content string) {
	t.Helper()
	if err := os.Mkdir(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestRootMountPropagation: mounts come and go through a volume as its mount
// asks for, and read-only means as deep as it says.
func TestRootMountPropagation(t *testing.T) {
	m := newMachine(t)
	dir := sharedDir(t)
	mountTmpfs(t, filepath.Join(dir, "early"), "early")
	p := newPod("p", app("web"))
	p.Spec.Containers[0].SecurityContext = &v1.SecurityContext{Privileged: ptr.To(true)}
	p.Spec.Volumes = []v1.Volume{{Name: "host", VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: dir}}}}
	mount := func(at string, change func(*v1.VolumeMount)) {
		vm := v1.VolumeMount{Name: "host", MountPath: at}
		change(&vm)
		p.Spec.Containers[0].VolumeMounts = append(p.Spec.Containers[0].VolumeMounts, vm)
	}
	mount("/default", func(*v1.VolumeMount) {})
	mount("/none", func(vm *v1.VolumeMount) { vm.MountPropagation = ptr.To(v1.MountPropagationNone) })
	mount("/in", func(vm *v1.VolumeMount) { vm.MountPropagation = ptr.To(v1.MountPropagationHostToContainer) })
	mount("/both", func(vm *v1.VolumeMount) { vm.MountPropagation = ptr.To(v1.MountPropagationBidirectional) })
	mount("/ro", func(vm *v1.VolumeMount) { vm.ReadOnly = true })
	mount("/rro", func(vm *v1.VolumeMount) {
		vm.ReadOnly, vm.RecursiveReadOnly = true, ptr.To(v1.RecursiveReadOnlyEnabled)
	})
	m.create(p)
	p = m.ready("p")

	mountTmpfs(t, filepath.Join(dir, "late"), "late")
	for at, late := range map[string]bool{"/default": false, "/none": false, "/in": true, "/both": true} {
		if got := m.file(p, at+"/early/f"); got != "early" {
			t.Errorf("%s: what was mounted before: %q", at, got)
		}
		if got := m.file(p, at+"/late/f"); (got == "late") != late {
			t.Errorf("%s: what was mounted later: %q", at, got)
		}
	}
	for at, host := range map[string]bool{"/in/own": false, "/both/given": true} {
		if got := m.fetch(p, "/tmpfs?name="+at); strings.TrimSpace(got) != "<nil>" {
			t.Fatalf("mount in the container at %s: %s", at, got)
		}
		name := filepath.Base(at)
		var st, parent unix.Stat_t
		if err := unix.Stat(filepath.Join(dir, name), &st); err != nil {
			t.Fatal(err)
		}
		if err := unix.Stat(dir, &parent); err != nil {
			t.Fatal(err)
		}
		if (st.Dev != parent.Dev) != host {
			t.Errorf("the host sees the container's mount at %s: %v, want %v", at, st.Dev != parent.Dev, host)
		}
	}
	for path, writable := range map[string]bool{"/in/x": true, "/in/early/x": true, "/ro/x": false, "/ro/early/x": true, "/rro/x": false, "/rro/early/x": false} {
		got := strings.TrimSpace(m.fetch(p, "/fill?size=1&name="+path))
		if (got == "<nil>") != writable || !writable && !strings.Contains(got, "read-only file system") {
			t.Errorf("writing %s: %s", path, got)
		}
	}
	for i, vm := range p.Status.ContainerStatuses[0].VolumeMounts {
		want := map[string]v1.RecursiveReadOnlyMode{"/ro": v1.RecursiveReadOnlyDisabled, "/rro": v1.RecursiveReadOnlyEnabled}[vm.MountPath]
		if got := ptr.Deref(vm.RecursiveReadOnly, ""); got != want || vm.MountPath != p.Spec.Containers[0].VolumeMounts[i].MountPath {
			t.Errorf("told of %s: %q, want %q", vm.MountPath, got, want)
		}
	}
}

// TestRootHostPathTypes: a path of the host is what its type says, or the pod
// waits and is told why.
func TestRootHostPathTypes(t *testing.T) {
	m := newMachine(t)
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	if err := os.WriteFile(in("file"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", in("socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := unix.Mknod(in("block"), unix.S_IFBLK|0o600, int(unix.Mkdev(7, 200))); err != nil {
		t.Fatal(err)
	}
	for i, tt := range []struct {
		path string
		kind v1.HostPathType
		stat string // what the container sees first of the mode; "": it waits
		says string
	}{
		{in("made"), v1.HostPathUnset, "d", ""},
		{in("file"), v1.HostPathUnset, "-", ""},
		{in("new/folder"), v1.HostPathDirectoryOrCreate, "d", ""},
		{dir, v1.HostPathDirectory, "d", ""},
		{in("newfile"), v1.HostPathFileOrCreate, "-", ""},
		{in("file"), v1.HostPathFile, "-", ""},
		{in("socket"), v1.HostPathSocket, "S", ""},
		{"/dev/null", v1.HostPathCharDev, "Dc", ""},
		{in("block"), v1.HostPathBlockDev, "D", ""},

		{in("file"), v1.HostPathDirectoryOrCreate, "", in("file") + " is not a directory"},
		{in("no"), v1.HostPathDirectory, "", in("no") + " is not a directory"},
		{dir, v1.HostPathFileOrCreate, "", dir + " is not a file"},
		{in("no/folder/file"), v1.HostPathFileOrCreate, "", in("no/folder/file") + ": no such file or directory"},
		{in("no"), v1.HostPathFile, "", in("no") + " is not a file"},
		{in("file"), v1.HostPathSocket, "", in("file") + " is not a socket file"},
		{in("block"), v1.HostPathCharDev, "", in("block") + " is not a character device"},
		{"/dev/null", v1.HostPathBlockDev, "", "/dev/null is not a block device"},
	} {
		name := "p" + string(rune('a'+i))
		t.Run(string(tt.kind)+" "+filepath.Base(tt.path), func(t *testing.T) {
			p := newPod(name, app("web"))
			mounted(p, "h", v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: tt.path, Type: &tt.kind}})
			m.create(p)
			if tt.stat != "" {
				if got := m.stat(m.ready(name), "/vol/h"); !strings.HasPrefix(got, tt.stat) {
					t.Errorf("the container sees %s, want %s…", got, tt.stat)
				}
			} else {
				m.eventually("the reason", func() bool {
					s := m.get(name).Status.ContainerStatuses
					return len(s) == 1 && s[0].State.Waiting != nil && strings.Contains(s[0].State.Waiting.Message, `volume "h"`) &&
						strings.Contains(s[0].State.Waiting.Message, tt.says)
				})
			}
			m.delete(name, 0)
		})
	}
}
