// Package sealed keeps a program in memory so that it cannot be changed any
// more: clusterd starts podmon from such a file, and podmon containers' inits.
package sealed

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE

// New copies program into a memory file of that name that can be executed and
// never be written to again (memfd_create(2), F_SEAL_WRITE in fcntl(2)). The
// caller closes it.
func New(name string, program io.Reader) (_ *os.File, err error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC|unix.MFD_EXEC)
	if err == unix.EINVAL { // before Linux 6.3 there is no MFD_EXEC: all are executable
		fd, err = unix.MemfdCreate(name, unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
	}
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	if _, err := io.Copy(f, program); err != nil {
		return nil, fmt.Errorf("copy into memory: %w", err)
	}
	if err := f.Chmod(0o511); err != nil {
		return nil, err
	}
	if err := seal(f); err != nil {
		return nil, fmt.Errorf("seal: %w", err)
	}
	return f, nil
}

// Is reports whether f is a file that New made.
func Is(f *os.File) bool {
	has, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	return err == nil && has&seals == seals
}

// sealTries bounds how often a busy file is tried to be sealed.
const sealTries = 40

// seal forbids every further change. The kernel refuses with EBUSY when, after
// 150 ms, a page of the file is still in use, be it its own reclaim or
// compaction at work (memfd_wait_for_pins in the kernel's mm/memfd.c).
func seal(f *os.File) error {
	for try := 1; ; try++ {
		_, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals)
		if err != unix.EBUSY || try == sealTries {
			return err
		}
	}
}

// Digest names the program in f by its content, as "sha256:HEX": two podmons
// with the same are the same code. It leaves f's position alone.
func Digest(f *os.File) (string, error) {
	st, err := f.Stat()
	if err != nil {
		return "", err
	}
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(f, 0, st.Size())); err != nil {
		return "", fmt.Errorf("digest of %s: %w", f.Name(), err)
	}
	return "sha256:" + hex.EncodeToString(h.Sum(nil)), nil
}
