package nodedir

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

// KeyDir is a data directory with what seals the files in it that hold keys:
//
//	pki/{node.key, ca.key, ca-PURPOSE.key, gossip.key, gossip-ring.json, retired-seal.keys},
//	authority-ID.pem, seal.keys       sealed under their names
//	admin.kubeconfig, front-proxy.*,  have to be read in clear, by kubectl, by the API
//	network/wireguard.json            server's library, by the agent: they are in
//	                                  memory and are made again after a boot;
//	                                  admin.kubeconfig is a link to it
//
// Without a sealing key all of them are in clear, with the mode 0600.
type KeyDir struct {
	Dir
	Seal *sealkey.Key // nil: none
}

const (
	// SealFile holds the keys for secrets at rest that administrators made.
	SealKeysFile = "seal.keys"
	// newIdentity begins the name of the directory that is to become pki/.
	newIdentity    = "pki.new-"
	KubeconfigName = "admin.kubeconfig"
	WireguardKey   = "wireguard.json" // in the directory of the pods' network
)

// publicFile reports whether the file of pki/ holds no keys.
func publicFile(name string) bool { return filepath.Ext(name) == ".crt" || name == "trust" }

// MemoryDir is where nodes with a sealing key keep what must be read in clear.
var MemoryDir = "/run/clusterd"

// Memory is the directory of this node in there.
func (d Dir) Memory() string {
	sum := sha256.Sum256([]byte(d))
	return filepath.Join(MemoryDir, "keys-"+hex.EncodeToString(sum[:8]))
}

// InClear is the path of a file with a key that other programs read in clear.
func (d KeyDir) InClear(name string) string {
	if d.Seal == nil {
		return d.Path(name)
	}
	return filepath.Join(d.Memory(), name)
}

// LinkInClear makes such a file be found in the data directory, too.
func (d KeyDir) LinkInClear(name string) error {
	file, link := d.InClear(name), d.Path(name)
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

// ReadKey reads a file that may be sealed.
func (d KeyDir) ReadKey(path string) ([]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return d.open(path, b)
}

func (d KeyDir) open(path string, content []byte) ([]byte, error) {
	secret, err := d.Seal.Open(content)
	switch {
	case err == nil:
		return secret, nil
	case errors.Is(err, sealkey.ErrSealed):
		return nil, fmt.Errorf("%s: %w: give --seal-key FILE (or CLUSTERD_SEAL_KEY, sealKey in %s) with the key of this node", path, err, d.Path("config.yaml"))
	case errors.Is(err, sealkey.ErrWrongKey):
		return nil, fmt.Errorf("%s: %w than those in %s: give --seal-key the file with the key that sealed it, or add that key to this file as a further line", path, err, d.Seal.File())
	}
	return nil, fmt.Errorf("%s: %w: `clusterd reset`, then join again, makes this machine a node with new keys", path, err)
}

// WriteKey replaces a file with something secret.
func (d KeyDir) WriteKey(path string, secret []byte) error {
	content, err := d.Seal.Seal(secret)
	if err != nil {
		return fmt.Errorf("seal %s: %w", path, err)
	}
	return WriteFile(path, content, 0o600)
}

// loose are the files with keys, in clear or sealed, that are beside pki/.
func (d Dir) loose() ([]string, error) {
	files, err := filepath.Glob(d.Successor("*"))
	if err != nil {
		return nil, err
	}
	if _, err := os.Lstat(d.Path(SealKeysFile)); err == nil {
		files = append(files, d.Path(SealKeysFile))
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return files, nil
}

// Reconcile makes the directory be as the sealing key says: what is in clear is sealed, and what
// a key sealed that is not the first any more is sealed with that. Each file is the old one or
// the new one after a crash, and both can be read with the sealing key; the next start continues. id is
// what was read. The lock of the directory is held.
func (d KeyDir) Reconcile(id *Identity, log *slog.Logger) error {
	if err := d.removeUnfinished(); err != nil {
		return err
	}
	if d.Seal == nil {
		return nil
	}
	if err := os.MkdirAll(d.Memory(), 0o700); err != nil {
		return fmt.Errorf("make the directory for keys in memory: %w", err)
	}
	if !inMemory(d.Memory()) {
		log.Warn("the administrator's kubeconfig and other keys that programs read in clear lie on a disk: mount a tmpfs there", "folder", d.Memory())
	}
	changed, err := d.sealAll(id)
	if err != nil {
		return fmt.Errorf("seal the key files: %w", err)
	}
	if len(changed) > 0 {
		log.Info("key files were sealed", "key", d.Seal.File(), "files", changed)
	}
	return nil
}

// sealAll seals what is not sealed with the first key, and returns the names of it.
func (d KeyDir) sealAll(id *Identity) (changed []string, err error) {
	entries, err := os.ReadDir(d.Path("pki"))
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if publicFile(e.Name()) {
			continue
		}
		b, err := os.ReadFile(d.Path("pki", e.Name()))
		if err != nil {
			return changed, err
		}
		if !d.Seal.Current(b) {
			changed = append(changed, filepath.Join("pki", e.Name()))
		}
	}
	if len(changed) > 0 {
		if err := d.ReplaceIdentity(id); err != nil {
			return nil, err
		}
	}
	files, err := d.loose()
	if err != nil {
		return changed, err
	}
	for _, path := range files {
		resealed, err := d.SealFile(path, nil)
		if err != nil {
			return changed, err
		}
		if resealed {
			changed = append(changed, filepath.Base(path))
		}
	}
	// What is made again, in memory.
	for _, path := range []string{d.Path(KubeconfigName), d.Path("front-proxy.key"), d.Path("front-proxy.crt"), d.Path("network", WireguardKey)} {
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
	return changed, durable.SyncDir(string(d.Dir))
}

// SealFile seals a file that is not sealed with the first key. checked, unless it is nil, is what it
// holds as far as the caller has checked: a file that has changed since is left alone, and so is
// one that changes while it is sealed.
func (d KeyDir) SealFile(path string, checked []byte) (bool, error) {
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
	if err != nil || d.Seal.Current(b) {
		return false, err
	}
	secret, err := d.open(path, b)
	if err != nil || checked != nil && !slices.Equal(secret, checked) {
		return false, err
	}
	content, err := d.Seal.Seal(secret)
	if err != nil {
		return false, fmt.Errorf("seal %s: %w", path, err)
	}
	is, err := os.Stat(path)
	if err != nil || !os.SameFile(was, is) || !was.ModTime().Equal(is.ModTime()) || was.Size() != is.Size() {
		return false, err
	}
	return true, WriteFile(path, content, 0o600)
}

// removeUnfinished removes what a crash left of files and directories with keys before they got
// their names.
func (d Dir) removeUnfinished() error {
	patterns := []string{newIdentity + "*", ".authority-*.pem.*", "." + SealKeysFile + ".*", "." + KubeconfigName + ".*", ".front-proxy.key.*", "network/." + WireguardKey + ".*"}
	for _, pattern := range patterns {
		left, err := filepath.Glob(d.Path(pattern))
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

// UnsealAll puts everything in clear again, as far as d's sealing key opens it. The lock is held.
func (d KeyDir) UnsealAll() error {
	id, err := d.ReadIdentity()
	if err != nil {
		return err
	}
	bare := KeyDir{Dir: d.Dir}
	if err := bare.ReplaceIdentity(id); err != nil {
		return err
	}
	files, err := d.loose()
	if err != nil {
		return err
	}
	for _, path := range files {
		secret, err := d.ReadKey(path)
		if err != nil {
			return err
		}
		if err := bare.WriteKey(path, secret); err != nil {
			return err
		}
	}
	return errors.Join(d.DropInClear(), durable.SyncDir(string(d.Dir)))
}

// DropInClear removes what is in memory, and the link to it.
func (d Dir) DropInClear() error {
	err := os.RemoveAll(d.Memory())
	if _, linked := os.Readlink(d.Path(KubeconfigName)); linked == nil {
		err = errors.Join(err, os.Remove(d.Path(KubeconfigName)))
	}
	return err
}

// inMemory reports whether a directory is in memory, by its file system.
func inMemory(dir string) bool {
	var s unix.Statfs_t
	if unix.Statfs(dir, &s) != nil {
		return false
	}
	return s.Type == unix.TMPFS_MAGIC || s.Type == unix.RAMFS_MAGIC
}

// FrontCert is where the certificate is by which aggregated APIs know this server.
func (d KeyDir) FrontCert() string { return d.InClear("front-proxy.crt") }

// FrontKey is where its key is.
func (d KeyDir) FrontKey() string { return d.InClear("front-proxy.key") }

// ReadFrontCert returns nil if there is no pair whose halves belong together.
func (d KeyDir) ReadFrontCert() (*x509.Certificate, error) {
	certPEM, err := os.ReadFile(d.FrontCert())
	if err == nil {
		var keyPEM []byte
		if keyPEM, err = os.ReadFile(d.FrontKey()); err == nil {
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
