package volume

import (
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netnstest"
)

func TestKernelMounted(t *testing.T) {
	for dir, want := range map[string]bool{"/proc": true, t.TempDir(): false} {
		if got, err := (Kernel{}).Mounted(dir); got != want || err != nil {
			t.Errorf("%s: mounted %t %v, want %t", dir, got, err, want)
		}
		at, err := Kernel{}.Below(dir)
		if slices.Contains(at, dir) != want || err != nil {
			t.Errorf("%s: mount points below: %q %v", dir, at, err)
		}
	}
	if _, err := (Kernel{}).Mounted(t.TempDir() + "/none"); !os.IsNotExist(err) {
		t.Errorf("a folder that is not there: %v", err)
	}
}

// TestMountTableShared: whoever asks gets the table, also when all ask at once.
func TestMountTableShared(t *testing.T) {
	var table mountTable
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			for range 10 {
				if points, err := table.read(); err != nil || !slices.Contains(points, "/proc") {
					t.Errorf("mount points %q, %v", points, err)
				}
			}
		})
	}
	wg.Wait()
}

// TestRootBindIsASlave: taking a bind mount away, with what is mounted below it,
// leaves the host's own mounts.
func TestRootBindIsASlave(t *testing.T) {
	netnstest.NeedRoot(t)
	host, target := t.TempDir(), t.TempDir()
	mount := func(source, at, kind string, flags uintptr) {
		t.Helper()
		if err := unix.Mount(source, at, kind, flags, ""); err != nil {
			t.Fatal(err)
		}
	}
	unmount := func(at string) { _ = unix.Unmount(at, unix.MNT_DETACH) }
	t.Cleanup(func() { unmount(target); unmount(host + "/below"); unmount(host) })
	mount("tmpfs", host, "tmpfs", 0)
	mount("", host, "", unix.MS_SHARED)
	if err := os.Mkdir(host+"/below", 0o755); err != nil {
		t.Fatal(err)
	}
	mount("tmpfs", host+"/below", "tmpfs", 0)
	source, err := os.Open(host)
	if err != nil {
		t.Fatal(err)
	}
	defer source.Close()
	k := Kernel{}
	if err := k.Bind(source, target); err != nil {
		t.Fatal(err)
	}
	at, err := k.Below(target)
	if err != nil || !slices.Equal(at, []string{target + "/below", target}) {
		t.Fatalf("mounted at %q, %v", at, err)
	}
	for _, p := range at {
		if err := k.Unmount(p); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range []string{host, host + "/below"} {
		if mounted, err := k.Mounted(p); !mounted || err != nil {
			t.Errorf("%s of the host: mounted %t, %v", p, mounted, err)
		}
	}
}

// TestRootMountedOfASilentServer: whether something is mounted is known without its
// server, which once held up a pod's deletion and the agent's end.
func TestRootMountedOfASilentServer(t *testing.T) {
	netnstest.NeedRoot(t)
	dir := t.TempDir()
	dev, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skip("needs /dev/fuse:", err)
	}
	if err := unix.Mount("dead", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", dev)); err != nil {
		_ = unix.Close(dev)
		t.Fatal(err)
	}
	answer := sync.OnceFunc(func() { _ = unix.Close(dev) }) // the kernel fails all that waits
	t.Cleanup(func() {
		answer()
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	m := &Manager{cfg: Config{Mounter: Kernel{}}}
	got := make(chan string, 1)
	go func() {
		mounted, err := m.mountedAt(dir)
		got <- fmt.Sprint(mounted, err)
	}()
	select {
	case g := <-got:
		if g != "true <nil>" {
			t.Errorf("mounted: %s", g)
		}
	case <-time.After(20 * time.Second):
		answer()
		t.Errorf("the server is asked, which does not answer; after its end: %s", <-got)
	}
	if mounted, err := m.mountedAt(dir + "-none"); mounted || err != nil {
		t.Errorf("a place that is not there: %t, %v", mounted, err)
	}
}
