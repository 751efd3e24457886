package seglog

import (
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/durable"
)

// folder is where a log's files are. Names are relative to it. Changes of names
// are durable after sync.
type folder interface {
	list() ([]string, error)
	open(name string) (file, error)
	create(name string) (file, error)
	rename(from, to string) error
	remove(name string) error
	sync() error
}

// file is an open file of a folder.
type file interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	Truncate(size int64) error
	size() (int64, error)
	// sync makes all that was done to the file durable, datasync what was
	// written to it.
	sync() error
	datasync() error
	// forget drops what the kernel remembers of the file, so that what is read
	// next comes from the disk. It may do nothing.
	forget()
}

// osFolder is a folder of the file system.
type osFolder string

// makeFolder makes the folder if need be, durably.
func makeFolder(path string) (osFolder, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return "", err
	}
	return osFolder(path), durable.SyncDir(filepath.Dir(path))
}

func (d osFolder) path(name string) string { return filepath.Join(string(d), name) }

func (d osFolder) list() (names []string, err error) {
	entries, err := os.ReadDir(string(d))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, err
}

func (d osFolder) open(name string) (file, error) { return d.openFile(name, os.O_RDWR) }

func (d osFolder) create(name string) (file, error) {
	return d.openFile(name, os.O_RDWR|os.O_CREATE|os.O_TRUNC)
}

func (d osFolder) openFile(name string, flag int) (file, error) {
	f, err := os.OpenFile(d.path(name), flag, 0o600)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

func (d osFolder) rename(from, to string) error { return os.Rename(d.path(from), d.path(to)) } //nolint:forbidigo // sync comes apart: the crash model tells them apart
func (d osFolder) remove(name string) error     { return os.Remove(d.path(name)) }
func (d osFolder) sync() error                  { return durable.SyncDir(string(d)) }

type osFile struct{ *os.File }

func (f osFile) sync() error { return f.Sync() }

func (f osFile) size() (int64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

func (f osFile) datasync() error {
	for {
		if err := unix.Fdatasync(int(f.Fd())); err != unix.EINTR {
			return err
		}
	}
}

func (f osFile) forget() { _ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED) }
