// Package atomicfile replaces small files that tell of the kernel's state.
package atomicfile

import (
	"errors"
	"os"
	"path/filepath"
)

// Replace writes b to the file name, with mode 0600: after a power cut the file
// is the old one or the new one, never a part or empty, since the new one is
// synced before it gets the name. The folder is not synced, so a power cut may
// bring the old one back: nothing of the kernel's state that it tells of is left
// then either. The folder must exist.
func Replace(name string, b []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(name), filepath.Base(name)+".tmp*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), name)
}
