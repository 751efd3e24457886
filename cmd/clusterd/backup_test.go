package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

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
// an exchange of the authority, has a state beyond theirs, in its store and on disk.
func TestRestoreTrustNumber(t *testing.T) {
	ctx, now := t.Context(), time.Now()
	ca, err := pki.NewCA("c", now)
	if err != nil {
		t.Fatal(err)
	}
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
	if err := authority.Begin(ctx, was, pki.EncodeCert(ca.Cert), pki.EncodeCert(ca.Cert), "n1", 0, now); err != nil {
		t.Fatal(err)
	}
	before, err := authority.Get(ctx, was, false)
	if err != nil {
		t.Fatal(err)
	}
	k := keyspaceOf(t, was)
	cfg := defaultConfig()
	cfg.Name, cfg.Data, cfg.Advertise = "m1", t.TempDir(), "127.0.0.1"
	if err := prepareRestore(cfg, &backup.Content{Secrets: backup.Secrets{CACert: pki.EncodeCert(ca.Cert), CAKey: key}, Store: k}); err != nil {
		t.Fatal(err)
	}
	dir := keyDir{dataDir: dataDir(cfg.Data)}
	id, err := dir.readIdentity()
	if err != nil || id.trust.Number <= before.Number {
		t.Fatalf("on disk: state %d of the authority after %d, %v", id.trust.Number, before.Number, err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	store, err := raftstore.Open(raftstore.Config{
		ID: id.nodeID(), Dir: dir.path("store"), Listener: ln, Logger: slog.New(slog.DiscardHandler),
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
	if err != nil || state.Phase != authority.Stable || state.Number != id.trust.Number {
		t.Errorf("in the store: %+v, %v; on disk %d", state, err, id.trust.Number)
	}
	trust, err := state.Trust()
	if err != nil || trust.Signer().ID() != ca.ID() {
		t.Errorf("the store's authority: %v", err)
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
