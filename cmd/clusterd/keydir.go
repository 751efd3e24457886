package main

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/sealkey"
)

// keyDir is a data directory with what seals the files in it that hold keys:
//
//	pki/{node.key, ca.key, ca-PURPOSE.key, gossip.key, gossip-ring.json, retired-seal.keys},
//	authority-ID.pem, seal.keys       sealed under their names
//	admin.kubeconfig, front-proxy.*,  have to be read in clear, by kubectl, by the API
//	network/wireguard.json            server's library, by the agent: they lie in
//	                                  memory and are made again after a boot;
//	                                  admin.kubeconfig is a link to it
//
// Without a sealing key all of them lie in clear, with the mode 0600.
type keyDir struct {
	dataDir
	seal *sealkey.Key // nil: none
}

const (
	// sealFile holds the keys for secrets at rest that administrators made.
	sealFile = "seal.keys"
	// newIdentity begins the name of the directory that is to become pki/.
	newIdentity    = "pki.new-"
	kubeconfigName = "admin.kubeconfig"
	wireguardKey   = "wireguard.json" // in the directory of the pods' network
)

// publicFile reports whether the file of pki/ holds no keys.
func publicFile(name string) bool { return filepath.Ext(name) == ".crt" || name == "trust" }

// memoryDir is where what must be read in clear lies of nodes with a sealing key.
var memoryDir = "/run/clusterd"

// memory is the directory of this node in there.
func (d dataDir) memory() string {
	sum := sha256.Sum256([]byte(d))
	return filepath.Join(memoryDir, "keys-"+hex.EncodeToString(sum[:8]))
}

// inClear is where a file with a key lies that others read in clear.
func (d keyDir) inClear(name string) string {
	if d.seal == nil {
		return d.path(name)
	}
	return filepath.Join(d.memory(), name)
}

// linkInClear makes such a file be found in the data directory, too.
func (d keyDir) linkInClear(name string) error {
	file, link := d.inClear(name), d.path(name)
	if to, err := os.Readlink(link); file == link || err == nil && to == file {
		return nil
	}
	tmp := link + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(file, tmp); err != nil {
		return err
	}
	return durable.Rename(tmp, link)
}

// readKey reads a file that may be sealed.
func (d keyDir) readKey(path string) ([]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return d.open(path, b)
}

func (d keyDir) open(path string, content []byte) ([]byte, error) {
	secret, err := d.seal.Open(content)
	switch {
	case err == nil:
		return secret, nil
	case errors.Is(err, sealkey.ErrSealed):
		return nil, fmt.Errorf("%s: %w: give --seal-key FILE (or CLUSTERD_SEAL_KEY, sealKey in %s) with the key of this node", path, err, d.path("config.yaml"))
	case errors.Is(err, sealkey.ErrWrongKey):
		return nil, fmt.Errorf("%s: %w than those in %s: give --seal-key the file with the key that sealed it, or add that key to this file as a further line", path, err, d.seal.File())
	}
	return nil, fmt.Errorf("%s: %w: `clusterd reset`, then join again, makes this machine a node with new keys", path, err)
}

// writeKey replaces a file with something secret.
func (d keyDir) writeKey(path string, secret []byte) error {
	content, err := d.seal.Seal(secret)
	if err != nil {
		return fmt.Errorf("seal %s: %w", path, err)
	}
	return writeFile(path, content, 0o600)
}

// loose are the files with keys, in clear or sealed, that lie beside pki/.
func (d dataDir) loose() ([]string, error) {
	files, err := filepath.Glob(d.successor("*"))
	if err != nil {
		return nil, err
	}
	if _, err := os.Lstat(d.path(sealFile)); err == nil {
		files = append(files, d.path(sealFile))
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return files, nil
}

// reconcile makes the directory be as the sealing key says: what lies in clear is sealed, and what
// a key sealed that is not the first any more is sealed with that. Each file is the old one or
// the new one after a crash, and both can be read with the sealing key; the next start goes on. id is
// what was read. The lock of the directory is held.
func (d keyDir) reconcile(id *identity, log *slog.Logger) error {
	if err := d.removeUnfinished(); err != nil {
		return err
	}
	if d.seal == nil {
		return nil
	}
	if err := os.MkdirAll(d.memory(), 0o700); err != nil {
		return fmt.Errorf("make the directory for keys in memory: %w", err)
	}
	if !inMemory(d.memory()) {
		log.Warn("the administrator's kubeconfig and other keys that programs read in clear lie on a disk: mount a tmpfs there", "folder", d.memory())
	}
	changed, err := d.sealAll(id)
	if err != nil {
		return fmt.Errorf("seal the key files: %w", err)
	}
	if len(changed) > 0 {
		log.Info("key files were sealed", "key", d.seal.File(), "files", changed)
	}
	return nil
}

// sealAll seals what is not sealed with the first key, and returns the names of it.
func (d keyDir) sealAll(id *identity) (changed []string, err error) {
	entries, err := os.ReadDir(d.path("pki"))
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if publicFile(e.Name()) {
			continue
		}
		b, err := os.ReadFile(d.path("pki", e.Name()))
		if err != nil {
			return changed, err
		}
		if !d.seal.Current(b) {
			changed = append(changed, filepath.Join("pki", e.Name()))
		}
	}
	if len(changed) > 0 {
		if err := d.replaceIdentity(id); err != nil {
			return nil, err
		}
	}
	files, err := d.loose()
	if err != nil {
		return changed, err
	}
	for _, path := range files {
		resealed, err := d.sealFile(path, nil)
		if err != nil {
			return changed, err
		}
		if resealed {
			changed = append(changed, filepath.Base(path))
		}
	}
	// What is made again, in memory.
	for _, path := range []string{d.path(kubeconfigName), d.path("front-proxy.key"), d.path("front-proxy.crt"), d.path("network", wireguardKey)} {
		info, err := os.Lstat(path)
		if errors.Is(err, fs.ErrNotExist) || err == nil && info.Mode().Type() == fs.ModeSymlink {
			continue
		}
		if err == nil {
			err = os.Remove(path)
		}
		if err != nil {
			return changed, err
		}
		changed = append(changed, filepath.Base(path))
	}
	return changed, durable.SyncDir(string(d.dataDir))
}

// sealFile seals a file that is not sealed with the first key. checked, unless it is nil, is what it
// holds as far as the caller has checked: a file that has changed since is left alone, and so is
// one that changes while it is sealed.
func (d keyDir) sealFile(path string, checked []byte) (bool, error) {
	lock, err := d.lockSealKeys()
	if err != nil {
		return false, err
	}
	defer lock.Close()
	was, err := os.Stat(path)
	if err != nil {
		return false, err
	}
	b, err := os.ReadFile(path)
	if err != nil || d.seal.Current(b) {
		return false, err
	}
	secret, err := d.open(path, b)
	if err != nil || checked != nil && !slices.Equal(secret, checked) {
		return false, err
	}
	content, err := d.seal.Seal(secret)
	if err != nil {
		return false, fmt.Errorf("seal %s: %w", path, err)
	}
	is, err := os.Stat(path)
	if err != nil || !os.SameFile(was, is) || !was.ModTime().Equal(is.ModTime()) || was.Size() != is.Size() {
		return false, err
	}
	return true, writeFile(path, content, 0o600)
}

// removeUnfinished removes what a crash left of files and directories with keys before they got
// their names.
func (d dataDir) removeUnfinished() error {
	patterns := []string{newIdentity + "*", ".authority-*.pem.*", "." + sealFile + ".*", "." + kubeconfigName + ".*", ".front-proxy.key.*", "network/." + wireguardKey + ".*"}
	for _, pattern := range patterns {
		left, err := filepath.Glob(d.path(pattern))
		if err != nil {
			return err
		}
		for _, path := range left {
			if err := os.RemoveAll(path); err != nil {
				return err
			}
		}
	}
	return nil
}

// unsealAll puts everything in clear again, as far as d's sealing key opens it. The lock is held.
func (d keyDir) unsealAll() error {
	id, err := d.readIdentity()
	if err != nil {
		return err
	}
	bare := keyDir{dataDir: d.dataDir}
	if err := bare.replaceIdentity(id); err != nil {
		return err
	}
	files, err := d.loose()
	if err != nil {
		return err
	}
	for _, path := range files {
		secret, err := d.readKey(path)
		if err != nil {
			return err
		}
		if err := bare.writeKey(path, secret); err != nil {
			return err
		}
	}
	return errors.Join(d.dropInClear(), durable.SyncDir(string(d.dataDir)))
}

// dropInClear removes what lies in memory, and the link to it.
func (d dataDir) dropInClear() error {
	err := os.RemoveAll(d.memory())
	if _, linked := os.Readlink(d.path(kubeconfigName)); linked == nil {
		err = errors.Join(err, os.Remove(d.path(kubeconfigName)))
	}
	return err
}

// inMemory reports whether a directory lies in memory, as far as its file system tells.
func inMemory(dir string) bool {
	var s unix.Statfs_t
	if unix.Statfs(dir, &s) != nil {
		return false
	}
	return s.Type == unix.TMPFS_MAGIC || s.Type == unix.RAMFS_MAGIC
}

func (d keyDir) frontCert() string { return d.inClear("front-proxy.crt") }

func (d keyDir) frontKey() string { return d.inClear("front-proxy.key") }

// readFrontCert returns nil if there is no pair whose halves belong together.
func (d keyDir) readFrontCert() (*x509.Certificate, error) {
	certPEM, err := os.ReadFile(d.frontCert())
	if err == nil {
		var keyPEM []byte
		if keyPEM, err = os.ReadFile(d.frontKey()); err == nil {
			return pairOf(certPEM, keyPEM), nil
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return nil, err
}

// pairOf is the certificate, nil if it is none, or not that key's.
func pairOf(certPEM, keyPEM []byte) *x509.Certificate {
	cert, err := pki.ParseCert(certPEM)
	if err != nil {
		return nil
	}
	key, err := pki.ParseKey(keyPEM)
	if err != nil || pki.Fingerprint(key.Public()) != pki.Fingerprint(cert.PublicKey) {
		return nil
	}
	return cert
}
