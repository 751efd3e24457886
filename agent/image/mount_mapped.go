package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// mappedRoots is where the root file systems of user namespaces are mounted, in
// a directory for each store. Root in there has to come by: every directory on the
// way must be open to everybody's search, and the store's own are not. For
// others on the machine there is nothing to gain: set-uid programs in there
// give the ids of the pod.
const mappedRoots = "/run/clusterd-roots"

func (s *Store) mappedRoot(id string) string { return filepath.Join(mappedRootsOf(s.cfg.Dir), id) }

func mappedRootsOf(dir string) string {
	sum := sha256.Sum256([]byte(dir))
	return filepath.Join(mappedRoots, hex.EncodeToString(sum[:6]))
}

// CleanUp takes away what a Store of that directory has mounted outside of it.
func CleanUp(dir string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	roots := mappedRootsOf(dir)
	entries, err := os.ReadDir(roots)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		errs = append(errs, detach(filepath.Join(roots, e.Name())))
	}
	return errors.Join(append(errs, os.Remove(roots))...)
}

// MountMapped is Mount for a container in the user namespace users: in there
// files have the owners that the image gives them. What the container makes or
// changes is kept with the host's ids of these: overlayfs cannot work on an
// upper directory whose mount has no name for the host's root. The path differs
// from Mount's; the same id is for one of the two.
func (s *Store) MountMapped(ctx context.Context, img Image, id string, users *os.File) (string, error) {
	rootfs, err := s.mountMapped(ctx, img, id, users)
	if err != nil {
		return "", fmt.Errorf("mount image %s for %s: %w", img.ID, id, err)
	}
	return rootfs, nil
}

func (s *Store) mountMapped(ctx context.Context, img Image, id string, users *os.File) (string, error) {
	if err := ctx.Err(); err != nil {
		return "", err
	}
	if err := checkID(id); err != nil {
		return "", err
	}
	rec, err := s.registerMount(img.ID, id)
	if err != nil {
		return "", err
	}
	rootfs := s.mappedRoot(id)
	if err := s.makeMappedRoot(rootfs); err != nil {
		return "", err
	}
	mounted, err := isMountPoint(rootfs)
	if err != nil {
		return "", err
	}
	if mounted {
		return rootfs, nil
	}
	dir := s.path("mounts", id)
	layers := filepath.Join(dir, "layers")
	return rootfs, mapped(s.path("layers"), layers, users, func() error {
		return mountLayers(rec, layerView{dir: dir, layers: layers, rootfs: rootfs})
	})
}

// makeMappedRoot makes the directory and those it lies in.
func (s *Store) makeMappedRoot(rootfs string) error {
	s.roots.Lock()
	defer s.roots.Unlock()
	for _, d := range []string{mappedRoots, filepath.Dir(rootfs), rootfs} {
		err := os.Mkdir(d, 0o711)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err == nil {
			err = os.Chmod(d, 0o711) // Mkdir is subject to the umask
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// mapped calls fn while from is mounted at the directory to with the ids of users.
// (overlayfs takes mounts of its own of its layers, so that this one may go.)
func mapped(from, to string, users *os.File, fn func() error) error {
	if err := os.Mkdir(to, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	mnt, err := unix.OpenTree(unix.AT_FDCWD, from, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open_tree %s: %w", from, err)
	}
	defer unix.Close(mnt)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(users.Fd()), Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(mnt, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("map the ids of %s: %w", from, err)
	}
	if err := unix.MoveMount(mnt, "", unix.AT_FDCWD, to, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("move_mount to %s: %w", to, err)
	}
	return errors.Join(fn(), detach(to))
}

// detach takes all that is mounted on a directory away, and the directory.
func detach(dir string) error {
	for {
		err := unix.Unmount(dir, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break // not mounted (any more)
		}
		if err != nil {
			return &os.PathError{Op: "unmount", Path: dir, Err: err}
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// unmountMapped takes away what mountMapped has made or left half made.
func (s *Store) unmountMapped(id string) error {
	rootfs := s.mappedRoot(id)
	s.roots.Lock()
	defer s.roots.Unlock()
	var errs []error
	for _, d := range []string{rootfs, s.path("mounts", id, "layers")} {
		if _, err := os.Lstat(d); err == nil {
			errs = append(errs, detach(d))
		}
	}
	_ = os.Remove(filepath.Dir(rootfs)) // it stays while there are others
	return errors.Join(errs...)
}

// TryMapped tries whether the kernel can mount root file systems in a user
// namespace; the error says what is missing.
func (s *Store) TryMapped(users *os.File) error {
	dir, err := os.MkdirTemp(s.path("tmp"), "mapped-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	rootfs, layers := filepath.Join(dir, "rootfs"), filepath.Join(dir, "layers")
	for _, d := range []string{rootfs, filepath.Join(dir, "layer")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	err = mapped(dir, layers, users, func() error {
		if err := mountLayers(mountRecord{Dirs: []string{"layer"}}, layerView{dir: dir, layers: layers, rootfs: rootfs}); err != nil {
			return err
		}
		// Where it cannot work, overlayfs may be read-only without a word.
		return errors.Join(os.Mkdir(filepath.Join(rootfs, "new"), 0o755), detach(rootfs))
	})
	if err != nil {
		return fmt.Errorf("root file systems cannot be mounted with mapped ids (overlayfs: Linux 5.19; the file system of %s: 5.12 for ext4, 5.15 for btrfs, 5.19 for xfs): %w", s.cfg.Dir, err)
	}
	return nil
}
