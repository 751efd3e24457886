package image

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// opaqueXattr marks a directory that hides what lower layers have in it.
const opaqueXattr = "trusted.overlay.opaque"

// lowerDir is one directory as the layers below show it: the real directories that
// contribute to it, topmost first. Empty: the layers below have no such directory.
type lowerDir []string

// lowerEntry is what the layers below have under one name.
type lowerEntry struct {
	kind fs.FileMode // type bits of the topmost; meaningless when absent
	path string      // of the topmost on disk; empty: there is none
	dirs lowerDir    // when it is a directory
}

// lookup finds name as overlayfs would: the topmost layer decides, directories are
// merged until one is opaque or something else is in the way.
func (d lowerDir) lookup(name string) (lowerEntry, error) {
	var out lowerEntry
	for _, dir := range d {
		path := filepath.Join(dir, name)
		var st unix.Stat_t
		err := unix.Lstat(path, &st)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return lowerEntry{}, &os.PathError{Op: "lstat", Path: path, Err: err}
		}
		isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR
		if out.path == "" {
			if isWhiteout(&st) {
				return out, nil
			}
			out.path = path
			switch st.Mode & unix.S_IFMT {
			case unix.S_IFDIR:
				out.kind = fs.ModeDir
			case unix.S_IFLNK:
				out.kind = fs.ModeSymlink
			case unix.S_IFREG:
				out.kind = 0
			default:
				out.kind = fs.ModeIrregular
			}
		}
		if !isDir {
			break
		}
		out.dirs = append(out.dirs, path)
		if isOpaque(path) {
			break
		}
	}
	return out, nil
}

// isWhiteout says whether a file is overlayfs's mark of a deletion.
func isWhiteout(st *unix.Stat_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0
}

func isOpaque(path string) bool {
	var b [1]byte
	n, err := unix.Lgetxattr(path, opaqueXattr, b[:])
	return err == nil && n == 1 && b[0] == 'y'
}
