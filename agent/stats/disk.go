package stats

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Disk is what folders take of their file system.
type Disk struct{ Bytes, Inodes int64 }

// DiskUse adds up folders, or files, and all below them. What is mounted below
// does not count; nor what disappears meanwhile. A file of several names counts
// once. Servers of file systems that are mounted below are not asked: they may
// be gone.
func DiskUse(ctx context.Context, dirs ...string) (Disk, error) {
	var out Disk
	seen := map[inode]bool{} // of files that have several names
	for _, dir := range dirs {
		var top unix.Statx_t
		if err := stat(dir, &top); err != nil {
			continue
		}
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			if err != nil {
				return nil // it is gone
			}
			var st unix.Statx_t
			if err := stat(path, &st); err != nil {
				return nil
			}
			elsewhere := st.Dev_major != top.Dev_major || st.Dev_minor != top.Dev_minor
			if elsewhere || path != dir && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 {
				if d.IsDir() {
					return filepath.SkipDir
				}
				return nil
			}
			if !d.IsDir() && st.Nlink > 1 {
				file := inode{st.Dev_major, st.Dev_minor, st.Ino}
				if seen[file] {
					return nil
				}
				seen[file] = true
			}
			out.Bytes += int64(st.Blocks) * 512
			out.Inodes++
			return nil
		})
		if err != nil {
			return out, err
		}
	}
	return out, nil
}

// inode names a file on this machine.
type inode struct {
	major, minor uint32
	number       uint64
}

// stat looks at a name without following it, and without asking a server.
func stat(path string, st *unix.Statx_t) error {
	return unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC, unix.STATX_BASIC_STATS, st)
}

// FileSystem is what a file system has.
func FileSystem(dir string) (unix.Statfs_t, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return st, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return st, nil
}

// deviceOf is the device of the file system that a folder is on.
func deviceOf(dir string) string {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return "none"
	}
	return deviceName(fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)))
}

// deviceName is "/dev/sda1" for a block device's numbers, "8:1" (sysfs(5),
// dev/block), and the numbers themselves where there is no such device, as for
// a tmpfs.
func deviceName(numbers string) string {
	link, err := os.Readlink("/sys/dev/block/" + numbers)
	if err != nil {
		return numbers
	}
	return "/dev/" + filepath.Base(link)
}
