package agent

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	authn "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

type objectUID = types.UID

// tokens asks the API for service account tokens bound to pods, and keeps
// each until a fifth of its life is left.
type tokens struct {
	client kubernetes.Interface

	mu   sync.Mutex // guards held
	held map[tokenKey]heldToken
}

type tokenKey struct {
	pod      types.UID
	audience string
	seconds  int64
}

type heldToken struct {
	token   string
	renewAt time.Time
	ends    time.Time
}

// Token implements volume.Tokens.
func (t *tokens) Token(ctx context.Context, pod *v1.Pod, audience string, seconds int64) (string, error) {
	key := tokenKey{pod.UID, audience, seconds}
	now := time.Now()
	t.mu.Lock()
	for k, h := range t.held {
		if now.After(h.ends) {
			delete(t.held, k) // of pods long gone
		}
	}
	have, ok := t.held[key]
	t.mu.Unlock()
	if ok && now.Before(have.renewAt) {
		return have.token, nil
	}
	req := &authn.TokenRequest{Spec: authn.TokenRequestSpec{
		ExpirationSeconds: &seconds,
		BoundObjectRef:    &authn.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID},
	}}
	if audience != "" {
		req.Spec.Audiences = []string{audience}
	}
	account := pod.Spec.ServiceAccountName
	if account == "" {
		account = "default"
	}
	got, err := t.client.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(ctx, account, req, metav1.CreateOptions{})
	if err != nil {
		if ok && now.Before(have.ends) {
			return have.token, nil // still good for a while
		}
		if !t.issued() {
			return "", fmt.Errorf("token of service account %s/%s: this cluster issues no tokens of service accounts: %w", pod.Namespace, account, err)
		}
		return "", fmt.Errorf("token of service account %s/%s: %w", pod.Namespace, account, err)
	}
	ends := got.Status.ExpirationTimestamp.Time
	if ends.IsZero() {
		ends = now.Add(time.Duration(seconds) * time.Second)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.held == nil {
		t.held = map[tokenKey]heldToken{}
	}
	t.held[key] = heldToken{got.Status.Token, now.Add(ends.Sub(now) * 4 / 5), ends}
	return got.Status.Token, nil
}

// issued reports whether the API issues tokens at all, as far as can be known:
// a refusal does not tell.
func (t *tokens) issued() bool {
	list, err := t.client.Discovery().ServerResourcesForGroupVersion("v1")
	return err != nil || slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == "serviceaccounts/token" })
}
