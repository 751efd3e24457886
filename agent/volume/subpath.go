package volume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
)

// SubPath makes the given sub path of a volume available as a path of its
// own: a bind mount of the very file that was found inside the volume, so
// that a container swapping a directory for a link gains nothing. A path that
// leaves the volume is refused. Missing directories are made, but not in an image:
// there the path has to be.
func (m *Manager) SubPath(ctx context.Context, pod *v1.Pod, volumeName, container string, index int, sub string) (string, error) {
	root, _, err := m.Source(pod, volumeName)
	if err != nil {
		return "", err
	}
	open := openBeneath
	inImage := slices.ContainsFunc(pod.Spec.Volumes, func(v v1.Volume) bool { return v.Name == volumeName && v.Image != nil })
	if inImage {
		open = openExisting
	}
	type opened struct {
		f     *os.File
		isDir bool
	}
	found := make(chan opened, 1) // the garbage collector closes what comes too late
	key := fmt.Sprintf("%s/%s/%s/%d", pod.UID, volumeName, container, index)
	err = m.hung.do(ctx, key, filepath.Join(root, sub), func() error {
		f, err := open(root, sub)
		if err != nil {
			return err
		}
		st, err := f.Stat()
		if err != nil {
			f.Close()
			return err
		}
		found <- opened{f, st.IsDir()}
		return nil
	})
	if inImage && errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("%w: volume %q has no subPath %q", ErrImageVolume, volumeName, sub)
	}
	if err != nil {
		return "", fmt.Errorf("failed to prepare subPath for volumeMount %q of container %q: %w", volumeName, container, err)
	}
	source := <-found
	defer source.f.Close()
	target := filepath.Join(m.podDir(pod.UID), subPathsDir, volumeName, container, strconv.Itoa(index))
	at, err := m.cfg.Mounter.Below(target)
	if err != nil {
		return "", err
	}
	for _, p := range at { // of an earlier instance: its source may have been replaced
		if err := m.cfg.Mounter.Unmount(p); err != nil {
			return "", err
		}
	}
	if err := os.RemoveAll(target); err != nil {
		return "", err
	}
	if source.isDir {
		err = os.MkdirAll(target, 0o755)
	} else {
		if err = os.MkdirAll(filepath.Dir(target), 0o755); err == nil {
			err = os.WriteFile(target, nil, 0o644) //nolint:forbidigo // what a mount covers
		}
	}
	if err != nil {
		return "", err
	}
	if err := m.cfg.Mounter.Bind(source.f, target); err != nil {
		return "", fmt.Errorf("bind subPath %q: %w", sub, err)
	}
	return target, nil
}

// openExisting opens sub inside root without ever leaving root, following links
// that stay inside.
func openExisting(root, sub string) (*os.File, error) {
	if filepath.IsAbs(sub) || strings.Contains("/"+sub+"/", "/../") {
		return nil, fmt.Errorf("subPath %q must be a relative path inside the volume", sub)
	}
	dir, err := os.OpenFile(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return openat(dir, sub, unix.O_PATH)
}

// openBeneath is openExisting, and makes directories that are missing.
func openBeneath(root, sub string) (*os.File, error) {
	f, err := openExisting(root, sub)
	if !errors.Is(err, fs.ErrNotExist) {
		return f, err
	}
	dir, err := os.OpenFile(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	// Make what is missing, one directory at a time, each opened inside root.
	at := ""
	for _, part := range strings.Split(filepath.Clean(sub), "/") {
		parent, err := openat(dir, orDot(at), unix.O_PATH|unix.O_DIRECTORY)
		if err != nil {
			return nil, err
		}
		err = mkdirLike(parent, part)
		parent.Close()
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
		at = filepath.Join(at, part)
	}
	return openat(dir, sub, unix.O_PATH)
}

// mkdirLike makes a directory with its parent's mode, so that a user who may write
// to the volume may write below; the umask would take bits away. The directory is
// opened before its mode is set: a container may put a link in its place.
func mkdirLike(parent *os.File, name string) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(parent.Fd()), &st); err != nil {
		return err
	}
	mode := st.Mode & 0o7777
	if err := unix.Mkdirat(int(parent.Fd()), name, mode); err != nil {
		return err
	}
	made, err := openat(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW)
	if err != nil {
		return err
	}
	defer made.Close()
	return unix.Fchmod(int(made.Fd()), mode)
}

func orDot(p string) string {
	if p == "" {
		return "."
	}
	return p
}

func openat(dir *os.File, p string, flags uint64) (*os.File, error) {
	fd, err := unix.Openat2(int(dir.Fd()), orDot(p), &unix.OpenHow{
		Flags:   flags | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: filepath.Join(dir.Name(), p), Err: err}
	}
	return os.NewFile(uintptr(fd), filepath.Join(dir.Name(), p)), nil
}
