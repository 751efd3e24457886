package image

import (
	"archive/tar"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const xattrRecord = "SCHILY.xattr."

// setAttributes gives a new entry its owner, mode, extended attributes and
// time, in the order in which none undoes another.
func (x *extractor) setAttributes(p place, base string, h *tar.Header) error {
	if x.asRoot {
		if err := unix.Fchownat(p.fd, base, h.Uid, h.Gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return fmt.Errorf("chown: %w", err)
		}
	}
	for record, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(record, xattrRecord)
		if !ok || !xattrAllowed(name) {
			continue
		}
		if err := x.setXattr(procPath(p.fd, base), name, []byte(value)); err != nil {
			return err
		}
	}
	if h.Typeflag != tar.TypeSymlink {
		if err := unix.Fchmodat(p.fd, base, uint32(h.Mode&0o7777), 0); err != nil {
			return fmt.Errorf("chmod: %w", err)
		}
	}
	if h.Typeflag == tar.TypeDir {
		return nil // at the end
	}
	return setTime(p.fd, base, h.ModTime)
}

// xattrAllowed keeps out what would steer overlayfs or reach outside the image.
func xattrAllowed(name string) bool {
	return !strings.HasPrefix(name, "trusted.") && !strings.HasPrefix(name, "user.overlay.")
}

// setXattr sets one attribute. A file system or security module that knows no
// such attribute is no error: the image works without.
func (x *extractor) setXattr(file, name string, value []byte) error {
	err := unix.Lsetxattr(file, name, value, 0)
	switch {
	case err == nil, errors.Is(err, unix.ENOTSUP):
		return nil
	case errors.Is(err, unix.EPERM) && (!x.asRoot || !strings.HasPrefix(name, "security.capability")):
		return nil
	}
	return fmt.Errorf("set attribute %s: %w", name, err)
}

func setTime(dirfd int, base string, t time.Time) error {
	if t.IsZero() || t.Unix() < 0 {
		t = time.Unix(0, 0)
	}
	ts, err := unix.TimeToTimespec(t)
	if err != nil {
		return fmt.Errorf("set time: %w", err)
	}
	if err := unix.UtimesNanoAt(dirfd, base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("set time: %w", err)
	}
	return nil
}

// copyAttributes makes a file of this layer look like one of a layer below.
func (x *extractor) copyAttributes(from string, dirfd int, base string) error {
	var st unix.Stat_t
	if err := unix.Lstat(from, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: from, Err: err}
	}
	if x.asRoot {
		if err := unix.Fchownat(dirfd, base, int(st.Uid), int(st.Gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return fmt.Errorf("chown: %w", err)
		}
	}
	if err := unix.Fchmodat(dirfd, base, st.Mode&0o7777, 0); err != nil {
		return fmt.Errorf("chmod: %w", err)
	}
	to := base
	if dirfd != unix.AT_FDCWD {
		to = procPath(dirfd, base)
	}
	if err := x.copyXattrs(from, to); err != nil {
		return err
	}
	return setTime(dirfd, base, time.Unix(st.Mtim.Unix()))
}

func (x *extractor) copyXattrs(from, to string) error {
	names := make([]byte, 64<<10) // the kernel's own bound
	n, err := unix.Llistxattr(from, names)
	if errors.Is(err, unix.ENOTSUP) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list attributes of %s: %w", from, err)
	}
	value := make([]byte, 64<<10)
	for name := range strings.SplitSeq(string(names[:n]), "\x00") {
		if name == "" || !xattrAllowed(name) {
			continue
		}
		n, err := unix.Lgetxattr(from, name, value)
		if errors.Is(err, unix.ENODATA) {
			continue
		}
		if err != nil {
			return fmt.Errorf("read attribute %s of %s: %w", name, from, err)
		}
		if err := x.setXattr(to, name, value[:n]); err != nil {
			return err
		}
	}
	return nil
}
