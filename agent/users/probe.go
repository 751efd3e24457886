package users

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netns"
)

// Probe tries what a pod with a user namespace needs of the kernel: the
// namespace itself with a network of its own, and id-mapped mounts
// (mount_setattr(2)) of a tmpfs and of the directory of volumes. more tries the
// rest with the same namespace. The error says what is missing.
func Probe(folder string, more func(users *os.File) error) error {
	return (Range{First: DefaultIDRange.First, Count: Count}).Try(func(users *os.File) error {
		if err := idmapTmpfs(users); err != nil {
			return fmt.Errorf("tmpfs cannot be mounted with mapped ids (Linux 6.3): %w", err)
		}
		if err := idmapDir(folder, users); err != nil {
			return fmt.Errorf("the file system of %s cannot be mounted with mapped ids (Linux 5.12 for ext4, 5.15 for btrfs, 5.19 for xfs): %w", folder, err)
		}
		return more(users)
	})
}

// Try calls fn with a user namespace of these ids that no process is in, for mounts
// to be made with them.
func (r Range) Try(fn func(users *os.File) error) error {
	return netns.TryOwned(r.First, r.Count, fn)
}

func idmapTmpfs(users *os.File) error {
	fsfd, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("fsopen: %w", err)
	}
	defer unix.Close(fsfd)
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return fmt.Errorf("fsconfig: %w", err)
	}
	mnt, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("fsmount: %w", err)
	}
	defer unix.Close(mnt)
	return idmap(mnt, users)
}

func idmapDir(folder string, users *os.File) error {
	mnt, err := unix.OpenTree(unix.AT_FDCWD, folder, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open_tree: %w", err)
	}
	defer unix.Close(mnt)
	return idmap(mnt, users)
}

func idmap(mnt int, users *os.File) error {
	err := unix.MountSetattr(mnt, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(users.Fd())})
	if err != nil {
		return fmt.Errorf("mount_setattr: %w", err)
	}
	return nil
}
