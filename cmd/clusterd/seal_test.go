package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// TestResealTokenKeys: after a change of the keys for secrets at rest the leader
// seals Secrets and the keys of tokens anew, so that the key before can go.
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
	m := &Main{store: store, log: slog.New(slog.DiscardHandler), resealNow: make(chan struct{}, 1)}
	if m.seal, err = kubestore.NewSeal([]kubestore.SealKey{one}); err != nil {
		t.Fatal(err)
	}
	s := servertest.Start(t, func(c *server.Config) {
		c.Storage = kubestore.NewDecorator(kubestore.Config{Store: store, Cache: true, Transformer: m.sealer})
	})
	m.api = s.Server
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

// TestResealGoesOn: a Secret that cannot be written, since a policy refuses it, keeps
// none of the others from being sealed, and is named.
func TestResealGoesOn(t *testing.T) {
	client := fake.NewClientset()
	for _, name := range []string{"a", "b", "c"} {
		if _, err := client.CoreV1().Secrets("x").Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	client.PrependReactor("update", "secrets", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if action.(clienttesting.UpdateAction).GetObject().(*corev1.Secret).Name == "b" {
			return true, nil, errors.New("refused by a policy")
		}
		return false, nil, nil
	})
	done, err := resealSecrets(t.Context(), client)
	if done != 2 || err == nil || !strings.Contains(err.Error(), "x/b") || strings.Contains(err.Error(), "x/c") {
		t.Errorf("%d done, %v", done, err)
	}
}
