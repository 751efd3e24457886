package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// show is what a file of the directory holds; nothing, of a node without keys of its
// administrator's for Secrets.
func (d keyDir) show(path string) ([]byte, error) {
	if !filepath.IsAbs(path) {
		path = d.path(path)
	}
	secret, err := d.readKey(path)
	if errors.Is(err, fs.ErrNotExist) && path == d.path(sealFile) {
		return nil, nil
	}
	return secret, err
}

// keyFile is one file with a key.
type keyFile struct {
	name string // in the data directory
	is   string // what it is, for people
	// clear: whoever reads it has the key. fault: the sealing key does not open it.
	clear bool
	fault error
}

// keyFiles are those that the directory has.
func (d keyDir) keyFiles() ([]keyFile, error) {
	entries, err := os.ReadDir(d.path("pki"))
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, e := range entries {
		if !publicFile(e.Name()) {
			paths = append(paths, d.path("pki", e.Name()))
		}
	}
	loose, err := d.loose()
	if err != nil {
		return nil, err
	}
	paths = append(paths, loose...)
	for _, name := range []string{kubeconfigName, "front-proxy.key", "network/" + wireguardKey} {
		if _, err := os.Lstat(d.path(name)); err == nil {
			paths = append(paths, d.path(name))
		}
	}
	var files []keyFile
	for _, path := range paths {
		f := keyFile{name: path[len(d.dataDir)+1:]}
		if to, err := os.Readlink(path); err == nil {
			f.is = "in memory, " + to
			files = append(files, f)
			continue
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		n, err := d.seal.With(b)
		switch {
		case err != nil:
			f.fault, f.is = err, "sealed, and cannot be opened: "+err.Error()
		case n == 0:
			f.clear, f.is = true, "in clear"
		default:
			f.is = fmt.Sprintf("sealed with key %d of %s", n, d.seal.File())
		}
		files = append(files, f)
	}
	return files, nil
}
