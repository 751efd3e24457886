package main

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

// successor is the file of an authority that this server made and that the
// cluster's state may name; it is in pki/ once this server follows that.
func (d dataDir) successor(id string) string { return d.path("authority-" + id + ".pem") }

// WriteSuccessor implements authority.SuccessorStore.
func (d keyDir) WriteSuccessor(ca *pki.CA) error {
	key, err := ca.EncodeCAKey()
	if err != nil {
		return err
	}
	return d.writeKey(d.successor(ca.ID()), append(pki.EncodeCert(ca.Cert), key...))
}

// ReadSuccessor implements authority.SuccessorStore.
func (d keyDir) ReadSuccessor(id string) (*pki.CA, error) {
	b, err := d.readKey(d.successor(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	cert, key := pki.CutPEM(b)
	ca, err := pki.LoadCA(cert, key)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.successor(id), err)
	}
	return ca, nil
}

// Successors are the ids of those files, and when each was written.
func (d dataDir) Successors() (map[string]time.Time, error) {
	files, err := filepath.Glob(d.successor("*"))
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
func (d dataDir) DropSuccessor(id string) error {
	err := os.Remove(d.successor(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
