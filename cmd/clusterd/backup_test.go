package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/authority"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/join/jointest"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/backup"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
	"github.com/clusterd/clusterd/raftstore/recovery"
)

// TestRestoreTrustNumber: a server that begins from a copy, whose agents had followed
// a CA rotation, has a state beyond theirs, in its store and on disk.
func TestRestoreTrustNumber(t *testing.T) {
	ca, err := pki.NewCA("c", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	one := pki.NewTrust(0, ca)
	separate, err := one.Separate(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	t.Run("one authority", func(t *testing.T) { restoreTrust(t, ca, one) })
	t.Run("an authority for each purpose", func(t *testing.T) { restoreTrust(t, ca, separate) })
}

func restoreTrust(t *testing.T, ca *pki.CA, had *pki.Trust) {
	ctx, now := t.Context(), time.Now()
	key, err := ca.EncodeCAKey()
	if err != nil {
		t.Fatal(err)
	}
	was := jointest.New()
	err = join.PutCluster(ctx, was, join.Cluster{
		Name: "c", ClusterCIDR: join.Ranges{netip.MustParsePrefix("10.244.0.0/16")}, ServiceCIDR: join.Ranges{netip.MustParsePrefix("10.96.0.0/16")},
	}, join.Record{ID: "n1", Name: "n1", Confirmed: true})
	if err != nil {
		t.Fatal(err)
	}
	wish := authority.Request{Now: had, Successors: map[pki.Purpose][]byte{pki.ForPeers: pki.EncodeCert(ca.Cert)}, Maker: "n1"}
	if err := authority.Begin(ctx, was, wish, now); err != nil {
		t.Fatal(err)
	}
	before, err := authority.Get(ctx, was, false)
	if err != nil {
		t.Fatal(err)
	}
	k := keyspaceOf(t, was)
	cfg := defaultConfig()
	cfg.Name, cfg.Data, cfg.Advertise = "m1", t.TempDir(), "127.0.0.1"
	m := &Main{dir: nodedir.KeyDir{Dir: nodedir.Dir(t.TempDir())}, id: &nodedir.Identity{Trust: had}}
	m.trust.Store(had)
	secrets, err := m.snapshotSecrets()
	if err != nil || !bytes.Equal(secrets.CAKey, key) || len(secrets.Own) > 0 != had.Separated() {
		t.Fatalf("in the snapshot: %+v, %v", secrets, err)
	}
	if err := prepareRestore(cfg, &backup.Content{Secrets: secrets, Store: k}); err != nil {
		t.Fatal(err)
	}
	dir := nodedir.KeyDir{Dir: nodedir.Dir(cfg.Data)}
	id, err := dir.ReadIdentity()
	if err != nil || id.Trust.Number <= before.Number {
		t.Fatalf("on disk: state %d of the authority after %d, %v", id.Trust.Number, before.Number, err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	store, err := raftstore.Open(raftstore.Config{
		ID: id.NodeID(), Dir: dir.Path("store"), Listener: ln, Logger: slog.New(slog.DiscardHandler),
		Dial:   func(context.Context, string) (net.Conn, error) { return nil, errors.New("there are no others") },
		PeerID: func(net.Conn) string { return "" },
		Known:  func(string) bool { return false },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	raftstoretest.Wait(t, "the restored store has a leader", func() bool { return store.Leader() != "" })
	state, err := authority.Get(ctx, store, false)
	if err != nil || state.Phase != authority.Stable || state.Number != id.Trust.Number {
		t.Errorf("in the store: %+v, %v; on disk %d", state, err, id.Trust.Number)
	}
	trust, err := state.Trust()
	if err != nil || trust.Signer().ID() != ca.ID() {
		t.Fatalf("the store's authority: %v", err)
	}
	for _, p := range pki.Purposes {
		was := had.For(p).Signer().ID()
		if trust.Owns(p) != had.Owns(p) || trust.For(p).Signer().ID() != was || id.Trust.For(p).Signer().ID() != was || !id.Trust.For(p).Signer().HasKey() {
			t.Errorf("the authority for %s: %s in the store, %s on disk, was %s", p, trust.For(p).Signer().ID(), id.Trust.For(p).Signer().ID(), was)
		}
	}
}

// TestRestoreFamily: a cluster is not restored on a machine whose address is of the
// family that its first range is not of.
func TestRestoreFamily(t *testing.T) {
	const four, six = "10.244.0.0/16 10.96.0.0/16", "fd00:10:244::/48 fd00:10:96::/112"
	for _, tc := range []struct{ ranges, advertise, want string }{
		{four, "2001:db8::7", "--advertise 2001:db8::7: the first range of pods of the cluster in the snapshot, 10.244.0.0/16, is of IPv4"},
		{six, "192.0.2.7", "--advertise 192.0.2.7: the nodes' addresses and the first range of --cluster-cidr, fd00:10:244::/48"},
	} {
		pods, services, _ := strings.Cut(tc.ranges, " ")
		was := jointest.New()
		err := join.PutCluster(t.Context(), was, join.Cluster{
			Name: "c", ClusterCIDR: join.Ranges{netip.MustParsePrefix(pods)}, ServiceCIDR: join.Ranges{netip.MustParsePrefix(services)},
		}, join.Record{ID: "n1", Name: "n1", Confirmed: true})
		if err != nil {
			t.Fatal(err)
		}
		cfg := defaultConfig()
		cfg.Name, cfg.Data, cfg.Advertise = "m1", t.TempDir(), tc.advertise
		if err := prepareRestore(cfg, &backup.Content{Store: keyspaceOf(t, was)}); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s at %s: %v, want %q", tc.ranges, tc.advertise, err, tc.want)
		}
		if left, err := os.ReadDir(cfg.Data); err != nil || len(left) > 0 {
			t.Errorf("%s at %s: %v are left, %v", tc.ranges, tc.advertise, left, err)
		}
	}
}

// keyspaceOf is the content of a store as a copy has it.
func keyspaceOf(t *testing.T, s join.Store) *mvcc.Keyspace {
	t.Helper()
	list, err := s.List(t.Context(), "/", raftstore.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var put mvcc.Txn
	for _, kv := range list.KVs {
		put.Ops = append(put.Ops, mvcc.Op{Type: mvcc.OpPut, Key: kv.Key, Value: kv.Value})
	}
	k := mvcc.New()
	if err := recovery.Amend(k, put); err != nil {
		t.Fatal(err)
	}
	return k
}

// TestDeletedOnce: a transaction may name a key once.
func TestDeletedOnce(t *testing.T) {
	del := func(key string) mvcc.Op { return mvcc.Op{Type: mvcc.OpDelete, Key: key} }
	put := mvcc.Op{Type: mvcc.OpPut, Key: "c", Value: []byte("v")}
	got := deletedOnce([]mvcc.Op{del("a"), put, del("b"), del("a"), del("b")})
	txn := mvcc.Txn{Ops: got}
	if err := txn.Validate(); err != nil || len(got) != 3 {
		t.Errorf("%v: %+v", err, got)
	}
}
