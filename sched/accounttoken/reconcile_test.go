package accounttoken

import (
	"encoding/base64"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestDecide(t *testing.T) {
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "robot", UID: "1"}}
	ca := []byte("CA")
	empty := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "s", Annotations: map[string]string{corev1.ServiceAccountNameKey: "robot"}},
		Type:       corev1.SecretTypeServiceAccountToken,
	}
	full := filled(empty, account, ca, nil)
	if len(full.Data[corev1.ServiceAccountTokenKey]) > 0 || empty.Data != nil {
		t.Fatal("filled made a token or changed its argument")
	}
	signed := func(key string) []byte {
		return []byte(base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"ES256","kid":"`+key+`"}`)) + ".e30.c2ln")
	}
	full.Data[corev1.ServiceAccountTokenKey] = signed("now")
	with := func(change func(*corev1.Secret)) *corev1.Secret {
		s := full.DeepCopy()
		change(s)
		return s
	}
	for _, test := range []struct {
		name    string
		secret  *corev1.Secret
		account *corev1.ServiceAccount
		want    action
	}{
		{"new", empty, account, fill},
		{"full", full, account, keep},
		{"no account", full, nil, drop},
		{"new, no account", empty, nil, drop},
		{"an account of the same name", with(func(s *corev1.Secret) { s.Annotations[corev1.ServiceAccountUIDKey] = "0" }), account, drop},
		{"token taken out", with(func(s *corev1.Secret) { delete(s.Data, corev1.ServiceAccountTokenKey) }), account, fill},
		{"another CA", with(func(s *corev1.Secret) { s.Data[corev1.ServiceAccountRootCAKey] = []byte("old") }), account, fill},
		{"a key that verifies no more", with(func(s *corev1.Secret) { s.Data[corev1.ServiceAccountTokenKey] = signed("old") }), account, fill},
		{"an older key", with(func(s *corev1.Secret) { s.Data[corev1.ServiceAccountTokenKey] = signed("before") }), account, keep},
		{"somebody's own token", with(func(s *corev1.Secret) { s.Data[corev1.ServiceAccountTokenKey] = []byte("t") }), account, keep},
		{"another namespace", with(func(s *corev1.Secret) { s.Data[corev1.ServiceAccountNamespaceKey] = []byte("x") }), account, fill},
	} {
		if got := decide(test.secret, test.account, ca, []string{"before", "now"}); got != test.want {
			t.Errorf("%s: %d, want %d", test.name, got, test.want)
		}
	}
	old := with(func(s *corev1.Secret) { s.Data[corev1.ServiceAccountTokenKey] = signed("old") })
	if got := decide(old, account, ca, nil); got != keep {
		t.Errorf("keys that are not known: %d", got)
	}
	if data := filled(old, account, ca, []string{"now"}).Data; len(data[corev1.ServiceAccountTokenKey]) > 0 {
		t.Error("the old token is kept")
	}
	if data := filled(full, account, ca, []string{"now"}).Data; len(data[corev1.ServiceAccountTokenKey]) == 0 {
		t.Error("the token is dropped")
	}
}
