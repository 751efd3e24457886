package kubestore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"k8s.io/apiserver/pkg/storage/value"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// TestReseal: every value that is not sealed with the first key is, in all pages and
// whatever the API would say of the object today; what expires still does, what is
// current is not written, and one that cannot be opened keeps none of the others.
func TestReseal(t *testing.T) {
	store, ctx := openStore(t, nil), t.Context()
	old, young := sealKey(t, "one"), sealKey(t, "two")
	seal, err := NewSeal([]SealKey{old})
	if err != nil {
		t.Fatal(err)
	}
	put := func(key string, data []byte, ttl int64) int64 {
		t.Helper()
		res, err := store.Txn(ctx, mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/registry" + key, Value: data, TTL: ttl}}})
		if err != nil {
			t.Fatal(err)
		}
		return res.Revision
	}
	get := func(key string) *mvcc.KeyValue {
		t.Helper()
		kv, _, err := store.Get(ctx, "/registry"+key, raftstore.ReadOptions{})
		if err != nil || kv == nil {
			t.Fatalf("%s: %v %v", key, kv, err)
		}
		return kv
	}
	sealed := func(key, clear string) []byte {
		t.Helper()
		data, err := seal.TransformToStorage(ctx, []byte(clear), value.DefaultContext("/registry"+key))
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	const many = resealPage + 3
	for i := range many {
		key := fmt.Sprintf("/core/secrets/x/s%d", i)
		put(key, sealed(key, key), 0)
	}
	put("/core/secrets/x/clear", []byte("in clear"), 3600)
	put("/core/secrets/x/lost", []byte("k8s:enc:clusterd:lost:bytes"), 0)
	put("/core/pods/x/p", []byte("of no interest"), 0)
	if err := seal.Use([]SealKey{young, old}); err != nil {
		t.Fatal(err)
	}
	current := put("/core/secrets/x/current", sealed("/core/secrets/x/current", "c"), 0)

	var first, last ResealProgress
	waits := 0
	r := &Resealer{
		Store: store, Folders: []string{"/core/secrets"}, Origin: "sealer",
		Transformer: func(key string) (value.Transformer, bool) {
			if !strings.HasPrefix(key, "/core/secrets/x/") {
				t.Errorf("asked for %q", key)
			}
			return seal, true
		},
		Wait: func(_ context.Context, bytes int) error {
			if waits++; bytes < len("k8s:enc:") {
				t.Errorf("%d bytes are to be written", bytes)
			}
			return nil
		},
		Progress: func(p ResealProgress) {
			if first == (ResealProgress{}) {
				first = p
			}
			last = p
		},
	}
	done, err := r.Run(ctx)
	if err == nil || !strings.Contains(err.Error(), "/core/secrets/x/lost") || strings.Contains(err.Error(), "s1") {
		t.Errorf("what cannot be opened: %v", err)
	}
	if want := (ResealProgress{Values: many + 3, Stale: many + 1, Unopened: 1}); first != want {
		t.Errorf("begins with %+v, want %+v", first, want)
	}
	if want := (ResealProgress{Values: many + 3, Unopened: 1, Resealed: many + 1}); done != want || last != want || waits != many+1 {
		t.Errorf("ends with %+v, last shown %+v, after %d waits; want %+v", done, last, waits, want)
	}
	if get("/core/secrets/x/current").ModRevision != current {
		t.Error("a value that was sealed with the first key is written again")
	}
	if kv := get("/core/secrets/x/clear"); kv.ExpiresAt == 0 {
		t.Error("what was to expire will not any more")
	}
	history, err := store.History(ctx, "/registry/core/secrets/x/clear", 10, raftstore.ReadOptions{})
	if err != nil || !strings.HasPrefix(history.Changes[len(history.Changes)-1].Origin, "sealer") {
		t.Errorf("the history does not name who sealed: %+v, %v", history, err)
	}
	// Without the key before, everything still opens to what it was.
	if err := seal.Use([]SealKey{young}); err != nil {
		t.Fatal(err)
	}
	for i := range many {
		key := fmt.Sprintf("/core/secrets/x/s%d", i)
		out, stale, err := seal.TransformFromStorage(ctx, get(key).Value, value.DefaultContext("/registry"+key))
		if err != nil || stale || string(out) != key {
			t.Fatalf("%s: %q, stale %t, %v", key, out, stale, err)
		}
	}
	if again, _ := r.Run(ctx); again.Resealed != 0 || again.Stale != 0 {
		t.Errorf("a second round finds %+v", again)
	}
}

// meddler writes a value in the moment before another one is put in its place.
type meddler struct {
	Store
	meddle func()
}

func (m *meddler) Txn(ctx context.Context, txn mvcc.Txn) (mvcc.TxnResult, error) {
	if m.meddle != nil {
		m.meddle()
	}
	return m.Store.Txn(ctx, txn)
}

// TestResealLoses: who writes a value meanwhile keeps it.
func TestResealLoses(t *testing.T) {
	store, ctx := openStore(t, nil), t.Context()
	seal, err := NewSeal([]SealKey{sealKey(t, "one")})
	if err != nil {
		t.Fatal(err)
	}
	write := func(data string) {
		t.Helper()
		if _, err := store.Txn(ctx, mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/registry/core/secrets/x/s", Value: []byte(data)}}}); err != nil {
			t.Fatal(err)
		}
	}
	write("before")
	r := &Resealer{
		Store:       &meddler{store, func() { write("of another") }},
		Transformer: func(string) (value.Transformer, bool) { return seal, true },
	}
	if _, err := r.Run(ctx); err != nil {
		t.Error(err)
	}
	kv, _, err := store.Get(ctx, "/registry/core/secrets/x/s", raftstore.ReadOptions{})
	if err != nil || !bytes.Equal(kv.Value, []byte("of another")) {
		t.Errorf("%q, %v", kv.Value, err)
	}
	ended, end := context.WithCancel(ctx)
	end()
	r.Store = store
	if _, err := r.Run(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of its context: %v", err)
	}
}

func TestSealedBy(t *testing.T) {
	for data, want := range map[string]string{
		"k8s\x00in clear":                      "",
		"":                                     "",
		"k8s:enc:clusterd:authority:\x01:\x02": "k8s:enc:clusterd:authority:",
		"k8s:enc:aesgcm:v1:key1:\x00\x01:":     "k8s:enc:aesgcm:v1:key1:",
		"k8s:enc:kms:v2:name:\x00":             "k8s:enc:kms:v2:name:",
		"k8s:enc:odd":                          "k8s:enc:",
	} {
		if got := SealedBy([]byte(data)); got != want {
			t.Errorf("%q: %q, want %q", data, got, want)
		}
	}
}
