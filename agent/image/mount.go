package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// A container's directory below mounts/ID:
//
//	mount.json  which image and layers it stands on
//	rw          what the container has changed (overlayfs's upper folder)
//	work        overlayfs's own
//	rootfs      where all is mounted together; see mappedRoots for others
const (
	mountFile    = "mount.json"
	mountVersion = 1
)

// maxMountOptions is what the kernel takes: one page.
const maxMountOptions = 4096

// mountRecord keeps layers alive below a container, whatever becomes of the
// image.
type mountRecord struct {
	Version int      `json:"version"`
	Image   string   `json:"image"`
	Dirs    []string `json:"dirs"` // layer directories, topmost first
}

// Mount makes a container's root file system from an image and returns its
// path. The id is the caller's, unique on the node. Called again for the same
// id, also after a restart of the process, it returns the same file system with
// all changes that were made in it; with another image it is an error.
func (s *Store) Mount(ctx context.Context, img Image, id string) (string, error) {
	rootfs, err := s.mount(ctx, img, id)
	if err != nil {
		return "", fmt.Errorf("mount image %s for %s: %w", img.ID, id, err)
	}
	return rootfs, nil
}

func (s *Store) mount(ctx context.Context, img Image, id string) (string, error) {
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
	rootfs := s.path("mounts", id, "rootfs")
	mounted, err := isMountPoint(rootfs)
	if err != nil {
		return "", err
	}
	if mounted {
		return rootfs, nil
	}
	if err := s.mountOverlay(rec, s.path("mounts", id)); err != nil {
		return "", err
	}
	return rootfs, nil
}

// registerMount writes down what a container stands on before it does.
func (s *Store) registerMount(imageID, id string) (mountRecord, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	dir := s.path("mounts", id)
	rec, err := s.readMount(dir)
	if err == nil {
		if rec.Image != imageID {
			return rec, fmt.Errorf("it is mounted from image %s already", rec.Image)
		}
		return rec, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return rec, err
	}
	if rec, err = s.record(imageID); err != nil {
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

// record makes the record of a new mount of the image, which counts as used;
// mu is held.
func (s *Store) record(imageID string) (mountRecord, error) {
	ir, ok := s.index.Images[imageID]
	if !ok {
		return mountRecord{}, ErrNotFound
	}
	rec := mountRecord{Version: mountVersion, Image: imageID, Dirs: []string{}}
	for _, chain := range slices.Backward(ir.Chains) {
		rec.Dirs = append(rec.Dirs, s.layers[chain].Dir)
	}
	s.lastUsed[imageID] = time.Now()
	return rec, nil
}

// replaceFile writes a mount's record in one step. No sync: after a power cut
// nothing is mounted any more, and what it left of the record counts as none.
func replaceFile(path string, content []byte) error {
	if err := os.WriteFile(path+".new", content, 0o600); err != nil { //nolint:forbidigo // no power cut leaves a mount
		return err
	}
	return os.Rename(path+".new", path) //nolint:forbidigo // no power cut leaves a mount
}

// readMount reads the record of a mount; fs.ErrNotExist: there is none. One that a
// power cut left half-written is none: nothing is mounted there.
func (s *Store) readMount(dir string) (mountRecord, error) {
	var rec mountRecord
	b, err := os.ReadFile(filepath.Join(dir, mountFile))
	if err != nil {
		return rec, err
	}
	if err := json.Unmarshal(b, &rec); err != nil {
		err = fmt.Errorf("read %s: %w", filepath.Join(dir, mountFile), err)
		for _, root := range []string{filepath.Join(dir, "rootfs"), s.mappedRoot(filepath.Base(dir))} {
			if mounted, merr := isMountPoint(root); mounted || merr != nil {
				return rec, errors.Join(err, merr)
			}
		}
		return mountRecord{}, fmt.Errorf("%w, and nothing is mounted: %w", err, fs.ErrNotExist)
	}
	if rec.Version != mountVersion {
		return rec, fmt.Errorf("read %s: format version %d, this program knows %d", filepath.Join(dir, mountFile), rec.Version, mountVersion)
	}
	return rec, nil
}

func (s *Store) mountOverlay(rec mountRecord, dir string) error {
	rootfs := filepath.Join(dir, "rootfs")
	if err := os.Mkdir(rootfs, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return mountLayers(rec, layerView{dir: dir, layers: s.path("layers"), rootfs: rootfs})
}

// layerView is what overlayfs is to make a container's root file system of.
type layerView struct {
	dir    string // the container's directory
	layers string // the store's layers, as overlayfs is to see them
	rootfs string // where to mount
}

func mountLayers(rec mountRecord, v layerView) error {
	upper, work := filepath.Join(v.dir, "rw"), filepath.Join(v.dir, "work")
	for _, d := range []string{upper, work} {
		if err := os.Mkdir(d, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	dirs := make([]string, len(rec.Dirs))
	for i, d := range rec.Dirs {
		dirs[i] = filepath.Join(v.layers, d)
	}
	if len(dirs) == 0 { // an image without layers: overlayfs wants one below
		empty := filepath.Join(v.dir, "empty")
		if err := makeEmptyLayer(empty, v.layers); err != nil {
			return err
		}
		dirs = []string{empty}
	}
	// The root of what is on top decides how the root looks.
	x := extractor{asRoot: os.Geteuid() == 0}
	if err := x.copyAttributes(dirs[0], unix.AT_FDCWD, upper); err != nil {
		return err
	}
	lowers, closeDir, err := lowerOption(dirs, len(upper)+len(work))
	if err != nil {
		return err
	}
	defer closeDir()
	options := "lowerdir=" + strings.Join(lowers, ":") + ",upperdir=" + escape(upper) + ",workdir=" + escape(work)
	if err := unix.Mount("overlay", v.rootfs, "overlay", 0, options); err != nil {
		return fmt.Errorf("overlayfs with %d layers: %w", len(rec.Dirs), err)
	}
	return nil
}

// makeEmptyLayer makes a layer that belongs to the root of those in layers.
func makeEmptyLayer(dir, layers string) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	var st unix.Stat_t
	if err := unix.Stat(layers, &st); err != nil {
		return &os.PathError{Op: "stat", Path: layers, Err: err}
	}
	return os.Lchown(dir, int(st.Uid), int(st.Gid))
}

// lowerOption names the layers for the mount options. So many layers that
// their paths do not fit are named through their open directory, which is short
// but tells people nothing when they look at /proc/mounts.
func lowerOption(dirs []string, others int) (lowers []string, closeDir func(), err error) {
	total := others + len("lowerdir=,upperdir=,workdir=") + 64 // some for escapes
	for _, d := range dirs {
		lowers = append(lowers, escape(d))
		total += len(escape(d)) + 1
	}
	if total < maxMountOptions {
		return lowers, func() {}, nil
	}
	layers := filepath.Dir(dirs[0])
	fd, err := unix.Open(layers, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, &os.PathError{Op: "open", Path: layers, Err: err}
	}
	for i, d := range dirs {
		lowers[i] = procPath(fd, filepath.Base(d))
	}
	return lowers, func() { _ = unix.Close(fd) }, nil
}

// escape protects the characters that mean something in overlayfs's options.
var escape = strings.NewReplacer(`\`, `\\`, `:`, `\:`, `,`, `\,`).Replace

// Unmount takes a container's root file system away, with all that was
// changed in it; an unknown id is no error.
func (s *Store) Unmount(ctx context.Context, id string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := checkID(id); err != nil {
		return err
	}
	if err := s.unmount(id); err != nil {
		return fmt.Errorf("unmount %s: %w", id, err)
	}
	return nil
}

func (s *Store) unmount(id string) error {
	dir := s.path("mounts", id)
	if err := unmountAll(filepath.Join(dir, "rootfs")); err != nil {
		return err
	}
	if err := s.unmountMapped(id); err != nil {
		return err
	}
	return s.discard(dir)
}

// unmountAll takes away whatever is mounted at path.
func unmountAll(path string) error {
	for {
		err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EBUSY) {
			// A process still uses it; it goes when that ends.
			err = unix.Unmount(path, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
		}
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			return nil // not mounted (any more)
		}
		if err != nil {
			if mounted, merr := isMountPoint(path); merr == nil && !mounted {
				return nil // without root nothing was ever mounted
			}
			return err
		}
	}
}

// discard removes a directory. It is moved out of the way first: a crash while
// deleting leaves rubbish in tmp only.
func (s *Store) discard(dir string) error {
	trash, err := os.MkdirTemp(s.path("tmp"), "mount-")
	if err != nil {
		return err
	}
	err = os.Rename(dir, filepath.Join(trash, "m")) //nolint:forbidigo // it is thrown away
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, removeTree(context.Background(), trash))
}

// Mounts returns the ids of all containers' file systems, sorted: after a
// restart, those that are not used are to be unmounted.
func (s *Store) Mounts() ([]string, error) {
	out, err := names(s.path("mounts"))
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	return out, nil
}

// mounts reads all records, of containers and of volumes; one that a crash left
// without is skipped, as nothing is mounted there.
func (s *Store) mounts() ([]mountRecord, error) {
	ids, err := s.Mounts()
	if err != nil {
		return nil, err
	}
	dirs, err := s.volumeDirs()
	if err != nil {
		return nil, err
	}
	for _, id := range ids {
		dirs = append(dirs, s.path("mounts", id))
	}
	var out []mountRecord
	for _, dir := range dirs {
		rec, err := s.readMount(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		out = append(out, rec)
	}
	return out, nil
}

func checkID(id string) error {
	if id == "" || id == "." || id == ".." || strings.ContainsAny(id, "/\x00") || len(id) > 200 {
		return fmt.Errorf("container id %q: must be a plain file name", id)
	}
	return nil
}

// unmountBelow takes away what a process that was killed left mounted below a directory.
func unmountBelow(dir string) error {
	real, err := filepath.EvalSymlinks(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(real))
	if err != nil {
		return err
	}
	for _, m := range slices.Backward(mounts) { // the latest first
		if err := unix.Unmount(m.Mountpoint, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			return &os.PathError{Op: "unmount", Path: m.Mountpoint, Err: err}
		}
	}
	return nil
}

// isMountPoint compares a directory's device with its parent's.
func isMountPoint(path string) (bool, error) {
	var st, parent unix.Stat_t
	err := unix.Lstat(path, &st)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	if err := unix.Lstat(filepath.Dir(path), &parent); err != nil {
		return false, &os.PathError{Op: "lstat", Path: filepath.Dir(path), Err: err}
	}
	return st.Dev != parent.Dev, nil
}

// Written is the directory that holds what a container has changed of its image.
// It need not exist.
func (s *Store) Written(id string) string { return s.path("mounts", id, "rw") }
