package nodedir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Show is what a file of the directory holds; nothing, of a node without keys of its
// administrator's for Secrets.
func (d KeyDir) Show(path string) ([]byte, error) {
	if !filepath.IsAbs(path) {
		path = d.Path(path)
	}
	secret, err := d.ReadKey(path)
	if errors.Is(err, fs.ErrNotExist) && path == d.Path(SealKeysFile) {
		return nil, nil
	}
	return secret, err
}

// KeyFile is one file with a key.
type KeyFile struct {
	Name string // in the data directory
	Is   string // what it is, for people
	// Clear: a reader of the file has the key. Fault: the sealing key does not open it.
	Clear bool
	Fault error
}

// KeyFiles are those that the directory has.
func (d KeyDir) KeyFiles() ([]KeyFile, error) {
	entries, err := os.ReadDir(d.Path("pki"))
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, e := range entries {
		if !publicFile(e.Name()) {
			paths = append(paths, d.Path("pki", e.Name()))
		}
	}
	loose, err := d.loose()
	if err != nil {
		return nil, err
	}
	paths = append(paths, loose...)
	for _, name := range []string{KubeconfigName, "front-proxy.key", "network/" + WireguardKey} {
		if _, err := os.Lstat(d.Path(name)); err == nil {
			paths = append(paths, d.Path(name))
		}
	}
	var files []KeyFile
	for _, path := range paths {
		f := KeyFile{Name: path[len(d.Dir)+1:]}
		if to, err := os.Readlink(path); err == nil {
			f.Is = "in memory, " + to
			files = append(files, f)
			continue
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		n, err := d.Seal.With(b)
		switch {
		case err != nil:
			f.Fault, f.Is = err, "sealed, and cannot be opened: "+err.Error()
		case n == 0:
			f.Clear, f.Is = true, "in clear"
		default:
			f.Is = fmt.Sprintf("sealed with key %d of %s", n, d.Seal.File())
		}
		files = append(files, f)
	}
	return files, nil
}
