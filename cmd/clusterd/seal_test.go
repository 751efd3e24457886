package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/cmd/clusterd/atrest"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// TestResealTokenKeys: after a change of the keys for secrets at rest the leader
// seals Secrets and the keys of tokens again, so that the key before can go.
func TestResealTokenKeys(t *testing.T) {
	cluster := raftstoretest.New(t, 1, nil)
	store := cluster.Leader()
	one, err := kubestore.DeriveSealKey("one", []byte("master"))
	if err != nil {
		t.Fatal(err)
	}
	two, err := kubestore.DeriveSealKey("two", []byte("master"))
	if err != nil {
		t.Fatal(err)
	}
	m := &Main{store: store, log: slog.New(slog.DiscardHandler), resealNow: make(chan struct{}, 1), metrics: newMetrics()}
	if m.seal, err = kubestore.NewSeal([]kubestore.SealKey{one}); err != nil {
		t.Fatal(err)
	}
	m.sealAtRest(t)
	s := servertest.Start(t, func(c *server.Config) {
		c.Storage = kubestore.NewDecorator(kubestore.Config{Store: store, Cache: true, Transformer: m.sealer})
	})
	ctx := t.Context()
	if _, err := s.Client.CoreV1().Secrets("default").Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Client.CoreV1().ServiceAccounts("default").Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "robot"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	request, err := s.Client.CoreV1().ServiceAccounts("default").CreateToken(ctx, "robot", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	sealedWith := func(id string) bool {
		t.Helper()
		all := map[string][]mvcc.KeyValue{}
		for _, prefix := range []string{"/registry/keys/serviceaccounts/", "/registry/core/secrets/"} {
			list, err := store.List(ctx, prefix, raftstore.ListOptions{})
			if err != nil || len(list.KVs) == 0 {
				t.Fatalf("%s: %d keys, %v", prefix, len(list.KVs), err)
			}
			all[prefix] = list.KVs
		}
		for _, kvs := range all {
			for _, kv := range kvs {
				if !bytes.HasPrefix(kv.Value, []byte("k8s:enc:clusterd:"+id+":")) {
					return false
				}
			}
		}
		return true
	}
	if !sealedWith("one") {
		t.Fatal("what is to be sealed is not")
	}
	if err := m.seal.Use([]kubestore.SealKey{two, one}); err != nil {
		t.Fatal(err)
	}
	term, over := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- m.reseal(term) }()
	for until := time.Now().Add(time.Minute); !sealedWith("two"); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("not all that is sealed is sealed with the newest key")
		}
	}
	over()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	// Nothing needs the key before any more.
	if err := m.seal.Use([]kubestore.SealKey{two}); err != nil {
		t.Fatal(err)
	}
	review, err := s.Client.AuthenticationV1().TokenReviews().Create(ctx, &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: request.Status.Token}}, metav1.CreateOptions{})
	if err != nil || !review.Status.Authenticated {
		t.Errorf("the token is not good any more: %+v, %v", review.Status, err)
	}
	if made, err := s.FollowAuthority(ctx, 3, false); err != nil || !made {
		t.Errorf("the keys of tokens cannot be read: %t, %v", made, err)
	}
}

// sealAtRest is openAtRest of a Main without an identity.
func (m *Main) sealAtRest(t *testing.T) {
	t.Helper()
	var err error
	m.atRest, err = atrest.New(atrest.Config{
		File: m.cfg.EncryptionProviderConfig, ID: "test", Own: m.seal, Sealed: sealedKinds,
		Private: privateKinds, Changed: m.resealSoon, Log: m.log,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.atRest.Close)
}

// TestEncryptionState: a server's word on how it seals, and what is warned of where
// servers differ.
func TestEncryptionState(t *testing.T) {
	file := filepath.Join(t.TempDir(), "encryption.yaml")
	key := base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{1}, 32))
	content := "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources: [{resources: [configmaps], providers: [{aesgcm: {keys: [{name: one, secret: " + key + "}]}}]}]\n"
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	store := raftstoretest.New(t, 1, nil).Leader()
	m := &Main{store: store, log: slog.New(slog.DiscardHandler), resealNow: make(chan struct{}, 1), metrics: newMetrics()}
	m.cfg.EncryptionProviderConfig = file
	own, err := kubestore.DeriveSealKey("own", []byte("master"))
	if err != nil {
		t.Fatal(err)
	}
	if m.seal, err = kubestore.NewSeal([]kubestore.SealKey{own}); err != nil {
		t.Fatal(err)
	}
	m.sealAtRest(t)
	for key, value := range map[string]string{
		"/registry/core/configmaps/x/clear":  "k8s\x00in clear",
		"/registry/core/secrets/x/old":       "k8s\x00a secret in clear",
		"/registry/core/configmaps/x/locked": "k8s:enc:aesgcm:v1:lost:bytes",
		"/registry/core/services/x/s":        "k8s\x00a service",
	} {
		if _, err := store.Txn(t.Context(), mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: key, Value: []byte(value)}}}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := m.resealRound(t.Context()); err == nil || !strings.Contains(err.Error(), "configmaps sealed by k8s:enc:aesgcm:v1:lost:") {
		t.Errorf("the value that cannot be opened: %v", err)
	}
	v := m.encryptionState()
	if v.Keys != "configmaps: aesgcm one" || v.Config == "" || v.Outdated || *v.Values != 3 || *v.Stale != 0 || *v.Unopened != 1 {
		t.Errorf("%+v", v)
	}
	for key, prefix := range map[string]string{
		"/registry/core/configmaps/x/clear": "k8s:enc:aesgcm:v1:one:",
		"/registry/core/secrets/x/old":      "k8s:enc:clusterd:own:",
		"/registry/core/services/x/s":       "k8s\x00",
	} {
		kv, _, err := store.Get(t.Context(), key, raftstore.ReadOptions{})
		if err != nil || !bytes.HasPrefix(kv.Value, []byte(prefix)) {
			t.Errorf("%s: %.40q, %v", key, kv.Value, err)
		}
	}

	none := 0
	member := func(name string, e *encryptionView) memberView {
		return memberView{Member: v1.Member{Name: name}, sealing: e}
	}
	warnings := strings.Join(sealedOtherwise([]memberView{
		member("n0", nil), member("n1", v), member("n2", &encryptionView{Config: v.Config, Unopened: &none}), member("n3", &encryptionView{Outdated: true}),
	}), "\n")
	for _, want := range []string{"EncryptionConfiguration of n3 (none) is not that of n1 (" + shortHash(v.Config) + ")", "on n3 is not in force", "1 objects are sealed with keys that the leader n1 does not have"} {
		if !strings.Contains(warnings, want) {
			t.Errorf("no %q in:\n%s", want, warnings)
		}
	}
	if strings.Contains(warnings, "n0") || strings.Contains(warnings, "n2") {
		t.Errorf("a server is blamed that has the same, or is too old to say:\n%s", warnings)
	}

	registry := prometheus.NewRegistry()
	metrics := newEncryptionCollector()
	registry.MustRegister(metrics)
	metrics.main.Store(m)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, one := range f.GetMetric() {
			name := f.GetName()
			for _, label := range one.GetLabel() {
				name += " " + label.GetValue()
			}
			got[name] = one.GetGauge().GetValue()
		}
	}
	for name, want := range map[string]float64{
		"clusterd_encryption_config_valid": 1, "clusterd_encryption_key_info one aesgcm configmaps": 1,
		"clusterd_encryption_values current": 2, "clusterd_encryption_values stale": 0, "clusterd_encryption_values unopened": 1,
	} {
		if n, ok := got[name]; !ok || n != want {
			t.Errorf("%s = %v, %t, want %v", name, n, ok, want)
		}
	}
}
