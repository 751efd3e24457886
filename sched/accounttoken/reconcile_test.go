package accounttoken

import (
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
	full := filled(empty, account, ca)
	if len(full.Data[corev1.ServiceAccountTokenKey]) > 0 || empty.Data != nil {
		t.Fatal("filled made a token or changed its argument")
	}
	full.Data[corev1.ServiceAccountTokenKey] = []byte("t")
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
		{"another namespace", with(func(s *corev1.Secret) { s.Data[corev1.ServiceAccountNamespaceKey] = []byte("x") }), account, fill},
	} {
		if got := decide(test.secret, test.account, ca); got != test.want {
			t.Errorf("%s: %d, want %d", test.name, got, test.want)
		}
	}
}
