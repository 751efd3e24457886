// Package podmonbin carries the podmon program inside clusterd.
package podmonbin

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// The pattern also matches podmon.md, so that it builds before podmon does.
//
//go:embed podmon*
var files embed.FS

// ErrAbsent is returned when clusterd was built without podmon.
var ErrAbsent = errors.New("clusterd was built without podmon: run make")

// Open gives the program as a sealed memory file to execute: nothing is written
// to disk, nothing can change it, and containers' inits run from it as it is.
func Open() (*os.File, error) {
	program, err := files.ReadFile("podmon")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrAbsent
	}
	if err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("podmon", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC|unix.MFD_EXEC)
	if err == unix.EINVAL { // before Linux 6.3 there is no MFD_EXEC: all are executable
		fd, err = unix.MemfdCreate("podmon", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
	}
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	f := os.NewFile(uintptr(fd), "podmon")
	if _, err = f.Write(program); err == nil {
		err = f.Chmod(0o511)
	}
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("podmon into memory: %w", err)
	}
	return f, nil
}
