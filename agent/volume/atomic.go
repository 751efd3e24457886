package volume

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Readers see all files of a volume change at once: the files live in a
// folder named by no one else, the link ..data points to it, and each name
// the user sees is a link through ..data. An update writes a new directory and
// renames a new link over ..data.
//
//	app.conf     -> ..data/app.conf
//	..data       -> ..2.k3x9/
//	..2.k3x9/app.conf
const dataLink = "..data"

// writeFiles makes files the content of dir. Nothing is touched when the
// content is already so.
func writeFiles(dir string, files map[string]file, group *int64) error {
	current, err := os.Readlink(filepath.Join(dir, dataLink))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if current != "" && same(filepath.Join(dir, current), files) {
		return link(dir, files)
	}
	next, err := os.MkdirTemp(dir, "..2.")
	if err != nil {
		return err
	}
	if err := fill(next, files, group); err != nil {
		_ = os.RemoveAll(next)
		return err
	}
	tmp := filepath.Join(dir, "..data_tmp")
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(filepath.Base(next), tmp); err != nil {
		return err
	}
	if err := os.Rename(tmp, filepath.Join(dir, dataLink)); err != nil { //nolint:forbidigo // written from objects: the next start does so again
		return err
	}
	if err := link(dir, files); err != nil {
		return err
	}
	return sweep(dir, filepath.Base(next))
}

// fill writes the files into an empty directory.
func fill(dir string, files map[string]file, group *int64) error {
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	for name, f := range files {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			return err
		}
		mode := fs.FileMode(f.mode) & fs.ModePerm
		if group != nil {
			mode |= 0o040
		}
		if err := os.WriteFile(p, f.data, 0o600); err != nil { //nolint:forbidigo // as its folder
			return err
		}
		uid, gid := -1, -1
		if f.uid != nil {
			uid = int(*f.uid)
		}
		if group != nil {
			gid = int(*group)
		}
		if uid >= 0 || gid >= 0 {
			if err := os.Chown(p, uid, gid); err != nil {
				return err
			}
		}
		if err := os.Chmod(p, mode); err != nil {
			return err
		}
	}
	return nil
}

// same reports whether the directory holds exactly these files.
func same(dir string, files map[string]file) bool {
	n := 0
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		want, ok := files[rel]
		if !ok {
			return fs.ErrExist
		}
		have, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		if !bytes.Equal(have, want.data) {
			return fs.ErrExist
		}
		n++
		return nil
	})
	return err == nil && n == len(files)
}

// link makes the names that users see, and removes those that are no more.
func link(dir string, files map[string]file) error {
	top := map[string]bool{}
	for name := range files {
		first, _, _ := strings.Cut(name, "/")
		top[first] = true
	}
	for name := range top {
		p, want := filepath.Join(dir, name), dataLink+"/"+name
		if have, err := os.Readlink(p); err == nil && have == want {
			continue
		}
		if err := os.Symlink(want, p); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("link %s: %w", name, err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "..") || top[e.Name()] {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// sweep removes older content directories.
func sweep(dir, keep string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() && strings.HasPrefix(e.Name(), "..2.") && e.Name() != keep {
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}
