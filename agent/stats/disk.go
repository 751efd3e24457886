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

// DiskUse adds up folders and all below them. What is mounted below, on
// another file system, does not count; nor what disappears meanwhile. Hard
// links count as often as they are found.
func DiskUse(ctx context.Context, dirs ...string) (Disk, error) {
	var out Disk
	for _, dir := range dirs {
		var top unix.Stat_t
		if err := unix.Lstat(dir, &top); err != nil {
			continue
		}
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			if err != nil {
				return nil // it is gone
			}
			var st unix.Stat_t
			if err := unix.Lstat(path, &st); err != nil {
				return nil
			}
			if st.Dev != top.Dev {
				if d.IsDir() {
					return filepath.SkipDir
				}
				return nil
			}
			out.Bytes += st.Blocks * 512
			out.Inodes++
			return nil
		})
		if err != nil {
			return out, err
		}
	}
	return out, nil
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
