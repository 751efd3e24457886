package netns_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/netnstest"
)

// TestRootOwned makes network namespaces that belong to user namespaces, and
// finds these again.
func TestRootOwned(t *testing.T) {
	netnstest.NeedRoot(t)
	d, err := netns.Open(filepath.Join(t.TempDir(), "netns"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Delete("a"); _ = d.Delete("b"); _ = d.Delete("plain") })
	owner := func(path string) uint64 {
		t.Helper()
		users, err := netns.Owner(path)
		if err != nil {
			t.Fatal(err)
		}
		defer users.Close()
		return inode(t, fmt.Sprintf("/proc/self/fd/%d", users.Fd()))
	}
	// A file left over by a crash before the mount does not stand in the way.
	if err := os.WriteFile(d.Path("a"), nil, 0o400); err != nil {
		t.Fatal(err)
	}
	a, err1 := d.CreateOwned("a", 1<<20, 1<<16)
	b, err2 := d.CreateOwned("b", 1<<21, 1<<16)
	plain, err3 := d.Create("plain")
	if err := errors.Join(err1, err2, err3); err != nil {
		t.Fatal(err)
	}
	host := inode(t, "/proc/self/ns/user")
	if owner(plain) != host {
		t.Error("a plain namespace is not the host's")
	}
	if owner(a) == host || owner(a) == owner(b) {
		t.Error("two owned namespaces do not have two owners")
	}
	if _, err := d.CreateOwned("a", 1<<20, 1<<16); !errors.Is(err, os.ErrExist) {
		t.Errorf("made again over the first: %v", err)
	}
	if _, err := d.CreateOwned("c", 1<<20, 0); err == nil {
		t.Error("made with no ids")
	}
	if names, err := d.List(); err != nil || strings.Join(names, " ") != "a b plain" {
		t.Errorf("pinned: %v %v", names, err)
	}
	if _, err := netns.Owner(d.Path("c")); err == nil {
		t.Error("nothing has an owner")
	}
	if err := os.WriteFile(d.Path("file"), nil, 0o400); err != nil {
		t.Fatal(err)
	}
	if _, err := netns.Owner(d.Path("file")); !errors.Is(err, netns.ErrNotNamespace) {
		t.Errorf("the owner of a file: %v", err)
	}
	// The processes that made them have ended.
	var ws unix.WaitStatus
	if pid, err := unix.Wait4(-1, &ws, unix.WNOHANG, nil); err != unix.ECHILD {
		t.Errorf("child %d is left (%v)", pid, err)
	}
}

// TestRootTryOwned: what was tried with a user namespace has its ids.
func TestRootTryOwned(t *testing.T) {
	netnstest.NeedRoot(t)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	err := netns.TryOwned(1<<20, 1<<16, func(users *os.File) error {
		mnt, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		if err != nil {
			return err
		}
		defer unix.Close(mnt)
		if err := unix.MountSetattr(mnt, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(users.Fd())}); err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Fstatat(mnt, "f", &st, 0); err != nil {
			return err
		}
		if st.Uid != 1<<20 || st.Gid != 1<<20 {
			t.Errorf("root's file belongs to %d %d", st.Uid, st.Gid)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	want := errors.New("mine")
	if err := netns.TryOwned(1<<20, 1<<16, func(*os.File) error { return want }); !errors.Is(err, want) {
		t.Errorf("got %v", err)
	}
}
