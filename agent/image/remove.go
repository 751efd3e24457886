package image

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// removeDepth is how many directories are open at once while a tree is removed.
const removeDepth = 64

// removeTree removes a directory that others filled. However deep it is, it takes
// removeDepth descriptors and little memory, for which os.RemoveAll has no bound: what is
// deeper is moved up first. The end of ctx leaves the rest. One that is not there is no
// error.
func removeTree(ctx context.Context, dir string) error {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	top := os.NewFile(uintptr(fd), dir)
	defer top.Close()
	r := remover{ctx: ctx, top: fd}
	if err := r.empty(top, 0); err != nil {
		return err
	}
	return os.Remove(dir)
}

type remover struct {
	ctx  context.Context
	top  int
	next int // number of the next directory that is moved up
}

// empty removes what is in a directory.
func (r *remover) empty(dir *os.File, depth int) error {
	for {
		some := false
		if _, err := dir.Seek(0, io.SeekStart); err != nil {
			return err
		}
		for {
			names, err := dir.Readdirnames(512)
			for _, name := range names {
				some = true
				if err := r.entry(dir, name, depth); err != nil {
					return err
				}
			}
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return err
			}
		}
		if !some {
			return nil
		}
	}
}

// entry removes one entry of a directory, or moves it to the top.
func (r *remover) entry(dir *os.File, name string, depth int) error {
	if r.ctx.Err() != nil {
		return context.Cause(r.ctx)
	}
	fail := func(op string, err error) error {
		if err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		return &fs.PathError{Op: op, Path: dir.Name() + "/" + name, Err: err}
	}
	at := int(dir.Fd())
	err := unix.Unlinkat(at, name, 0)
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return fail("unlinkat", err)
	}
	if depth == removeDepth {
		for {
			r.next++
			err := unix.Renameat2(at, name, r.top, "deep-"+strconv.Itoa(r.next), unix.RENAME_NOREPLACE)
			if !errors.Is(err, unix.EEXIST) {
				return fail("renameat2", err)
			}
		}
	}
	fd, oerr := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(oerr, unix.ENOTDIR) || errors.Is(oerr, unix.ELOOP) {
		return fail("unlinkat", err)
	}
	if oerr != nil {
		return fail("openat", oerr)
	}
	child := os.NewFile(uintptr(fd), name)
	err = r.empty(child, depth+1)
	if cerr := child.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return fail("unlinkat", unix.Unlinkat(at, name, unix.AT_REMOVEDIR))
}
