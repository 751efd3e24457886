package main

import (
	"context"
	"crypto/x509"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apiserver/pkg/storage/value"

	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/gossipkey"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/join/jointest"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/rights"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/backup"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/recovery"
)

// sealingServer is a server with a key for secrets at rest of its administrators.
func sealingServer(t *testing.T) (m *Main, own string) {
	t.Helper()
	ca, err := pki.NewCA("c", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	nodeKey, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	key, err := kubestore.DeriveSealKey("key-1", []byte("master"))
	if err != nil {
		t.Fatal(err)
	}
	old, err := kubestore.DeriveSealKey(backup.AuthoritySeal+"-abcdefghij23", []byte("a former authority's"))
	if err != nil {
		t.Fatal(err)
	}
	own = string(nodedir.SealLine(key))
	m = &Main{
		rights: &rights.Rights{},
		dir:    nodedir.KeyDir{Dir: nodedir.Dir(t.TempDir())}, log: slog.New(slog.DiscardHandler), resealNow: make(chan struct{}, 1), metrics: newMetrics(),
		id: &nodedir.Identity{Key: nodeKey, Trust: pki.NewTrust(0, ca), Ring: gossipkey.Ring{Keys: [][]byte{gossipkey.New()}}, RetiredSeals: nodedir.SealLine(old)},
	}
	m.trust.Store(m.id.Trust)
	if err := os.WriteFile(m.dir.Path(nodedir.SealKeysFile), []byte("# made by hand\n"+own), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := m.openSeal(); err != nil {
		t.Fatal(err)
	}
	return m, own
}

// TestSnapshotHoldsSealKeys: after the loss of all servers, what was sealed with a key
// of seal.keys can be read by who begins from a snapshot, and is sealed with it again.
func TestSnapshotHoldsSealKeys(t *testing.T) {
	m, own := sealingServer(t)
	where := value.DefaultContext("/registry/core/secrets/s")
	sealed, err := m.seal.TransformToStorage(t.Context(), []byte("secret"), where)
	if err != nil {
		t.Fatal(err)
	}
	secrets, err := m.snapshotSecrets()
	if err != nil {
		t.Fatal(err)
	}
	was := jointest.New()
	err = join.PutCluster(t.Context(), was, join.Cluster{
		Name: "c", ClusterCIDR: join.Ranges{netip.MustParsePrefix("10.244.0.0/16")}, ServiceCIDR: join.Ranges{netip.MustParsePrefix("10.96.0.0/16")},
	}, join.Record{ID: "n1", Name: "n1", Confirmed: true})
	if err != nil {
		t.Fatal(err)
	}
	k := keyspaceOf(t, was)
	if err := recovery.Amend(k, mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/registry/core/secrets/s", Value: sealed}}}); err != nil {
		t.Fatal(err)
	}
	content := &backup.Content{Secrets: secrets, Store: k}
	if missing, err := content.MissingSealKeys(); err != nil || len(missing) > 0 {
		t.Errorf("the snapshot lacks the keys %v, %v", missing, err)
	}
	without := &backup.Content{Secrets: backup.Secrets{CACert: secrets.CACert, CAKey: secrets.CAKey}, Store: k}
	if missing, err := without.MissingSealKeys(); err != nil || !slices.Equal(missing, []string{"key-1"}) {
		t.Errorf("a snapshot without the keys lacks %v, %v", missing, err)
	}
	cfg := defaultConfig()
	cfg.Name, cfg.Data, cfg.Advertise = "m1", t.TempDir(), "127.0.0.1"
	if err := prepareRestore(cfg, content); err != nil {
		t.Fatal(err)
	}
	restored := &Main{dir: nodedir.KeyDir{Dir: nodedir.Dir(cfg.Data)}, log: slog.New(slog.DiscardHandler), metrics: newMetrics()}
	if restored.id, err = restored.dir.ReadIdentity(); err != nil {
		t.Fatal(err)
	}
	if err := restored.openSeal(); err != nil {
		t.Fatal(err)
	}
	if plain, stale, err := restored.seal.TransformFromStorage(t.Context(), sealed, where); err != nil || stale || string(plain) != "secret" {
		t.Errorf("restored: %q, stale %t, %v", plain, stale, err)
	}
	if list, err := os.ReadFile(restored.dir.Path(nodedir.SealKeysFile)); err != nil || string(list) != own {
		t.Errorf("seal.keys: %q, %v", list, err)
	}
	if string(restored.id.RetiredSeals) != string(m.id.RetiredSeals) {
		t.Errorf("keys of former authorities: %q", restored.id.RetiredSeals)
	}
}

// TestJoinerGetsSealKeys: a server that joins has the keys of seal.keys of the one that
// answered it, below those that were put there before.
func TestJoinerGetsSealKeys(t *testing.T) {
	m, own := sealingServer(t)
	list, err := m.ownSeals()
	if err != nil || string(list) != own {
		t.Fatalf("sent: %q, %v", list, err)
	}
	dir := nodedir.KeyDir{Dir: nodedir.Dir(t.TempDir())}
	for _, had := range []string{"", own, "# mine\nkey-2 " + strings.Fields(own)[1]} {
		if err := os.WriteFile(dir.Path(nodedir.SealKeysFile), []byte(had), 0o600); err != nil {
			t.Fatal(err)
		}
		want := had
		if had == "" {
			want = own
		} else if had != own {
			want = had + "\n" + own
		}
		if err := dir.AddSealKeys(list); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(dir.Path(nodedir.SealKeysFile)); err != nil || string(got) != want {
			t.Errorf("%q became %q, %v", had, got, err)
		}
	}
	if err := os.Remove(dir.Path(nodedir.SealKeysFile)); err != nil {
		t.Fatal(err)
	}
	if err := dir.AddSealKeys(nil); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir.Path(nodedir.SealKeysFile)); !os.IsNotExist(err) {
		t.Errorf("a file without keys was made: %v", err)
	}
}

// TestKeepSealTriesAgain: a change of the file that could not be taken up is tried again.
func TestKeepSealTriesAgain(t *testing.T) {
	m, _ := sealingServer(t)
	good, err := os.ReadFile(m.dir.Path(nodedir.SealKeysFile))
	if err != nil {
		t.Fatal(err)
	}
	var w sealWatch
	if !m.lookAtSeal(&w) || m.lookAtSeal(&w) {
		t.Fatal("the file is taken up once")
	}
	if err := os.WriteFile(m.dir.Path(nodedir.SealKeysFile), append(good, "key-2"...), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if before := w.stamp; m.lookAtSeal(&w) || w.stamp != before {
			t.Fatal("a file that is broken was taken up")
		}
	}
	if _, err := m.seal.TransformToStorage(context.Background(), []byte("x"), value.DefaultContext("k")); err != nil {
		t.Error(err)
	}
}

// TestDemotedKeepsNoKeys: what a server that was demoted leaves of the cluster on its
// disk opens nothing.
func TestDemotedKeepsNoKeys(t *testing.T) {
	m, _ := sealingServer(t)
	if err := os.Mkdir(m.dir.Path("store"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := m.dir.DropServerState(); err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(string(m.dir.Dir))
	if err != nil || len(left) != 1 || left[0].Name() != "store.demoted" {
		t.Errorf("left: %v, %v", left, err)
	}
}

// TestRenewKubeconfig: the administrator's kubeconfig is renewed while the server runs,
// as its certificates are.
func TestRenewKubeconfig(t *testing.T) {
	m, _ := sealingServer(t)
	m.cfg = defaultConfig()
	m.cfg.Name, m.cfg.Advertise = "n1", "127.0.0.1"
	now := time.Now()
	var err error
	if m.id.Key, err = pki.NewKey(); err != nil {
		t.Fatal(err)
	}
	if m.id.Cert, err = m.id.Trust.Signer().IssueServer(m.id.Key.Public(), "n1", certAddrs(m.cfg), now); err != nil {
		t.Fatal(err)
	}
	if err := m.dir.WriteIdentity(m.id); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(m.dir.Kubeconfig(), []byte("one that has ended"), 0o600); err != nil {
		t.Fatal(err)
	}
	m.renew(now)
	if !kubeconfigGood(m.dir.Kubeconfig(), m.trust.Load(), "https://127.0.0.1:6443", now, func(*x509.Certificate) bool { return false }) {
		t.Error("it was not renewed")
	}
}

// TestFewVoters: voters that no member is any more have no name that could be given.
func TestFewVoters(t *testing.T) {
	records := []join.Record{{ID: "1", Name: "n1"}, {ID: "2", Name: "n2"}}
	for silent, want := range map[string]string{"2": "n2 does not answer", "gone": "no members any more"} {
		if err := fewVoters("n1", &raftstore.QuorumError{Voters: 2, Silent: []string{silent}}, records); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", silent, err)
		}
	}
}
