package podmon

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// emptyMountNamespace makes a mount namespace that holds nothing but an empty
// read-only directory. All pauses share it: a namespace of its own for each
// would copy the node's whole mount table every time. dir is any empty directory;
// nothing stays mounted on it.
func emptyMountNamespace(dir string) (*os.File, error) {
	type result struct {
		ns  *os.File
		err error
	}
	done := make(chan result)
	go func() {
		// The thread ends with the goroutine: it is never unlocked.
		runtime.LockOSThread()
		ns, err := enterEmpty(dir)
		done <- result{ns, err}
	}()
	r := <-done
	return r.ns, r.err
}

func enterEmpty(dir string) (*os.File, error) {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return nil, fmt.Errorf("unshare: %w", err)
	}
	ns, err := os.Open(fmt.Sprintf("/proc/self/task/%d/ns/mnt", unix.Gettid()))
	if err != nil {
		return nil, err
	}
	if err := becomeEmpty(dir); err != nil {
		ns.Close()
		return nil, err
	}
	return ns, nil
}

func becomeEmpty(dir string) error {
	steps := []struct {
		what string
		do   func() error
	}{
		{"keep mounts private", func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") }},
		{"mount tmpfs", func() error {
			return unix.Mount("empty", dir, "tmpfs", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "size=4k,nr_inodes=2,mode=555")
		}},
		{"chdir", func() error { return unix.Chdir(dir) }},
		{"pivot_root", func() error { return unix.PivotRoot(".", ".") }},
		{"unmount old root", func() error { return unix.Unmount(".", unix.MNT_DETACH) }},
	}
	for _, s := range steps {
		if err := s.do(); err != nil {
			return fmt.Errorf("%s: %w", s.what, err)
		}
	}
	return nil
}
