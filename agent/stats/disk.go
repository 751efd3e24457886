package stats

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Disk is what directories take of their file system.
type Disk struct{ Bytes, Inodes int64 }

// DiskUse adds up directories, or files, and all below them. What is mounted below
// does not count; nor what disappears meanwhile. A file of several names counts
// once. Servers of file systems that are mounted below are not asked: they may
// be gone.
//
// What is below is a container's work, so the walk goes from directory to directory by
// their descriptors: no depth is too long for a path, and no link is followed.
func DiskUse(ctx context.Context, dirs ...string) (Disk, error) {
	u := usage{seen: map[inode]bool{}, buf: make([]byte, 16<<10)}
	for _, dir := range dirs {
		if err := stat(unix.AT_FDCWD, dir, &u.top); err != nil {
			continue
		}
		u.count(&u.top)
		if u.top.Mode&unix.S_IFMT != unix.S_IFDIR {
			continue
		}
		root, err := openDir(unix.AT_FDCWD, dir)
		if isGone(err) {
			continue
		}
		if err != nil {
			return u.Disk, &os.PathError{Op: "open", Path: dir, Err: err}
		}
		err = u.walk(ctx, root)
		_ = unix.Close(root)
		if err != nil {
			return u.Disk, fmt.Errorf("add up %s: %w", dir, err)
		}
	}
	return u.Disk, nil
}

// usage is what was found so far.
type usage struct {
	Disk
	top  unix.Statx_t   // of the directory that is walked
	seen map[inode]bool // files that have several names
	buf  []byte         // of names
}

// maxSeen bounds the files with several names that are remembered: how many there are
// is a pod's to choose, and the memory is the node's. Those beyond count with each name.
const maxSeen = 1 << 18

// level is a directory on the way from the top to where the walk is.
type level struct {
	name string // in the directory above
	file inode
	left []string // folders in it that were not walked yet
}

// walk adds up what is below the open directory root. It holds three descriptors
// at most, however deep it goes: the way up is "..".
func (u *usage) walk(ctx context.Context, root int) error {
	at, err := openDir(root, ".")
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(at) }()
	left, err := u.list(ctx, at)
	if err != nil {
		return err
	}
	way := []level{{file: inodeOf(&u.top), left: left}}
	for {
		here := &way[len(way)-1]
		if len(here.left) == 0 {
			if way = way[:len(way)-1]; len(way) == 0 {
				return nil
			}
			if at, way, err = u.up(root, at, way); err != nil {
				return err
			}
			continue
		}
		name := here.left[len(here.left)-1]
		here.left = here.left[:len(here.left)-1]
		down, file, err := u.down(at, name)
		if isGone(err) {
			continue
		}
		if err != nil {
			return err
		}
		_ = unix.Close(at)
		at = down
		if left, err = u.list(ctx, at); err != nil {
			return err
		}
		way = append(way, level{name, file, left})
	}
}

// down opens a directory in the open directory dir.
func (u *usage) down(dir int, name string) (int, inode, error) {
	fd, err := openDir(dir, name)
	if err != nil {
		return -1, inode{}, err
	}
	var st unix.Statx_t
	if err = stat(fd, "", &st); err == nil && u.elsewhere(&st) {
		err = unix.ENOENT // it was mounted just now
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, inode{}, err
	}
	return fd, inodeOf(&st), nil
}

// up goes from the open directory at, which it closes, to the last one of way. If
// a directory was moved meanwhile ".." leads elsewhere: then it goes there again
// from root, or as far as the way still exists, and returns that way.
func (u *usage) up(root, at int, way []level) (int, []level, error) {
	fd, file, err := u.down(at, "..")
	_ = unix.Close(at)
	if err == nil && file == way[len(way)-1].file {
		return fd, way, nil
	}
	if err == nil {
		_ = unix.Close(fd)
	}
	if at, err = openDir(root, "."); err != nil {
		return -1, nil, err
	}
	for i := 1; i < len(way); i++ {
		next, file, err := u.down(at, way[i].name)
		if err == nil && file != way[i].file {
			_ = unix.Close(next)
			err = unix.ENOENT
		}
		if isGone(err) {
			return at, way[:i], nil
		}
		_ = unix.Close(at)
		if err != nil {
			return -1, nil, err
		}
		at = next
	}
	return at, way, nil
}

// isGone says whether a name means no directory any more that we may read.
func isGone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.EACCES)
}

// list counts what is in an open directory and returns the directories in it.
func (u *usage) list(ctx context.Context, dir int) (folders []string, err error) {
	var names []string
	for {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		n, err := unix.ReadDirent(dir, u.buf)
		if errors.Is(err, unix.ENOENT) || err == nil && n == 0 {
			return folders, nil // ENOENT: the directory was deleted
		}
		if err != nil {
			return nil, err
		}
		_, _, names = unix.ParseDirent(u.buf[:n], -1, names[:0])
		for _, name := range names {
			var st unix.Statx_t
			if err := stat(dir, name, &st); err != nil || u.elsewhere(&st) {
				continue
			}
			u.count(&st)
			if st.Mode&unix.S_IFMT == unix.S_IFDIR {
				folders = append(folders, name)
			}
		}
	}
}

// elsewhere tells what is mounted below the top.
func (u *usage) elsewhere(st *unix.Statx_t) bool {
	return st.Dev_major != u.top.Dev_major || st.Dev_minor != u.top.Dev_minor || st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 && inodeOf(st) != inodeOf(&u.top)
}

func (u *usage) count(st *unix.Statx_t) {
	if st.Mode&unix.S_IFMT != unix.S_IFDIR && st.Nlink > 1 {
		file := inodeOf(st)
		if u.seen[file] {
			return
		}
		if len(u.seen) < maxSeen {
			u.seen[file] = true
		}
	}
	u.Bytes += int64(st.Blocks) * 512
	u.Inodes++
}

// inode names a file on this machine.
type inode struct {
	major, minor uint32
	number       uint64
}

func inodeOf(st *unix.Statx_t) inode { return inode{st.Dev_major, st.Dev_minor, st.Ino} }

// stat looks at a name in an open directory, or at the directory itself if the name
// is empty, without following it and without asking a server.
func stat(dir int, name string, st *unix.Statx_t) error {
	return unix.Statx(dir, name, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC, unix.STATX_BASIC_STATS, st)
}

// openDir opens a directory to read it; a link to one is ELOOP or ENOTDIR.
func openDir(dir int, name string) (int, error) {
	return unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
}

// FileSystem is what a file system has.
func FileSystem(dir string) (unix.Statfs_t, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return st, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return st, nil
}

// deviceOf is the device of the file system that a directory is on.
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
