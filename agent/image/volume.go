package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// An image that is mounted as a volume has a directory below volumes/OWNER/NAME:
//
//	mount.json  which image and layers it stands on
//	empty       below the lowest layer: overlayfs wants two folders at least
//	rootfs      where all is mounted together, read-only
//
// The owner has the volume (a pod's UID); all of its volumes go at
// once.

// volumeFlags are those of KEP-4639: nothing in such a volume can be changed or
// executed.
const volumeFlags = unix.MS_RDONLY | unix.MS_NOEXEC | unix.MS_NOSUID | unix.MS_NODEV

// MountVolume mounts an image read-only, without a layer of its own to write
// to, and returns the path. While it is mounted the image is in use. What is
// mounted already under these names stays, whatever the image: ask Volume
// first.
func (s *Store) MountVolume(ctx context.Context, img Image, owner, name string) (string, error) {
	if err := ctx.Err(); err != nil {
		return "", err
	}
	if err := errors.Join(checkID(owner), checkID(name)); err != nil {
		return "", err
	}
	if err := s.mountVolume(img.ID, owner, name, nil); err != nil {
		return "", fmt.Errorf("mount image %s as volume %s: %w", img.ID, name, err)
	}
	return s.VolumePath(owner, name), nil
}

// MountVolumeMapped is MountVolume for who is in the user namespace users, or
// in one of the same ids: files have the owners in there that the image gives
// them.
func (s *Store) MountVolumeMapped(ctx context.Context, img Image, owner, name string, users *os.File) (string, error) {
	if err := ctx.Err(); err != nil {
		return "", err
	}
	if err := errors.Join(checkID(owner), checkID(name)); err != nil {
		return "", err
	}
	if err := s.mountVolume(img.ID, owner, name, users); err != nil {
		return "", fmt.Errorf("mount image %s as volume %s: %w", img.ID, name, err)
	}
	return s.VolumePath(owner, name), nil
}

// VolumePath is where an image is mounted as a volume, or would be.
func (s *Store) VolumePath(owner, name string) string {
	return s.path("volumes", owner, name, "rootfs")
}

// Volume tells which image is mounted as a volume; ok is false when none is.
// An image that was found damaged meanwhile has an ID and no more.
func (s *Store) Volume(owner, name string) (img Image, ok bool, err error) {
	if err := errors.Join(checkID(owner), checkID(name)); err != nil {
		return Image{}, false, err
	}
	if ok, err = isMountPoint(s.VolumePath(owner, name)); err != nil || !ok {
		return Image{}, false, err
	}
	rec, err := s.readMount(s.path("volumes", owner, name))
	if err != nil {
		return Image{}, false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, here := s.index.Images[rec.Image]; !here {
		return Image{ID: rec.Image}, true, nil
	}
	return s.image(rec.Image), true, nil
}

// mountVolume: users is nil for the host's.
func (s *Store) mountVolume(imageID, owner, name string, users *os.File) error {
	dir, root := s.path("volumes", owner, name), s.VolumePath(owner, name)
	if mounted, err := isMountPoint(root); err != nil || mounted {
		return err
	}
	rec, err := s.registerVolume(imageID, dir)
	if err != nil {
		return err
	}
	empty := filepath.Join(dir, "empty")
	for _, d := range []string{empty, root} {
		if err := os.Mkdir(d, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	if users == nil {
		return mountReadOnly(rec, s.path("layers"), empty, root)
	}
	layers := filepath.Join(dir, "layers")
	return mapped(s.path("layers"), layers, users, func() error { return mountReadOnly(rec, layers, empty, root) })
}

// mountReadOnly mounts layers, as they are seen in the directory of that name, at
// root.
func mountReadOnly(rec mountRecord, layers, empty, root string) error {
	dirs := make([]string, len(rec.Dirs))
	for i, d := range rec.Dirs {
		dirs[i] = filepath.Join(layers, d)
	}
	lowers, closeDir, err := lowerOption(dirs, 2*len(empty))
	if err != nil {
		return err
	}
	defer closeDir()
	options := "lowerdir="
	for _, l := range lowers {
		options += l + ":"
	}
	options += escape(empty)
	if len(lowers) == 0 { // an image without layers
		options += ":" + escape(root)
	}
	if err := unix.Mount("overlay", root, "overlay", volumeFlags, options); err != nil {
		return fmt.Errorf("overlayfs with %d layers: %w", len(rec.Dirs), err)
	}
	return nil
}

// registerVolume writes down what a volume stands on before it does. What a
// boot has left there of an earlier mount counts no more.
func (s *Store) registerVolume(imageID, dir string) (mountRecord, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	rec, err := s.record(imageID)
	if err != nil {
		return rec, err
	}
	b, err := json.Marshal(rec)
	if err != nil {
		return rec, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return rec, err
	}
	return rec, replaceFile(filepath.Join(dir, mountFile), b)
}

// UnmountVolumes takes all volumes of an owner away; one that has none is no
// error. Processes that are still in one keep it; its layers may go.
func (s *Store) UnmountVolumes(ctx context.Context, owner string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := checkID(owner); err != nil {
		return err
	}
	dir := s.path("volumes", owner)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("unmount image volumes of %s: %w", owner, err)
	}
	for _, e := range entries {
		if err := errors.Join(unmountAll(filepath.Join(dir, e.Name(), "rootfs")), unmountAll(filepath.Join(dir, e.Name(), "layers"))); err != nil {
			return fmt.Errorf("unmount image volume %s of %s: %w", e.Name(), owner, err)
		}
	}
	if err := s.discard(dir); err != nil {
		return fmt.Errorf("remove image volumes of %s: %w", owner, err)
	}
	return nil
}

// VolumeOwners lists who has image volumes, sorted: after a restart, those of
// owners that are no more are to be unmounted.
func (s *Store) VolumeOwners() ([]string, error) {
	return names(s.path("volumes"))
}

// volumeDirs are the directories of all image volumes.
func (s *Store) volumeDirs() ([]string, error) {
	owners, err := s.VolumeOwners()
	if err != nil {
		return nil, err
	}
	var out []string
	for _, o := range owners {
		volumes, err := names(s.path("volumes", o))
		if errors.Is(err, fs.ErrNotExist) {
			continue // they are being taken away
		}
		if err != nil {
			return nil, err
		}
		for _, v := range volumes {
			out = append(out, s.path("volumes", o, v))
		}
	}
	return out, nil
}

// names are those in a directory, sorted.
func names(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out, nil
}
