// Package durable writes files that must survive a power cut: afterwards a file is the
// old one or the new one, never a part, and a rename is not undone. It depends on the
// standard library only, so that every room can import it. State that means nothing
// after a reboot (of processes, of mounts) does not need it.
package durable

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// ReplaceFile writes b to the file name. After a power cut it is the old one or
// the new one; when ReplaceFile returned without an error, the new one. The
// folder must exist. Calls for one file may run at once: the last one wins.
func ReplaceFile(name string, b []byte, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".*")
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err != nil {
		return errors.Join(err, f.Close(), os.Remove(f.Name()))
	}
	return Commit(f, name)
}

// Commit syncs and closes a written file and gives it a name of the same file
// system, replacing any existing file. When it fails, the file is gone.
func Commit(f *os.File, name string) error {
	err := errors.Join(f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return SyncDir(filepath.Dir(name))
}

// Rename gives a file or directory another name, permanently. What is in it must have
// been synced before.
func Rename(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	err := SyncDir(filepath.Dir(to))
	if filepath.Dir(from) != filepath.Dir(to) {
		err = errors.Join(err, SyncDir(filepath.Dir(from)))
	}
	return err
}

// SyncDir makes the names in a directory durable: those given, and those removed.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
