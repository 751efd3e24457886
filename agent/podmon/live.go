package podmon

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// liveSize bounds the records: some 50 KiB a container.
const liveSize = "size=512m,mode=711"

// mountLive puts a tmpfs where the records are, unless a former podmon has.
// They tell of processes, mounts and FIFOs, of which nothing is left after a
// boot; on a disk, making and removing some fifteen small files took a good
// part of a pod's time; and they hold the environments of containers, into which
// Secrets go. Where the kernel can (Linux 6.4), it is not swapped out either.
func mountLive(dir string) error {
	live := filepath.Join(dir, liveDir)
	mounted, err := isMountPoint(live)
	if err != nil || mounted {
		return err
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if unix.Mount("podmon", live, "tmpfs", flags, liveSize+",noswap") == nil {
		return nil
	}
	if err := unix.Mount("podmon", live, "tmpfs", flags, liveSize); err != nil {
		return &os.PathError{Op: "mount tmpfs", Path: live, Err: err}
	}
	return nil
}

// unmountLive takes it away when there is no record any more.
func unmountLive(dir string) error {
	live := filepath.Join(dir, liveDir)
	mounted, err := isMountPoint(live)
	if err != nil || !mounted {
		return err
	}
	if err := unix.Unmount(live, unix.MNT_DETACH); err != nil {
		return &os.PathError{Op: "unmount", Path: live, Err: err}
	}
	return nil
}

func isMountPoint(path string) (bool, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW, 0, &st); err != nil {
		return false, &os.PathError{Op: "statx", Path: path, Err: err}
	}
	if st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return false, fmt.Errorf("%s: this kernel does not tell mount points (before Linux 5.8)", path)
	}
	return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}

func makeDirs(root string, names ...string) error {
	for _, n := range names {
		if err := os.MkdirAll(filepath.Join(root, n), 0o711); err != nil {
			return err
		}
	}
	return nil
}
