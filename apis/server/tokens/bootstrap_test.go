package tokens

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestBootstrap(t *testing.T) {
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	const token = "abcdef.0123456789abcdef"
	whole := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "bootstrap-token-abcdef"}, Type: "bootstrap.kubernetes.io/token",
		Data: map[string][]byte{
			"token-id": []byte("abcdef"), "token-secret": []byte("0123456789abcdef"), "usage-bootstrap-authentication": []byte("true"),
			"expiration": []byte("2026-05-01T13:00:00Z"), "auth-extra-groups": []byte("system:bootstrappers:edge,system:bootstrappers:lab"),
		},
	}
	with := func(change func(*corev1.Secret)) *corev1.Secret {
		s := whole.DeepCopy()
		change(s)
		return s
	}
	set := func(key, value string) *corev1.Secret {
		return with(func(s *corev1.Secret) { s.Data[key] = []byte(value) })
	}
	for _, tt := range []struct {
		name, token string
		secret      *corev1.Secret
		ok, opinion bool
	}{
		{"whole", token, whole, true, true},
		{"no end", token, with(func(s *corev1.Secret) { delete(s.Data, "expiration") }), true, true},
		{"another secret", "abcdef.0123456789abcdeX", whole, false, false}, // no token at all
		{"a wrong secret", "abcdef.0123456789abcde0", whole, false, true},
		{"an unknown one", "zzzzzz.0123456789abcdef", whole, false, true},
		{"another kind of token", "a.b.c", whole, false, false},
		{"expired", token, set("expiration", "2026-05-01T12:00:00Z"), false, true},
		{"an end that is no time", token, set("expiration", "tomorrow"), false, true},
		{"not for this", token, set("usage-bootstrap-authentication", "false"), false, true},
		{"of another id", token, set("token-id", "abcdeg"), false, true},
		{"an empty secret", token, set("token-secret", ""), false, true},
		{"another type", token, with(func(s *corev1.Secret) { s.Type = corev1.SecretTypeOpaque }), false, true},
		{"being deleted", token, with(func(s *corev1.Secret) { s.DeletionTimestamp = &metav1.Time{Time: now} }), false, true},
		{"a group that it may not give", token, set("auth-extra-groups", "system:masters"), false, true},
	} {
		b := &Bootstrap{now: func() time.Time { return now }, secret: func(_ context.Context, namespace, name string) (*corev1.Secret, error) {
			if namespace != tt.secret.Namespace || name != tt.secret.Name {
				return nil, apierrors.NewNotFound(corev1.Resource("secrets"), name)
			}
			return tt.secret, nil
		}}
		got, ok, err := b.AuthenticateToken(t.Context(), tt.token)
		if ok != tt.ok || (err != nil) != (tt.opinion && !tt.ok) {
			t.Errorf("%s: %v %v", tt.name, ok, err)
			continue
		}
		if ok && (got.User.GetName() != "system:bootstrap:abcdef" || !slices.Equal(got.User.GetGroups(), []string{"system:bootstrappers", "system:bootstrappers:edge", "system:bootstrappers:lab"})) {
			t.Errorf("%s: %+v", tt.name, got.User)
		}
	}
	down := &Bootstrap{now: time.Now, secret: func(context.Context, string, string) (*corev1.Secret, error) { return nil, errors.New("no quorum") }}
	if _, ok, err := down.AuthenticateToken(t.Context(), token); ok || err == nil || errors.Is(err, errBootstrap) {
		t.Errorf("a store that does not answer: %v %v", ok, err)
	}
}
