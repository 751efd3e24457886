// Package nodedir is what a node has on disk that belongs to no room: its identity, its keys, and
// the lists that it starts by. It knows the names of these files and how they are written
// so that a crash leaves the old or the new ones, and encrypts those that hold keys if there is a
// sealing key. What the files mean is decided elsewhere; config.yaml is package main's.
package nodedir

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/member/gossipkey"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
)

// Dir is the directory that holds all of a node's state. This file alone
// knows the names in it that belong to no room:
//
//	lock              held by the running clusterd
//	config.yaml       Config
//	pki/              ca.crt node.crt node.key, ca-PURPOSE.crt of purposes with an
//	                  authority of their own, and a server's ca.key, ca-PURPOSE.key and
//	                  gossip.key, and gossip-ring.json once that has been changed;
//	                  its presence means: this machine is a member.
//	                  ca*.crt and ca*.key hold two authorities while the cluster
//	                  changes its authority, the one that signs first; trust is
//	                  the number of the cluster's last word on that, retired-seal.keys
//	                  what secrets may be sealed with since former authorities
//	authority-ID.pem  an authority that this server made and that is to follow
//	front-proxy.*     by what aggregated APIs know a server
//	servers.json      an agent's list of the servers, see member/servers
//	removed-servers.json   ids of removed servers, which this node refuses: an agent
//	                  always, a server until its store is open
//	peers.json        who the other members are, and where they were last seen
//	removed           the Removal of this node, once it has learned of it
//	recovery.json     a new epoch of the store that the next start begins
//	host-folders.json the directories outside of this one that the node has used
//	seal.keys         keys for secrets at rest that administrators made
//	admin.kubeconfig  for the person at this machine
//	store.epoch-N     the store as it was before a recovery; may be deleted
//	store.demoted     the store of a server that was demoted; may be deleted
//
// and the rooms' directories: store, podmon, images, pods, netns, logs, upgrade. Files
// with keys are sealed if there is a sealing key, see KeyDir.
type Dir string

// Path is a path in the directory.
func (d Dir) Path(elem ...string) string {
	return filepath.Join(append([]string{string(d)}, elem...)...)
}

// Kubeconfig is the path of the administrator's kubeconfig.
func (d Dir) Kubeconfig() string { return d.Path(KubeconfigName) }

// Identity is the content of pki/.
type Identity struct {
	Trust *pki.Trust
	Key   crypto.Signer
	Cert  *x509.Certificate
	Ring  gossipkey.Ring // a server's
	// RetiredSeals is a list of keys that follow from authorities of the past.
	RetiredSeals []byte
}

// Role is the role that the certificate names.
func (id *Identity) Role() pki.Role { return pki.NodeRole(id.Cert) }

// NodeID is the fingerprint of the node's key.
func (id *Identity) NodeID() string { return pki.Fingerprint(id.Key.Public()) }

// TLSCertificate is what the node shows, with the CA that signed it.
func (id *Identity) TLSCertificate() *tls.Certificate {
	signer := id.Trust.Signer()
	for _, ca := range id.Trust.Whole() {
		if ca.Signed(id.Cert) {
			signer = ca
		}
	}
	return TLSCertificate(signer, id.Cert, id.Key)
}

// TLSCertificate is a certificate with its key and the CA that signed it.
func TLSCertificate(signer *pki.CA, cert *x509.Certificate, key crypto.Signer) *tls.Certificate {
	return &tls.Certificate{Certificate: [][]byte{cert.Raw, signer.Cert.Raw}, PrivateKey: key, Leaf: cert}
}

// ErrInUse is returned when another clusterd runs on the data directory.
var ErrInUse = errors.New("another clusterd is running on this data folder")

// LockTimeout is how long a clusterd that was killed may take to be gone: the
// kernel frees its lock only when the last of its threads has ended.
const LockTimeout = 3 * time.Second

// Lock makes the directory and takes its lock, which the kernel gives back when
// the process ends.
func (d Dir) Lock() (*os.File, error) {
	if err := os.MkdirAll(string(d), 0o700); err != nil {
		return nil, fmt.Errorf("make the data folder: %w", err)
	}
	f, err := os.OpenFile(d.Path("lock"), os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the data folder: %w", err)
	}
	for deadline := time.Now().Add(LockTimeout); ; time.Sleep(10 * time.Millisecond) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if errors.Is(err, syscall.EWOULDBLOCK) && time.Now().Before(deadline) {
			continue
		}
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("%s: %w", d, ErrInUse)
		}
		return nil, fmt.Errorf("lock the data folder: %w", err)
	}
}

// Member reports whether this machine has an identity.
func (d Dir) Member() bool {
	_, err := os.Stat(d.Path("pki", "node.crt"))
	return err == nil
}

// WriteIdentity puts pki/ into place in one step: after a crash it is whole
// or absent.
func (d KeyDir) WriteIdentity(id *Identity) error {
	return d.putIdentity(id, func(tmp string) error { return durable.Rename(tmp, d.Path("pki")) })
}

// ReplaceIdentity puts another pki/ into the place of the one that is there in
// one step: after a crash it is the old or the new one, whole.
func (d KeyDir) ReplaceIdentity(id *Identity) error {
	return d.putIdentity(id, func(tmp string) error {
		return unix.Renameat2(unix.AT_FDCWD, tmp, unix.AT_FDCWD, d.Path("pki"), unix.RENAME_EXCHANGE)
	})
}

func (d KeyDir) putIdentity(id *Identity, place func(tmp string) error) error {
	tmp, err := os.MkdirTemp(string(d.Dir), newIdentity)
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp) // after an exchange it is the old one
	nodeKey, err := pki.EncodeKey(id.Key)
	if err != nil {
		return err
	}
	files := map[string][]byte{
		"ca.crt":   id.Trust.Bundle(),
		"node.crt": pki.EncodeCert(id.Cert),
		"node.key": nodeKey,
	}
	for p, bundle := range id.Trust.OwnBundles() {
		files[OwnFile(p, ".crt")] = bundle
	}
	if id.Trust.Number > 0 || id.Trust.Separated() {
		files["trust"] = strconv.AppendUint(nil, id.Trust.Number, 10)
	}
	if id.Trust.Separated() {
		files["trust"] = append(files["trust"], separateWords...)
	}
	if id.Role() == pki.Server {
		first, rest, err := id.Ring.Encode()
		if err != nil {
			return err
		}
		if files["gossip.key"] = first; rest != nil {
			files["gossip-ring.json"] = rest
		}
		if files["ca.key"], err = id.Trust.Keys(); err != nil {
			return err
		}
		own, err := id.Trust.OwnKeys()
		if err != nil {
			return err
		}
		for p, keys := range own {
			files[OwnFile(p, ".key")] = keys
		}
		if len(id.RetiredSeals) > 0 {
			files["retired-seal.keys"] = id.RetiredSeals
		}
	}
	for name, content := range files {
		path, write := filepath.Join(tmp, name), d.WriteKey
		if publicFile(name) {
			write = func(path string, content []byte) error { return WriteFile(path, content, 0o600) }
		}
		if err := write(path, content); err != nil {
			return err
		}
	}
	if err := place(tmp); err != nil {
		return fmt.Errorf("write the identity: %w", err)
	}
	return durable.SyncDir(string(d.Dir))
}

// WriteNodeCert replaces the node's certificate after a renewal.
func (d Dir) WriteNodeCert(cert *x509.Certificate) error {
	return WriteFile(d.Path("pki", "node.crt"), pki.EncodeCert(cert), 0o600)
}

// ReadNodeCert reads the node's certificate alone.
func (d Dir) ReadNodeCert() (*x509.Certificate, error) {
	b, err := os.ReadFile(d.Path("pki", "node.crt"))
	if err != nil {
		return nil, err
	}
	return pki.ParseCert(b)
}

// ReadIdentity reads pki/ and checks that it fits together.
func (d KeyDir) ReadIdentity() (*Identity, error) {
	read := func(name string) ([]byte, error) { return d.ReadKey(d.Path("pki", name)) }
	caCert, err := read("ca.crt")
	if err != nil {
		return nil, fmt.Errorf("read the identity: %w", err)
	}
	nodeCert, err := read("node.crt")
	if err != nil {
		return nil, fmt.Errorf("read the identity: %w", err)
	}
	nodeKey, err := read("node.key")
	if err != nil {
		return nil, fmt.Errorf("read the identity: %w", err)
	}
	id := &Identity{}
	number, err := d.readTrustNumber()
	if err != nil {
		return nil, err
	}
	caKey, err := read("ca.key")
	switch {
	case errors.Is(err, fs.ErrNotExist): // an agent's
		id.Trust, err = pki.ParseTrust(number, caCert, nil)
	case err == nil:
		if id.Trust, err = pki.ParseTrust(number, caCert, caKey); err == nil {
			id.Ring, err = d.readGossipRing()
		}
		if err == nil {
			if id.RetiredSeals, err = read("retired-seal.keys"); errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
		}
	}
	if err == nil {
		id.Trust, err = d.readOwn(id.Trust)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.Path("pki"), err)
	}
	if id.Cert, err = pki.ParseCert(nodeCert); err != nil {
		return nil, fmt.Errorf("%s: %w", d.Path("pki", "node.crt"), err)
	}
	if id.Key, err = pki.ParseKey(nodeKey); err != nil {
		return nil, fmt.Errorf("%s: %w", d.Path("pki", "node.key"), err)
	}
	if pki.Fingerprint(id.Cert.PublicKey) != id.NodeID() {
		return nil, fmt.Errorf("%s: node.crt and node.key do not belong together", d.Path("pki"))
	}
	return id, nil
}

// OwnFile is the name in pki/ of the authorities that a purpose has of its own, or of their keys.
func OwnFile(p pki.Purpose, ext string) string { return "ca-" + string(p) + ext }

// separateWords follow the number in pki/trust where purposes have authorities of their own. Versions
// that know one authority cannot read the number then, and end with an error that shows these words.
const separateWords = " with an authority for each purpose: this needs a later clusterd"

// readOwn adds what purposes have of their own.
func (d KeyDir) readOwn(t *pki.Trust) (*pki.Trust, error) {
	bundles, keys := map[pki.Purpose][]byte{}, map[pki.Purpose][]byte{}
	files, err := filepath.Glob(d.Path("pki", OwnFile("*", ".crt")))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		p := pki.Purpose(strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), "ca-"), ".crt"))
		if bundles[p], err = os.ReadFile(file); err != nil {
			return nil, err
		}
		if !t.Signer().HasKey() {
			continue
		}
		if keys[p], err = d.ReadKey(d.Path("pki", OwnFile(p, ".key"))); err != nil {
			return nil, err
		}
	}
	return t.WithOwn(bundles, keys)
}

func (d KeyDir) readGossipRing() (gossipkey.Ring, error) {
	first, err := d.ReadKey(d.Path("pki", "gossip.key"))
	if err != nil {
		return gossipkey.Ring{}, err
	}
	rest, err := d.ReadKey(d.Path("pki", "gossip-ring.json"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return gossipkey.Ring{}, err
	}
	return gossipkey.Parse(first, rest)
}

// readTrustNumber is 0 for a node whose cluster never changed its authority.
func (d Dir) readTrustNumber() (uint64, error) {
	b, err := os.ReadFile(d.Path("pki", "trust"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the identity: %w", err)
	}
	word, _, _ := strings.Cut(string(b), " ")
	number, err := strconv.ParseUint(strings.TrimSpace(word), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", d.Path("pki", "trust"), err)
	}
	return number, nil
}

// MarkRemoved records that this machine is not a member any more: once the others
// refuse it, it could not find out again.
func (d Dir) MarkRemoved(r join.Removal) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return WriteFile(d.Path("removed"), append(b, '\n'), 0o600)
}

// Removed returns what MarkRemoved noted; nil: nothing. A note that cannot be
// read is one.
func (d Dir) Removed() *join.Removal {
	b, err := os.ReadFile(d.Path("removed"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var r join.Removal
	if err != nil || json.Unmarshal(b, &r) != nil {
		return &join.Removal{}
	}
	return &r
}

// SeenPeer is another member as this node last saw it.
type SeenPeer struct {
	ID   string         `json:"id,omitempty"`
	Name string         `json:"name,omitempty"`
	Addr netip.AddrPort `json:"addr"`
}

// ReadPeers returns where other members were last seen; none when the file is
// missing or unreadable, since gossip finds them again through any one.
func (d Dir) ReadPeers() []SeenPeer {
	b, err := os.ReadFile(d.Path("peers.json"))
	if err != nil {
		return nil
	}
	var peers []SeenPeer
	if json.Unmarshal(b, &peers) == nil {
		return peers
	}
	var addrs []netip.AddrPort // as it was written first
	if json.Unmarshal(b, &addrs) != nil {
		return nil
	}
	return unnamed(addrs)
}

// PeerAddrs are the addresses of ReadPeers.
func (d Dir) PeerAddrs() []netip.AddrPort {
	var addrs []netip.AddrPort
	for _, p := range d.ReadPeers() {
		addrs = append(addrs, p.Addr)
	}
	return addrs
}

// ServerPeers are the servers of a join's answer.
func ServerPeers(servers []join.ServerAddr) []SeenPeer {
	var peers []SeenPeer
	for _, s := range servers {
		peers = append(peers, SeenPeer{ID: s.ID, Name: s.Name, Addr: s.Addr})
	}
	return peers
}

// ReadServers reads an agent's list of the servers, an empty one where there is none.
func (d Dir) ReadServers() ([]byte, error) {
	b, err := os.ReadFile(d.Path("servers.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return []byte("[]"), nil
	}
	return b, err
}

// WriteServers replaces that list.
func (d Dir) WriteServers(b []byte) error { return WriteFile(d.Path("servers.json"), b, 0o600) }

// ReadRemovedServers is empty when none was removed.
func (d Dir) ReadRemovedServers() ([]byte, error) {
	b, err := os.ReadFile(d.Path("removed-servers.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return b, err
}

// WriteRemovedServers replaces that list.
func (d Dir) WriteRemovedServers(b []byte) error {
	return WriteFile(d.Path("removed-servers.json"), b, 0o600)
}

// FormerServers are the ids in that list.
func (d Dir) FormerServers() (map[string]bool, error) {
	b, err := d.ReadRemovedServers()
	if err != nil || len(b) == 0 {
		return nil, err
	}
	var ids []string
	if err := json.Unmarshal(b, &ids); err != nil {
		return nil, fmt.Errorf("%s is no list of ids: %w", d.Path("removed-servers.json"), err)
	}
	former := map[string]bool{}
	for _, id := range ids {
		former[id] = true
	}
	return former, nil
}

// WriteFormerServers replaces the list of ids of removed servers.
func (d Dir) WriteFormerServers(ids []string) error {
	b, err := json.Marshal(ids)
	if err != nil {
		return err
	}
	return d.WriteRemovedServers(b)
}

// unnamed are peers of which only the addresses are known.
func unnamed(addrs []netip.AddrPort) []SeenPeer {
	var peers []SeenPeer
	for _, a := range addrs {
		peers = append(peers, SeenPeer{Addr: a})
	}
	return peers
}

// WritePeers replaces what ReadPeers returns.
func (d Dir) WritePeers(peers []SeenPeer) error {
	b, err := json.Marshal(peers)
	if err != nil {
		return err
	}
	return WriteFile(d.Path("peers.json"), b, 0o600)
}

// WriteFile replaces a file so that after a crash it is old or new, whole.
func WriteFile(path string, content []byte, mode fs.FileMode) error {
	if err := durable.ReplaceFile(path, content, mode); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// Role is the role of the member whose data directory it is.
func (d Dir) Role() (pki.Role, error) {
	cert, err := d.ReadNodeCert()
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(d.Path("pki", "ca.key")); err == nil {
		return pki.Server, nil // a certificate that is older than roles does not name it
	}
	return pki.NodeRole(cert), nil
}

// Held reports whether a clusterd runs on the data directory.
func (d Dir) Held() bool {
	f, err := os.Open(d.Path("lock"))
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }()
	return errors.Is(syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB), syscall.EWOULDBLOCK)
}

// Volumes are the names of the volumes for claims that have their data in the directory.
func (d Dir) Volumes() (names []string) {
	list, err := os.ReadDir(d.Path("claims"))
	if err != nil {
		return nil // there are none, or reset itself says what is wrong
	}
	for _, e := range list {
		if e.IsDir() && strings.HasPrefix(e.Name(), "pvc-") {
			names = append(names, e.Name())
		}
	}
	return names
}

// Exists reports whether there is such a directory.
func (d Dir) Exists() bool {
	_, err := os.Stat(string(d))
	return err == nil
}

// TakeKeys makes a server's identity of what it got as a member.
func (id *Identity) TakeKeys(keys *join.Keys) (err error) {
	if id.Ring, err = gossipkey.RingIn(keys); err != nil {
		return err
	}
	id.RetiredSeals = keys.SealKeys
	id.Trust, err = keys.Whole(id.Trust)
	return err
}
