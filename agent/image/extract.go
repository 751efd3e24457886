package image

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	whiteoutPrefix = ".wh."
	whiteoutOpaque = ".wh..wh..opq"
	whiteoutMeta   = ".wh..wh." // further marks of AUFS, which mean nothing here

	// maxFollows is how many symbolic links one path may lead through, as in
	// the kernel.
	maxFollows = 40
)

// badLayerError is a layer that no tool could unpack; trying again is useless.
type badLayerError struct{ err error }

func (e *badLayerError) Error() string { return e.err.Error() }
func (e *badLayerError) Unwrap() error { return e.err }

func isBadLayer(err error) bool {
	var b *badLayerError
	return errors.As(err, &b)
}

// extractor writes the entries of a layer's archive into one directory, with
// deletions in overlayfs's form.
//
// The archive is hostile: every path is walked component by component from
// the directory's descriptor without the kernel ever following a symbolic link;
// links are followed here, inside the root. The layers below are consulted as
// well, so that a path through a link or directory of theirs means the same as if
// the layer were unpacked on top of them.
type extractor struct {
	root   int      // O_PATH descriptor of the directory
	lowers lowerDir // the roots of the layers below, topmost first
	asRoot bool     // owners, devices and marks can be set
	room   *budget  // what it may take

	lastDir string // cache: where the previous entry was
	last    place
	dirs    []dirTime // set at the end: writing into a directory changes its time
	buf     []byte
}

// place is one directory: in this layer (fd ≥ 0) and in those below.
type place struct {
	fd     int
	lowers lowerDir
}

type dirTime struct {
	name string
	time time.Time
}

// extract unpacks an archive into the directory at root and returns the bytes of
// its files. It stops where room has no more.
func extract(ctx context.Context, r io.Reader, root string, lowers lowerDir, room *budget) (int64, error) {
	fd, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, &os.PathError{Op: "open", Path: root, Err: err}
	}
	x := &extractor{root: fd, lowers: lowers, room: room, asRoot: os.Geteuid() == 0, last: place{fd: -1}, buf: make([]byte, 64<<10)}
	defer x.close()
	if err := x.initRoot(root); err != nil {
		return 0, err
	}
	tr := tar.NewReader(r)
	for {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return 0, &badLayerError{fmt.Errorf("read the archive: %w", err)}
		}
		remembered := ""
		if h.Typeflag == tar.TypeDir {
			remembered = h.Name
		}
		if err = room.entry(remembered); err == nil {
			err = x.entry(h, tr)
		}
		if errors.Is(err, unix.ENAMETOOLONG) {
			err = &badLayerError{err}
		}
		if err != nil {
			return 0, fmt.Errorf("%q: %w", h.Name, err)
		}
	}
	if err := x.setDirTimes(); err != nil {
		return 0, err
	}
	return room.bytes, nil
}

func (x *extractor) close() {
	x.forget()
	_ = unix.Close(x.root)
}

// initRoot gives the layer's root the attributes of the root below, which it
// would otherwise hide.
func (x *extractor) initRoot(root string) error {
	if len(x.lowers) == 0 {
		return os.Chmod(root, 0o755)
	}
	return x.copyAttributes(x.lowers[0], unix.AT_FDCWD, root)
}

// cleanName turns an archive's path into one relative to the root, or refuses.
func cleanName(name string) (string, error) {
	clean := path.Clean(strings.TrimLeft(name, "/"))
	if clean == ".." || strings.HasPrefix(clean, "../") || strings.ContainsRune(name, 0) || len(name) >= unix.PathMax {
		return "", &badLayerError{ErrUnsafeLayer}
	}
	return clean, nil
}

func (x *extractor) entry(h *tar.Header, r io.Reader) error {
	name, err := cleanName(h.Name)
	if err != nil {
		return err
	}
	if name == "." {
		if h.Typeflag != tar.TypeDir {
			return &badLayerError{errors.New("the root is not a folder")}
		}
		return x.setAttributes(place{fd: x.root}, ".", h)
	}
	dir, base := path.Split(name)
	p, err := x.parent(dir)
	if err != nil {
		return err
	}
	switch {
	case base == whiteoutOpaque:
		return x.makeOpaque(p)
	case strings.HasPrefix(base, whiteoutMeta):
		return nil
	case strings.HasPrefix(base, whiteoutPrefix):
		gone := strings.TrimPrefix(base, whiteoutPrefix)
		if gone == "" || gone == "." || gone == ".." {
			return &badLayerError{ErrUnsafeLayer}
		}
		return x.whiteout(p, gone)
	}
	return x.create(p, base, name, h, r)
}

func (x *extractor) create(p place, base, name string, h *tar.Header, r io.Reader) error {
	if h.Typeflag == tar.TypeDir {
		if err := x.makeDir(p, base); err != nil {
			return err
		}
		x.dirs = append(x.dirs, dirTime{name, h.ModTime})
		return x.setAttributes(p, base, h)
	}
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	if h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0 {
		return x.whiteout(p, base) // an archive of an overlayfs directory as it is
	}
	if h.Typeflag == tar.TypeLink {
		return x.hardlink(p, base, h.Linkname)
	}
	if err := x.remove(p, base); err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeReg, '\x00':
		if err := x.writeFile(p, base, r); err != nil {
			return err
		}
	case tar.TypeSymlink:
		if h.Linkname == "" {
			return &badLayerError{errors.New("symbolic link to nothing")}
		}
		if err := unix.Symlinkat(h.Linkname, p.fd, base); err != nil {
			return fmt.Errorf("symlink: %w", err)
		}
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		if err := x.makeNode(p, base, h); err != nil {
			return err
		}
	default:
		return &badLayerError{fmt.Errorf("archive entry of unknown type %q", h.Typeflag)}
	}
	return x.setAttributes(p, base, h)
}

func (x *extractor) writeFile(p place, base string, r io.Reader) error {
	fd, err := unix.Openat(p.fd, base, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return fmt.Errorf("create: %w", err)
	}
	f := os.NewFile(uintptr(fd), base)
	_, err = io.CopyBuffer(budgetWriter{f, x.room}, r, x.buf)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return &badLayerError{fmt.Errorf("read the archive: %w", err)}
	}
	return err
}

func (x *extractor) makeNode(p place, base string, h *tar.Header) error {
	mode, dev := uint32(h.Mode&0o7777), 0
	switch h.Typeflag {
	case tar.TypeFifo:
		mode |= unix.S_IFIFO
	case tar.TypeBlock:
		mode |= unix.S_IFBLK
		dev = int(unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor)))
	default:
		mode |= unix.S_IFCHR
		dev = int(unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor)))
	}
	if err := unix.Mknodat(p.fd, base, mode, dev); err != nil {
		return fmt.Errorf("mknod: %w", err)
	}
	return nil
}

// hardlink links to a file of this layer, or copies one from below.
func (x *extractor) hardlink(p place, base, linkname string) error {
	target, err := cleanName(linkname)
	if err != nil {
		return err
	}
	dir, tbase := path.Split(target)
	tp, err := x.walk(dir, false)
	if errors.Is(err, fs.ErrNotExist) {
		return &badLayerError{fmt.Errorf("hard link to %q, which does not exist", linkname)}
	}
	if err != nil {
		return err
	}
	defer x.drop(tp)
	st, err := x.own(tp, tbase)
	if err != nil {
		return err
	}
	if st != nil && !isWhiteout(st) {
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			return &badLayerError{fmt.Errorf("hard link to the folder %q", linkname)}
		}
		if mine, err := x.own(p, base); err != nil {
			return err
		} else if mine != nil && mine.Ino == st.Ino {
			return nil // to itself, or named twice
		}
		if err := x.remove(p, base); err != nil {
			return err
		}
		if err := unix.Linkat(tp.fd, tbase, p.fd, base, 0); err != nil {
			return fmt.Errorf("hard link to %q: %w", linkname, err)
		}
		return nil
	}
	var below lowerEntry
	if st == nil { // not deleted in this layer
		if below, err = tp.lowers.lookup(tbase); err != nil {
			return err
		}
	}
	if below.path == "" || below.kind != 0 {
		return &badLayerError{fmt.Errorf("hard link to %q, which is no file", linkname)}
	}
	src, err := os.Open(below.path)
	if err != nil {
		return err
	}
	defer func() { _ = src.Close() }()
	if err := x.remove(p, base); err != nil {
		return err
	}
	if err := x.writeFile(p, base, src); err != nil {
		return err
	}
	return x.copyAttributes(below.path, p.fd, base)
}

// parent returns the directory that an entry goes into, making what is missing.
func (x *extractor) parent(dir string) (place, error) {
	if x.last.fd >= 0 && dir == x.lastDir {
		return x.last, nil
	}
	p, err := x.walk(dir, true)
	if err != nil {
		return place{}, err
	}
	x.forget()
	x.lastDir, x.last = dir, p
	return p, nil
}

func (x *extractor) forget() {
	if x.last.fd >= 0 {
		x.drop(x.last)
	}
	x.last = place{fd: -1}
}

func (x *extractor) drop(p place) {
	if p.fd >= 0 && p.fd != x.root {
		_ = unix.Close(p.fd)
	}
}

// walk goes from the root to a directory. Symbolic links, of this layer or those
// below, are followed inside the root. With create, directories missing in this
// layer are made, with the attributes they have below; without, a directory that
// exists nowhere is fs.ErrNotExist.
func (x *extractor) walk(dir string, create bool) (place, error) {
	todo := components(dir)
	follows := 0
restart:
	p := place{fd: x.root, lowers: x.lowers}
	for i, name := range todo {
		if name == ".." {
			// All before it are real directories, so this is their parent.
			todo = slices.Concat(todo[:max(i-1, 0)], todo[i+1:])
			x.drop(p)
			goto restart
		}
		next, link, err := x.step(p, name, create)
		if err != nil {
			x.drop(p)
			return place{}, err
		}
		if link != "" {
			if follows++; follows > maxFollows {
				x.drop(p)
				return place{}, &badLayerError{fmt.Errorf("%q: %w", dir, unix.ELOOP)}
			}
			base := todo[:i]
			if strings.HasPrefix(link, "/") {
				base = nil
			}
			todo = slices.Concat(base, components(link), todo[i+1:])
			x.drop(p)
			goto restart
		}
		x.drop(p)
		p = next
	}
	return p, nil
}

// components splits a path, dropping what means nothing.
func components(p string) []string {
	var out []string
	for c := range strings.SplitSeq(p, "/") {
		if c != "" && c != "." {
			out = append(out, c)
		}
	}
	return out
}

// step goes one component down: to a directory, or to a link's text.
func (x *extractor) step(p place, name string, create bool) (next place, link string, err error) {
	st, err := x.own(p, name)
	if err != nil {
		return place{}, "", err
	}
	if st != nil && !isWhiteout(st) {
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFLNK:
			link, err = readlink(p.fd, name)
			return place{}, link, err
		case unix.S_IFDIR:
			next, err = x.descend(p, name)
			return next, "", err
		default:
			return place{}, "", &badLayerError{fmt.Errorf("%q is not a folder", name)}
		}
	}
	var below lowerEntry
	if st == nil { // a whiteout of this layer hides what is below
		if below, err = p.lowers.lookup(name); err != nil {
			return place{}, "", err
		}
	}
	switch {
	case below.path != "" && below.kind == fs.ModeSymlink:
		link, err = os.Readlink(below.path)
		return place{}, link, err
	case below.path != "" && below.kind != fs.ModeDir:
		return place{}, "", &badLayerError{fmt.Errorf("%q is not a folder", name)}
	case create:
		if err = x.makeDir(p, name); err != nil {
			return place{}, "", err
		}
		next, err = x.descend(p, name)
		return next, "", err
	case below.path == "":
		return place{}, "", fmt.Errorf("%q: %w", name, fs.ErrNotExist)
	default:
		return place{fd: -1, lowers: below.dirs}, "", nil
	}
}

// descend opens a directory that this layer has.
func (x *extractor) descend(p place, name string) (place, error) {
	fd, err := unix.Openat(p.fd, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return place{}, fmt.Errorf("open folder %q: %w", name, err)
	}
	next := place{fd: fd}
	if isOpaque(procPath(p.fd, name)) {
		return next, nil
	}
	below, err := p.lowers.lookup(name)
	if err != nil {
		_ = unix.Close(fd)
		return place{}, err
	}
	next.lowers = below.dirs
	return next, nil
}

// makeDir sees to it that this layer has the directory. One that lies below
// passes on its attributes; in place of a whiteout a directory hides what is
// below.
func (x *extractor) makeDir(p place, name string) error {
	st, err := x.own(p, name)
	if err != nil {
		return err
	}
	if st != nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return nil
	}
	if st != nil {
		if err := x.remove(p, name); err != nil {
			return err
		}
	}
	if err := unix.Mkdirat(p.fd, name, 0o755); err != nil {
		return fmt.Errorf("mkdir %q: %w", name, err)
	}
	below, err := p.lowers.lookup(name)
	if err != nil || below.path == "" || below.kind != fs.ModeDir {
		return err
	}
	if st != nil { // this layer had hidden it before
		return x.setOpaque(procPath(p.fd, name))
	}
	return x.copyAttributes(below.path, p.fd, name)
}

// whiteout hides what the layers below have under the name. What this layer
// has itself stays.
func (x *extractor) whiteout(p place, name string) error {
	below, err := p.lowers.lookup(name)
	if err != nil || below.path == "" {
		return err
	}
	st, err := x.own(p, name)
	if err != nil {
		return err
	}
	switch {
	case st == nil:
		if err := unix.Mknodat(p.fd, name, unix.S_IFCHR, 0); err != nil {
			return fmt.Errorf("whiteout: %w", err)
		}
	case st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return x.setOpaque(procPath(p.fd, name))
	}
	return nil
}

// makeOpaque hides everything that the layers below have in a directory.
func (x *extractor) makeOpaque(p place) error {
	if len(p.lowers) == 0 {
		return nil
	}
	x.last.lowers = nil // p is the cached directory
	return x.setOpaque(procPath(p.fd, "."))
}

func (x *extractor) setOpaque(file string) error {
	if err := unix.Lsetxattr(file, opaqueXattr, []byte("y"), 0); err != nil {
		return fmt.Errorf("mark as opaque: %w", err)
	}
	return nil
}

// own looks up a name in this layer alone; nil: it has none.
func (x *extractor) own(p place, name string) (*unix.Stat_t, error) {
	if p.fd < 0 {
		return nil, nil
	}
	var st unix.Stat_t
	err := unix.Fstatat(p.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("stat %q: %w", name, err)
	}
	return &st, nil
}

// remove makes room for a new entry: a later one in the archive wins.
func (x *extractor) remove(p place, name string) error {
	st, err := x.own(p, name)
	if err != nil || st == nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return os.RemoveAll(procPath(p.fd, name))
	}
	if err := unix.Unlinkat(p.fd, name, 0); err != nil {
		return fmt.Errorf("remove %q: %w", name, err)
	}
	return nil
}

func (x *extractor) setDirTimes() error {
	for _, d := range slices.Backward(x.dirs) {
		dir, base := path.Split(d.name)
		p, err := x.walk(dir, false)
		if errors.Is(err, fs.ErrNotExist) || isBadLayer(err) {
			continue // replaced by a later entry
		}
		if err != nil {
			return err
		}
		st, err := x.own(p, base)
		if err == nil && st != nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			err = setTime(p.fd, base, d.time)
		}
		x.drop(p)
		if err != nil {
			return err
		}
	}
	return nil
}

func readlink(dirfd int, name string) (string, error) {
	b := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(dirfd, name, b)
	if err != nil {
		return "", fmt.Errorf("readlink %q: %w", name, err)
	}
	return string(b[:n]), nil
}

// procPath names a file through an open directory, for calls that take no
// descriptor. The last component is not followed by the calls used here.
func procPath(fd int, name string) string { return fmt.Sprintf("/proc/self/fd/%d/%s", fd, name) }
