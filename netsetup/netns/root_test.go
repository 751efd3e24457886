package netns_test

import (
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/netnstest"
)

// inode identifies a namespace.
func inode(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

func TestRootLifecycle(t *testing.T) {
	netnstest.NeedRoot(t)
	d, err := netns.Open(filepath.Join(t.TempDir(), "netns"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Delete("a"); _ = d.Delete("b") })

	// A file left over by a crash before the mount does not stand in the way.
	if err := os.WriteFile(d.Path("a"), nil, 0o400); err != nil {
		t.Fatal(err)
	}
	a, err := d.Create("a")
	if err != nil {
		t.Fatal(err)
	}
	first := inode(t, a)
	if again, err := d.Create("a"); err != nil || again != a {
		t.Fatalf("second Create: %q, %v", again, err)
	}
	if got := inode(t, a); got != first {
		t.Fatal("the second Create replaced the namespace")
	}
	b, err := d.Create("b")
	if err != nil {
		t.Fatal(err)
	}
	if inode(t, b) == first {
		t.Fatal("two names, one namespace")
	}
	names, err := d.List()
	if err != nil || len(names) != 2 || names[0] != "a" || names[1] != "b" {
		t.Fatalf("List: %v, %v", names, err)
	}
	// Stacked mounts all go.
	if err := unix.Mount(b, a, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := d.Delete("a"); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Delete("b"); err != nil {
		t.Fatal(err)
	}
	if names, _ := d.List(); len(names) != 0 {
		t.Fatalf("left: %v", names)
	}
}

// TestRootThreadsComeHome enters namespaces from many goroutines and then
// looks at every thread of the process: none may be left elsewhere.
func TestRootThreadsComeHome(t *testing.T) {
	netnstest.NeedRoot(t)
	home := inode(t, "/proc/self/ns/net")
	ns := netnstest.New(t)
	inside := inode(t, ns.Path)

	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 20 {
				err := netns.Do(ns.Path, func() error {
					var st unix.Stat_t
					if err := unix.Stat("/proc/thread-self/ns/net", &st); err != nil {
						return err
					}
					if st.Ino != inside {
						t.Errorf("ran in %d, want %d", st.Ino, inside)
					}
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	tasks, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		var st unix.Stat_t
		if err := unix.Stat(task, &st); err != nil {
			continue // the thread has ended
		}
		if st.Ino != home {
			t.Errorf("%s is in %d, want %d", task, st.Ino, home)
		}
	}
}
