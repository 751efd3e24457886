package nodedir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/clusterd/clusterd/member/pki"
)

// Successor is the file of an authority that this server made and that the
// cluster's state may name; it is in pki/ once this server follows that.
func (d Dir) Successor(id string) string { return d.Path("authority-" + id + ".pem") }

// WriteSuccessor implements authority.SuccessorStore.
func (d KeyDir) WriteSuccessor(ca *pki.CA) error {
	key, err := ca.EncodeCAKey()
	if err != nil {
		return err
	}
	return d.WriteKey(d.Successor(ca.ID()), append(pki.EncodeCert(ca.Cert), key...))
}

// ReadSuccessor implements authority.SuccessorStore.
func (d KeyDir) ReadSuccessor(id string) (*pki.CA, error) {
	b, err := d.ReadKey(d.Successor(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	cert, key := pki.CutPEM(b)
	ca, err := pki.LoadCA(cert, key)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.Successor(id), err)
	}
	return ca, nil
}

// Successors are the ids of those files, and when each was written.
func (d Dir) Successors() (map[string]time.Time, error) {
	files, err := filepath.Glob(d.Successor("*"))
	if err != nil {
		return nil, err
	}
	made := map[string]time.Time{}
	for _, file := range files {
		info, err := os.Stat(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		id := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), "authority-"), ".pem")
		made[id] = info.ModTime()
	}
	return made, nil
}

// DropSuccessor implements authority.SuccessorStore.
func (d Dir) DropSuccessor(id string) error {
	err := os.Remove(d.Successor(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
