package accounttoken

import (
	"context"
	"encoding/base64"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/clusterd/clusterd/sched/loop"
)

// TestKeyThatSignsBeforeItIsSeen: a token whose key is newer than what was last seen of the
// keys stays; one whose key verifies no more is replaced.
func TestKeyThatSignsBeforeItIsSeen(t *testing.T) {
	signed := func(key string) []byte {
		return []byte(base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"ES256","kid":"`+key+`"}`)) + ".e30.c2ln")
	}
	for key, replaced := range map[string]bool{"new": false, "old": true} {
		account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "robot", UID: "1"}}
		secret := filled(&corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "s", Annotations: map[string]string{corev1.ServiceAccountNameKey: "robot"}},
			Type:       corev1.SecretTypeServiceAccountToken,
		}, account, nil, nil)
		secret.Data[corev1.ServiceAccountTokenKey] = signed(key)
		client := fake.NewClientset(account, secret)
		factory := informers.NewSharedInformerFactory(client, 0)
		c := &controller{
			client: client, accounts: factory.Core().V1().ServiceAccounts().Lister(), secrets: factory.Core().V1().Secrets().Informer(),
			keys: func(context.Context) ([]string, error) { return []string{"new"}, nil },
		}
		seen := []string{"before"}
		if key == "old" {
			seen = []string{"new"}
		}
		c.known.Store(&seen)
		for _, put := range []func() error{
			func() error { return factory.Core().V1().ServiceAccounts().Informer().GetIndexer().Add(account) },
			func() error { return c.secrets.GetIndexer().Add(secret) },
		} {
			if err := put(); err != nil {
				t.Fatal(err)
			}
		}
		client.ClearActions()
		if err := c.reconcile(t.Context(), loop.KeyOf(secret)); err != nil {
			t.Fatal(err)
		}
		made := 0
		for _, a := range client.Actions() {
			if a.Matches("create", "serviceaccounts/token") || a.GetSubresource() == "token" {
				made++
			}
		}
		if (made > 0) != replaced {
			t.Errorf("a token by key %s: %d others were made: %v", key, made, client.Actions())
		}
	}
}
