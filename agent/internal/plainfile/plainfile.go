// Package plainfile opens files that an image or a container has made. Such a
// file may be a link that leads elsewhere, a FIFO that never has a writer, or a
// device whose opening does something: nothing but a regular file is opened,
// and no open waits.
package plainfile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// ErrNotRegular is returned for a directory, a FIFO, a socket or a device.
var ErrNotRegular = errors.New("is not a regular file")

// OpenInRoot opens the file name for reading as a process would whose root
// folder is root: absolute links and ".." stay inside.
func OpenInRoot(root, name string) (*os.File, error) {
	return open(root, name, unix.RESOLVE_IN_ROOT)
}

// OpenBeneath opens the file name, relative to dir, for reading. A link that
// leads out of dir is an error.
func OpenBeneath(dir, name string) (*os.File, error) {
	return open(dir, name, unix.RESOLVE_BENEATH)
}

// Read returns all of f and closes it; a file of more than limit bytes is an
// error.
func Read(f *os.File, limit int64) ([]byte, error) {
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		return nil, fmt.Errorf("is larger than %d KiB", limit>>10)
	}
	return b, err
}

// maxRaces is how often a look-up is tried again that the kernel gave up
// because somebody renamed directories meanwhile (openat2(2), EAGAIN).
const maxRaces = 64

func open(dir, name string, resolve uint64) (*os.File, error) {
	path := filepath.Join(dir, name)
	fail := func(err error) (*os.File, error) { return nil, &fs.PathError{Op: "open", Path: path, Err: err} }
	at, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fail(err)
	}
	defer unix.Close(at)
	// O_PATH looks the file up without opening it: a FIFO does not wait, a
	// device does nothing.
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: resolve | unix.RESOLVE_NO_MAGICLINKS}
	fd, err := unix.Openat2(at, name, &how)
	for try := 1; try < maxRaces && (errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR)); try++ {
		fd, err = unix.Openat2(at, name, &how)
	}
	if errors.Is(err, unix.EXDEV) {
		return fail(errors.New("path escapes from the folder"))
	}
	if err != nil {
		return fail(err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fail(err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return fail(ErrNotRegular)
	}
	// The same inode, whatever its name means by now.
	again, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return fail(err)
	}
	return os.NewFile(uintptr(again), path), nil
}
