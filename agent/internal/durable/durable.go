// Package durable writes files that a power cut leaves old or new, never half.
package durable

import (
	"errors"
	"os"
	"path/filepath"
)

// ReplaceFile writes b to the file name, with mode 0600, so that after a power
// cut it is the old one or the new one: a file beside it is synced and renamed,
// then the folder is synced. The folder must exist.
func ReplaceFile(name string, b []byte) (err error) {
	dir := filepath.Dir(name)
	f, err := os.CreateTemp(dir, filepath.Base(name)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	_, err = f.Write(b)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err = os.Rename(f.Name(), name); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
