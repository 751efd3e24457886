package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/cmd/clusterd/doctor"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/member/gossipkey"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/rights"
	"github.com/clusterd/clusterd/member/sealkey"
)

// sealedNode is a server's data directory, with all files that hold keys, and its secrets.
type sealedNode struct {
	t       *testing.T
	cfg     Config
	id      *nodedir.Identity
	seals   []byte // seal.keys
	made    *pki.CA
	secrets map[string][]byte // what must not be found on its disk, once it is sealed
}

func newSealedNode(t *testing.T) *sealedNode {
	t.Helper()
	was := nodedir.MemoryDir
	nodedir.MemoryDir = t.TempDir()
	t.Cleanup(func() { nodedir.MemoryDir = was })
	n := &sealedNode{t: t, cfg: defaultConfig()}
	n.cfg.Data, n.cfg.Name, n.cfg.Advertise = t.TempDir(), "n1", "192.0.2.7"
	now := time.Now()
	ca, err := pki.NewCA("c", now)
	if err != nil {
		t.Fatal(err)
	}
	trust, err := pki.NewTrust(3, ca).Separate(now)
	if err != nil {
		t.Fatal(err)
	}
	n.id = &nodedir.Identity{Trust: trust, Ring: gossipkey.Ring{Number: 2, Keys: [][]byte{gossipkey.New(), gossipkey.New()}}}
	if n.id.Key, err = pki.NewKey(); err != nil {
		t.Fatal(err)
	}
	if n.id.Cert, err = ca.IssueServer(n.id.Key.Public(), "n1", []netip.Addr{netip.MustParseAddr("192.0.2.7")}, now); err != nil {
		t.Fatal(err)
	}
	seal, err := nodedir.SealKeyOf(ca)
	if err != nil {
		t.Fatal(err)
	}
	seal.ID = "before"
	n.id.RetiredSeals = nodedir.SealLine(seal)
	seal.ID = "own"
	n.seals = nodedir.SealLine(seal)
	if n.made, err = ca.NewSuccessor(now); err != nil {
		t.Fatal(err)
	}
	d := n.dir()
	err = errors.Join(d.WriteIdentity(n.id), writeConfig(d.Dir, n.cfg), d.WriteKey(d.Path(nodedir.SealKeysFile), n.seals), d.WriteSuccessor(n.made),
		writeKubeconfig(d, n.id.Trust, "https://192.0.2.7:6443", "c", &rights.Rights{}),
		os.Mkdir(d.Path("network"), 0o700), os.WriteFile(d.Path("network", nodedir.WireguardKey), []byte("{}"), 0o600),
		os.WriteFile(d.FrontKey(), []byte("k"), 0o600), os.WriteFile(d.FrontCert(), []byte("c"), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	nodeKey, err := pki.EncodeKey(n.id.Key)
	if err != nil {
		t.Fatal(err)
	}
	caKeys, err := n.id.Trust.Keys()
	if err != nil {
		t.Fatal(err)
	}
	first, rest, err := n.id.Ring.Encode()
	if err != nil {
		t.Fatal(err)
	}
	madeKey, err := n.made.EncodeCAKey()
	if err != nil {
		t.Fatal(err)
	}
	n.secrets = map[string][]byte{"node.key": nodeKey, "ca.key": caKeys, "gossip.key": first, "gossip-ring.json": rest, "seal keys": n.seals[len("own "):], "successor": madeKey}
	own, err := trust.OwnKeys()
	if err != nil {
		t.Fatal(err)
	}
	for p, key := range own {
		n.secrets[nodedir.OwnFile(p, ".key")] = key
	}
	return n
}

func (n *sealedNode) dir() nodedir.KeyDir {
	n.t.Helper()
	d, err := n.cfg.keyDir()
	if err != nil {
		n.t.Fatal(err)
	}
	return d
}

// start is what a start of the node does with the directory.
func (n *sealedNode) start() error {
	d, err := n.cfg.keyDir()
	if err != nil {
		return err
	}
	id, err := d.ReadIdentity()
	if err != nil {
		return err
	}
	return d.Reconcile(id, slog.New(slog.DiscardHandler))
}

// reads checks that all that was written is read.
func (n *sealedNode) reads() {
	n.t.Helper()
	d := n.dir()
	id, err := d.ReadIdentity()
	if err != nil {
		n.t.Fatal(err)
	}
	if id.NodeID() != n.id.NodeID() || id.Trust.Number != 3 || !id.Trust.Signer().HasKey() || id.Trust.Signer().ID() != n.id.Trust.Signer().ID() ||
		!bytes.Equal(id.RetiredSeals, n.id.RetiredSeals) || id.Ring.Number != 2 || len(id.Ring.Keys) != 2 || !bytes.Equal(id.Ring.Keys[1], n.id.Ring.Keys[1]) {
		n.t.Errorf("another identity was read: %+v", id)
	}
	for _, p := range pki.OwnPurposes {
		if got := id.Trust.For(p).Signer(); !id.Trust.Owns(p) || !got.HasKey() || got.ID() != n.id.Trust.For(p).Signer().ID() {
			n.t.Errorf("another authority for %s was read", p)
		}
	}
	if b, err := d.ReadKey(d.Path(nodedir.SealKeysFile)); err != nil || !bytes.Equal(b, n.seals) {
		n.t.Errorf("%s: %q, %v", nodedir.SealKeysFile, b, err)
	}
	if ca, err := d.ReadSuccessor(n.made.ID()); err != nil || ca == nil || !ca.HasKey() {
		n.t.Errorf("the successor: %v, %v", ca, err)
	}
}

// found are the secrets that lie in clear anywhere in the directory.
func (n *sealedNode) found() (names []string) {
	n.t.Helper()
	err := filepath.WalkDir(n.cfg.Data, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		for name, secret := range n.secrets {
			if bytes.Contains(b, bytes.TrimSpace(secret)) {
				names = append(names, name+" in "+path)
			}
		}
		if bytes.Contains(b, []byte("PRIVATE KEY")) || bytes.Contains(b, []byte("client-key-data")) {
			names = append(names, "a private key in "+path)
		}
		return err
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return names
}

// sealWith writes a sealing key's file.
func (n *sealedNode) sealWith(name string, keys ...[]byte) {
	n.t.Helper()
	file := filepath.Join(n.t.TempDir(), name)
	if err := os.WriteFile(file, bytes.Join(keys, nil), 0o600); err != nil {
		n.t.Fatal(err)
	}
	n.cfg.SealKey = file
}

func newSealingKey(t *testing.T) []byte {
	t.Helper()
	b, err := sealkey.New()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestSealExistingNode(t *testing.T) {
	n := newSealedNode(t)
	if len(n.found()) < len(n.secrets) {
		t.Fatalf("the test does not find what lies in clear: %q", n.found())
	}
	// What crashes have left.
	for _, name := range []string{"pki.new-1/node.key", ".authority-x.pem.1", ".seal.keys.1", ".admin.kubeconfig.1", ".front-proxy.key.1", "network/.wireguard.json.1"} {
		path := filepath.Join(n.cfg.Data, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, n.secrets["node.key"], 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	key := newSealingKey(t)
	n.sealWith("k", key)
	if err := n.start(); err != nil {
		t.Fatal(err)
	}
	n.reads()
	if found := n.found(); len(found) > 0 {
		t.Errorf("after sealing: %q", found)
	}
	for _, name := range []string{"network/" + nodedir.WireguardKey, "front-proxy.key"} {
		if _, err := os.Lstat(filepath.Join(n.cfg.Data, name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
	}

	// The administrator's kubeconfig is made in memory and found where it was.
	d := n.dir()
	for range 2 {
		if err := writeKubeconfig(d, n.id.Trust, "https://192.0.2.7:6443", "c", &rights.Rights{}); err != nil {
			t.Fatal(err)
		}
	}
	if b, err := os.ReadFile(d.Kubeconfig()); err != nil || !bytes.Contains(b, []byte("client-key-data")) {
		t.Errorf("the kubeconfig: %v", err)
	}
	if found := n.found(); len(found) > 0 {
		t.Errorf("with a kubeconfig: %q", found)
	}

	// What is written later is sealed as well: renewals, exchanges, another ring.
	id, err := d.ReadIdentity()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(d.ReplaceIdentity(id), d.WriteSuccessor(n.made), os.WriteFile(d.Path(nodedir.SealKeysFile), n.seals, 0o600)); err != nil {
		t.Fatal(err)
	}
	m := &Main{cfg: n.cfg, dir: d, id: id}
	if keys, err := m.sealKeys(); err != nil || len(keys) != 3 {
		t.Errorf("keys for secrets at rest: %d, %v", len(keys), err)
	}
	if err := m.sealSettled(&sealWatch{}, time.Now().Add(sealLook)); err != nil {
		t.Error(err)
	}
	if found := n.found(); len(found) > 0 {
		t.Errorf("after new keys: %q", found)
	}

	for _, bad := range []string{"", "# nothing\n", "key\n", "key " + "AAAA\n"} {
		if err := d.WriteSealKeys(strings.NewReader(bad), true); err == nil {
			t.Errorf("written: %q", bad)
		}
	}
	if err := d.WriteSealKeys(bytes.NewReader(n.seals), false); err != nil {
		t.Error(err)
	}
	n.reads()

	// A start changes nothing that is right.
	before, err := os.ReadFile(d.Path("pki", "ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	if err := n.start(); err != nil {
		t.Fatal(err)
	}
	if after, err := os.ReadFile(d.Path("pki", "ca.key")); err != nil || !bytes.Equal(before, after) {
		t.Errorf("it was sealed again: %v", err)
	}

	// Without the key, and with another one: an error that names file and cure, and nothing is changed.
	sealed := n.cfg.SealKey
	for _, c := range []struct {
		set  func()
		want []string
	}{
		{func() { n.cfg.SealKey = "" }, []string{d.Path("pki", "node.key"), "--seal-key FILE"}},
		{func() { n.sealWith("other", newSealingKey(t)) }, []string{d.Path("pki", "node.key"), "sealed with another key", "--seal-key"}},
		{func() { n.cfg.SealKey = filepath.Join(t.TempDir(), "gone") }, []string{"--seal-key", "no such file"}},
	} {
		c.set()
		err := n.start()
		for _, want := range c.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("--seal-key %q: %v, want it to say %q", n.cfg.SealKey, err, want)
			}
		}
		if f := examineKeys(n.cfg); len(f) != 1 || f[0].Level != doctor.Problem || f[0].Fix == "" {
			t.Errorf("--seal-key %q: the doctor says %+v", n.cfg.SealKey, f)
		}
	}
	n.cfg.SealKey = sealed
	n.reads()

	// Another sealing key.
	second := newSealingKey(t)
	n.sealWith("both", second, key)
	if err := n.start(); err != nil {
		t.Fatal(err)
	}
	n.sealWith("second", second)
	n.reads()
	if found := n.found(); len(found) > 0 {
		t.Errorf("with another key: %q", found)
	}
	if f := examineKeys(n.cfg); len(f) != 1 || f[0].Level != doctor.OK || !strings.Contains(f[0].Says, n.cfg.SealKey) {
		t.Errorf("the doctor says %+v", f)
	}

	// In clear again.
	if err := writeConfig(n.dir().Dir, n.cfg); err != nil {
		t.Fatal(err)
	}
	if err := unseal(n.dir(), io.Discard); err != nil {
		t.Fatal(err)
	}
	n.cfg.SealKey = ""
	n.reads()
	if len(n.found()) < len(n.secrets) {
		t.Errorf("unsealed: %q", n.found())
	}
	if _, err := os.Lstat(d.Kubeconfig()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the link to the kubeconfig: %v", err)
	}
	if b, err := os.ReadFile(configPath(n.cfg.Data)); err != nil || bytes.Contains(b, []byte("sealKey")) {
		t.Errorf("config.yaml: %s %v", b, err)
	}
	if err := n.start(); err != nil {
		t.Error(err)
	}
}

// TestSealingCrashes: whatever files are in their old and whatever in their new form, the
// sealing key opens the directory, and the next start ends what was begun.
func TestSealingCrashes(t *testing.T) {
	n := newSealedNode(t)
	clear := map[string][]byte{}
	sealed := map[string][]byte{}
	files := []string{"pki/node.key", "pki/ca.key", "pki/ca-client.key", "pki/gossip.key", "pki/gossip-ring.json", "pki/retired-seal.keys", nodedir.SealKeysFile, filepath.Base(n.dir().Successor(n.made.ID()))}
	read := func(into map[string][]byte) {
		for _, name := range files {
			b, err := os.ReadFile(filepath.Join(n.cfg.Data, name))
			if err != nil {
				t.Fatal(err)
			}
			into[name] = b
		}
	}
	read(clear)
	first := newSealingKey(t)
	n.sealWith("k", first)
	if err := n.start(); err != nil {
		t.Fatal(err)
	}
	read(sealed)
	with := n.cfg.SealKey
	for state := range 1 << len(files) {
		for i, name := range files {
			from := clear
			if state&(1<<i) != 0 {
				from = sealed
			}
			if err := os.WriteFile(filepath.Join(n.cfg.Data, name), from[name], 0o600); err != nil {
				t.Fatal(err)
			}
		}
		n.cfg.SealKey = with
		n.reads()
		switch state % 5 {
		case 0: // it was sealing
			if err := n.start(); err != nil {
				t.Fatal(state, err)
			}
			if found := n.found(); len(found) > 0 {
				t.Fatalf("state %d: %q", state, found)
			}
		case 1: // it was unsealing
			if err := unseal(n.dir(), io.Discard); err != nil {
				t.Fatal(state, err)
			}
			n.cfg.SealKey = ""
		}
		n.reads()
	}
}

// TestSealedFileDamaged: it is said which file, and no key is made in its place.
func TestSealedFileDamaged(t *testing.T) {
	n := newSealedNode(t)
	n.sealWith("k", newSealingKey(t))
	if err := n.start(); err != nil {
		t.Fatal(err)
	}
	path := n.dir().Path("pki", "ca.key")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range [][]byte{b[:len(b)-1], append(bytes.Clone(b), 'x'), b[:40], nil} {
		if err := durable.ReplaceFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := n.start(); err == nil || !strings.Contains(err.Error(), n.dir().Path("pki")) {
			t.Errorf("%d bytes of %d: %v", len(bad), len(b), err)
		}
		if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, bad) {
			t.Errorf("it was changed: %v", err)
		}
	}
}

// TestUnsealRefuses: while the node runs, and without the key.
func TestUnsealRefuses(t *testing.T) {
	n := newSealedNode(t)
	n.sealWith("k", newSealingKey(t))
	if err := n.start(); err != nil {
		t.Fatal(err)
	}
	d := n.dir()
	lock, err := d.Lock()
	if err != nil {
		t.Fatal(err)
	}
	if err := unseal(d, io.Discard); !errors.Is(err, nodedir.ErrInUse) {
		t.Errorf("while it runs: %v", err)
	}
	lock.Close()
	n.sealWith("other", newSealingKey(t))
	if err := unseal(n.dir(), io.Discard); !errors.Is(err, sealkey.ErrWrongKey) {
		t.Errorf("with another key: %v", err)
	}
	if found := n.found(); len(found) > 0 {
		t.Errorf("in clear: %q", found)
	}
}

// TestInitSealed: a node that has a sealing key from the beginning never writes a key in clear.
func TestInitSealed(t *testing.T) {
	n := newSealedNode(t)
	n.sealWith("k", newSealingKey(t))
	cfg := n.cfg
	cfg.Data, cfg.Advertise, cfg.Port = filepath.Join(t.TempDir(), "data"), "127.0.0.1", freePort(t)
	if err := prepareInit(cfg); err != nil {
		t.Fatal(err)
	}
	n.cfg = cfg
	if found := n.found(); len(found) > 0 {
		t.Errorf("%q", found)
	}
	d := n.dir()
	if id, err := d.ReadIdentity(); err != nil || id.Role() != pki.Server {
		t.Errorf("%+v, %v", id, err)
	}
	if role, err := d.Role(); err != nil || role != pki.Server {
		t.Errorf("its role without the key: %q, %v", role, err)
	}
	if b, err := os.ReadFile(configPath(cfg.Data)); err != nil || !bytes.Contains(b, fmt.Append(nil, "sealKey: ", cfg.SealKey)) {
		t.Errorf("%s, %v", b, err)
	}

	// A key that cannot be used: nothing is left.
	cfg.Data = filepath.Join(t.TempDir(), "data")
	cfg.SealKey = filepath.Join(t.TempDir(), "none")
	if err := prepareInit(cfg); err == nil || !strings.Contains(err.Error(), "--seal-key") {
		t.Error(err)
	}
	if _, err := os.Stat(cfg.Data); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder: %v", err)
	}
}

// freePort is a port of 127.0.0.1 on which no program listens.
func freePort(t *testing.T) uint16 {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).AddrPort().Port()
}
