package main

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

// dataDir is the directory that holds all of a node's state. This file alone
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
//	host-folders.json the folders outside of this one that the node has used
//	seal.keys         keys for secrets at rest that administrators made
//	admin.kubeconfig  for the person at this machine
//	store.epoch-N     the store as it was before a recovery; may be deleted
//	store.demoted     the store of a server that was demoted; may be deleted
//
// and the rooms' directories: store, podmon, images, pods, netns, logs, upgrade. Files
// with keys are sealed if there is a sealing key, see keyDir.
type dataDir string

func (d dataDir) path(elem ...string) string {
	return filepath.Join(append([]string{string(d)}, elem...)...)
}

func (d dataDir) kubeconfig() string { return d.path(kubeconfigName) }

// identity is the content of pki/.
type identity struct {
	trust *pki.Trust
	key   crypto.Signer
	cert  *x509.Certificate
	ring  gossipkey.Ring // a server's
	// retiredSeals is a list of keys that follow from authorities of the past.
	retiredSeals []byte
}

func (id *identity) role() pki.Role { return pki.NodeRole(id.cert) }

func (id *identity) nodeID() string { return pki.Fingerprint(id.key.Public()) }

func (id *identity) tlsCertificate() *tls.Certificate {
	signer := id.trust.Signer()
	for _, ca := range id.trust.Whole() {
		if ca.Signed(id.cert) {
			signer = ca
		}
	}
	return tlsCertificate(signer, id.cert, id.key)
}

func tlsCertificate(signer *pki.CA, cert *x509.Certificate, key crypto.Signer) *tls.Certificate {
	return &tls.Certificate{Certificate: [][]byte{cert.Raw, signer.Cert.Raw}, PrivateKey: key, Leaf: cert}
}

// errInUse is returned when another clusterd runs on the data directory.
var errInUse = errors.New("another clusterd is running on this data folder")

// lockTimeout is how long a clusterd that was killed may take to be gone: the
// kernel frees its lock only when the last of its threads has ended.
const lockTimeout = 3 * time.Second

// lock makes the directory and takes its lock, which the kernel gives back when
// the process ends.
func (d dataDir) lock() (*os.File, error) {
	if err := os.MkdirAll(string(d), 0o700); err != nil {
		return nil, fmt.Errorf("make the data folder: %w", err)
	}
	f, err := os.OpenFile(d.path("lock"), os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the data folder: %w", err)
	}
	for deadline := time.Now().Add(lockTimeout); ; time.Sleep(10 * time.Millisecond) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if errors.Is(err, syscall.EWOULDBLOCK) && time.Now().Before(deadline) {
			continue
		}
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("%s: %w", d, errInUse)
		}
		return nil, fmt.Errorf("lock the data folder: %w", err)
	}
}

// member reports whether this machine has an identity.
func (d dataDir) member() bool {
	_, err := os.Stat(d.path("pki", "node.crt"))
	return err == nil
}

// writeIdentity puts pki/ into place in one step: after a crash it is whole
// or absent.
func (d keyDir) writeIdentity(id *identity) error {
	return d.putIdentity(id, func(tmp string) error { return durable.Rename(tmp, d.path("pki")) })
}

// replaceIdentity puts another pki/ into the place of the one that is there in
// one step: after a crash it is the old or the new one, whole.
func (d keyDir) replaceIdentity(id *identity) error {
	return d.putIdentity(id, func(tmp string) error {
		return unix.Renameat2(unix.AT_FDCWD, tmp, unix.AT_FDCWD, d.path("pki"), unix.RENAME_EXCHANGE)
	})
}

func (d keyDir) putIdentity(id *identity, place func(tmp string) error) error {
	tmp, err := os.MkdirTemp(string(d.dataDir), newIdentity)
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp) // after an exchange it is the old one
	nodeKey, err := pki.EncodeKey(id.key)
	if err != nil {
		return err
	}
	files := map[string][]byte{
		"ca.crt":   id.trust.Bundle(),
		"node.crt": pki.EncodeCert(id.cert),
		"node.key": nodeKey,
	}
	for p, bundle := range id.trust.OwnBundles() {
		files[ownFile(p, ".crt")] = bundle
	}
	if id.trust.Number > 0 || id.trust.Separated() {
		files["trust"] = strconv.AppendUint(nil, id.trust.Number, 10)
	}
	if id.trust.Separated() {
		files["trust"] = append(files["trust"], separateWords...)
	}
	if id.role() == pki.Server {
		first, rest, err := id.ring.Encode()
		if err != nil {
			return err
		}
		if files["gossip.key"] = first; rest != nil {
			files["gossip-ring.json"] = rest
		}
		if files["ca.key"], err = id.trust.Keys(); err != nil {
			return err
		}
		own, err := id.trust.OwnKeys()
		if err != nil {
			return err
		}
		for p, keys := range own {
			files[ownFile(p, ".key")] = keys
		}
		if len(id.retiredSeals) > 0 {
			files["retired-seal.keys"] = id.retiredSeals
		}
	}
	for name, content := range files {
		path, write := filepath.Join(tmp, name), d.writeKey
		if publicFile(name) {
			write = func(path string, content []byte) error { return writeFile(path, content, 0o600) }
		}
		if err := write(path, content); err != nil {
			return err
		}
	}
	if err := place(tmp); err != nil {
		return fmt.Errorf("write the identity: %w", err)
	}
	return durable.SyncDir(string(d.dataDir))
}

// writeNodeCert replaces the node's certificate after a renewal.
func (d dataDir) writeNodeCert(cert *x509.Certificate) error {
	return writeFile(d.path("pki", "node.crt"), pki.EncodeCert(cert), 0o600)
}

func (d dataDir) readNodeCert() (*x509.Certificate, error) {
	b, err := os.ReadFile(d.path("pki", "node.crt"))
	if err != nil {
		return nil, err
	}
	return pki.ParseCert(b)
}

// readIdentity reads pki/ and checks that it fits together.
func (d keyDir) readIdentity() (*identity, error) {
	read := func(name string) ([]byte, error) { return d.readKey(d.path("pki", name)) }
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
	id := &identity{}
	number, err := d.readTrustNumber()
	if err != nil {
		return nil, err
	}
	caKey, err := read("ca.key")
	switch {
	case errors.Is(err, fs.ErrNotExist): // an agent's
		id.trust, err = pki.ParseTrust(number, caCert, nil)
	case err == nil:
		if id.trust, err = pki.ParseTrust(number, caCert, caKey); err == nil {
			id.ring, err = d.readGossipRing()
		}
		if err == nil {
			if id.retiredSeals, err = read("retired-seal.keys"); errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
		}
	}
	if err == nil {
		id.trust, err = d.readOwn(id.trust)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.path("pki"), err)
	}
	if id.cert, err = pki.ParseCert(nodeCert); err != nil {
		return nil, fmt.Errorf("%s: %w", d.path("pki", "node.crt"), err)
	}
	if id.key, err = pki.ParseKey(nodeKey); err != nil {
		return nil, fmt.Errorf("%s: %w", d.path("pki", "node.key"), err)
	}
	if pki.Fingerprint(id.cert.PublicKey) != id.nodeID() {
		return nil, fmt.Errorf("%s: node.crt and node.key do not belong together", d.path("pki"))
	}
	return id, nil
}

// ownFile is the name in pki/ of the authorities that a purpose has of its own, or of their keys.
func ownFile(p pki.Purpose, ext string) string { return "ca-" + string(p) + ext }

// separateWords follow the number in pki/trust where purposes have authorities of their own. Versions
// that know one authority cannot read the number then, and end with an error that shows these words.
const separateWords = " with an authority for each purpose: this needs a later clusterd"

// readOwn adds what purposes have of their own.
func (d keyDir) readOwn(t *pki.Trust) (*pki.Trust, error) {
	bundles, keys := map[pki.Purpose][]byte{}, map[pki.Purpose][]byte{}
	files, err := filepath.Glob(d.path("pki", ownFile("*", ".crt")))
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
		if keys[p], err = d.readKey(d.path("pki", ownFile(p, ".key"))); err != nil {
			return nil, err
		}
	}
	return t.WithOwn(bundles, keys)
}

func (d keyDir) readGossipRing() (gossipkey.Ring, error) {
	first, err := d.readKey(d.path("pki", "gossip.key"))
	if err != nil {
		return gossipkey.Ring{}, err
	}
	rest, err := d.readKey(d.path("pki", "gossip-ring.json"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return gossipkey.Ring{}, err
	}
	return gossipkey.Parse(first, rest)
}

// readTrustNumber is 0 for a node whose cluster never changed its authority.
func (d dataDir) readTrustNumber() (uint64, error) {
	b, err := os.ReadFile(d.path("pki", "trust"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the identity: %w", err)
	}
	word, _, _ := strings.Cut(string(b), " ")
	number, err := strconv.ParseUint(strings.TrimSpace(word), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", d.path("pki", "trust"), err)
	}
	return number, nil
}

// markRemoved records that this machine is not a member any more: once the others
// refuse it, it could not find out again.
func (d dataDir) markRemoved(r join.Removal) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return writeFile(d.path("removed"), append(b, '\n'), 0o600)
}

// removed returns what markRemoved noted; nil: nothing. A note that cannot be
// read is one.
func (d dataDir) removed() *join.Removal {
	b, err := os.ReadFile(d.path("removed"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var r join.Removal
	if err != nil || json.Unmarshal(b, &r) != nil {
		return &join.Removal{}
	}
	return &r
}

// seenPeer is another member as this node last saw it.
type seenPeer struct {
	ID   string         `json:"id,omitempty"`
	Name string         `json:"name,omitempty"`
	Addr netip.AddrPort `json:"addr"`
}

// readPeers returns where other members were last seen; none when the file is
// missing or unreadable, since gossip finds them again through any one.
func (d dataDir) readPeers() []seenPeer {
	b, err := os.ReadFile(d.path("peers.json"))
	if err != nil {
		return nil
	}
	var peers []seenPeer
	if json.Unmarshal(b, &peers) == nil {
		return peers
	}
	var addrs []netip.AddrPort // as it was written first
	if json.Unmarshal(b, &addrs) != nil {
		return nil
	}
	return unnamed(addrs)
}

func (d dataDir) peerAddrs() []netip.AddrPort {
	var addrs []netip.AddrPort
	for _, p := range d.readPeers() {
		addrs = append(addrs, p.Addr)
	}
	return addrs
}

// serverPeers are the servers of a join's answer.
func serverPeers(servers []join.ServerAddr) []seenPeer {
	var peers []seenPeer
	for _, s := range servers {
		peers = append(peers, seenPeer{ID: s.ID, Name: s.Name, Addr: s.Addr})
	}
	return peers
}

func (d dataDir) readServers() ([]byte, error) {
	b, err := os.ReadFile(d.path("servers.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return []byte("[]"), nil
	}
	return b, err
}

func (d dataDir) writeServers(b []byte) error { return writeFile(d.path("servers.json"), b, 0o600) }

// readRemovedServers is empty when none was removed.
func (d dataDir) readRemovedServers() ([]byte, error) {
	b, err := os.ReadFile(d.path("removed-servers.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return b, err
}

func (d dataDir) writeRemovedServers(b []byte) error {
	return writeFile(d.path("removed-servers.json"), b, 0o600)
}

// formerServers are the ids in that list.
func (d dataDir) formerServers() (map[string]bool, error) {
	b, err := d.readRemovedServers()
	if err != nil || len(b) == 0 {
		return nil, err
	}
	var ids []string
	if err := json.Unmarshal(b, &ids); err != nil {
		return nil, fmt.Errorf("%s is no list of ids: %w", d.path("removed-servers.json"), err)
	}
	former := map[string]bool{}
	for _, id := range ids {
		former[id] = true
	}
	return former, nil
}

func (d dataDir) writeFormerServers(ids []string) error {
	b, err := json.Marshal(ids)
	if err != nil {
		return err
	}
	return d.writeRemovedServers(b)
}

// unnamed are peers of which only the addresses are known.
func unnamed(addrs []netip.AddrPort) []seenPeer {
	var peers []seenPeer
	for _, a := range addrs {
		peers = append(peers, seenPeer{Addr: a})
	}
	return peers
}

func (d dataDir) writePeers(peers []seenPeer) error {
	b, err := json.Marshal(peers)
	if err != nil {
		return err
	}
	return writeFile(d.path("peers.json"), b, 0o600)
}

// writeFile replaces a file so that after a crash it is old or new, whole.
func writeFile(path string, content []byte, mode fs.FileMode) error {
	if err := durable.ReplaceFile(path, content, mode); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// role is the role of the member whose data directory it is.
func (d dataDir) role() (pki.Role, error) {
	cert, err := d.readNodeCert()
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(d.path("pki", "ca.key")); err == nil {
		return pki.Server, nil // a certificate that is older than roles does not name it
	}
	return pki.NodeRole(cert), nil
}

// held reports whether a clusterd runs on the data directory.
func (d dataDir) held() bool {
	f, err := os.Open(d.path("lock"))
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }()
	return errors.Is(syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB), syscall.EWOULDBLOCK)
}

// volumes are the names of the volumes for claims that have their data in the directory.
func (d dataDir) volumes() (names []string) {
	list, err := os.ReadDir(d.path("claims"))
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

func (d dataDir) exists() bool {
	_, err := os.Stat(string(d))
	return err == nil
}

// takeKeys makes a server's identity of what it got as a member.
func (id *identity) takeKeys(keys *join.Keys) (err error) {
	if id.ring, err = gossipkey.RingIn(keys); err != nil {
		return err
	}
	id.retiredSeals = keys.SealKeys
	id.trust, err = keys.Whole(id.trust)
	return err
}
