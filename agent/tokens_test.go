package agent

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	authn "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
)

// TestTokenRefusals: a refusal by an API that issues no tokens says so, whatever
// it is; one by an API that does is passed on.
func TestTokenRefusals(t *testing.T) {
	const none = "this cluster issues no tokens of service accounts"
	for _, tt := range []struct {
		name   string
		served string
		none   bool
	}{
		{"issues none", "serviceaccounts", true},
		{"issues some, but not this one", "serviceaccounts/token", false},
	} {
		client := fake.NewClientset()
		client.Resources = []*metav1.APIResourceList{{GroupVersion: "v1", APIResources: []metav1.APIResource{{Name: tt.served}}}}
		client.PrependReactor("create", "serviceaccounts", func(k8stesting.Action) (bool, kruntime.Object, error) {
			return true, nil, apierrors.NewForbidden(v1.Resource("serviceaccounts"), "default", nil)
		})
		_, err := (&tokens{client: client}).Token(t.Context(), &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "ns", UID: "u"}}, "", 3600)
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "service account ns/default") || strings.Contains(err.Error(), none) != tt.none {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

// TestTokenKeyGone: a pod gets another token once the key of its token does not
// count any more, long before the token's end; what cannot be known changes nothing.
func TestTokenKeyGone(t *testing.T) {
	client, signer, issued := fake.NewClientset(), "one", 0
	client.PrependReactor("create", "serviceaccounts", func(k8stesting.Action) (bool, kruntime.Object, error) {
		issued++
		header := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"ES256","kid":"` + signer + `"}`))
		return true, &authn.TokenRequest{Status: authn.TokenRequestStatus{
			Token: fmt.Sprintf("%s.claims-%d.signature", header, issued), ExpirationTimestamp: metav1.NewTime(time.Now().Add(time.Hour)),
		}}, nil
	})
	var keys string
	var failure error
	var changed []types.UID
	tok := &tokens{
		client:   client,
		readKeys: func(context.Context) ([]byte, error) { return []byte(keys), failure },
		changed:  func(pod types.UID) { changed = append(changed, pod) },
	}
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "ns", UID: "u"}}
	get := func() string {
		t.Helper()
		text, err := tok.Token(t.Context(), pod, "", 3600)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	first := get()
	for _, step := range []struct {
		name, keys string
		failure    error
		gone       bool
	}{
		{"its key counts", `{"keys":[{"kid":"one"}]}`, nil, false},
		{"and another one, too", `{"keys":[{"kid":"one"},{"kid":"two"}]}`, nil, false},
		{"the API does not answer", `{"keys":[{"kid":"two"}]}`, errors.New("away"), false},
		{"the answer is none", `<html>`, nil, false},
		{"the answer names no key", `{"keys":[]}`, nil, false},
		{"its key is gone", `{"keys":[{"kid":"two"}]}`, nil, true},
	} {
		keys, failure, signer = step.keys, step.failure, "two"
		_ = tok.dropUnsigned(t.Context())
		if got := get(); (got != first) != step.gone || slices.Equal(changed, []types.UID{"u"}) != step.gone {
			t.Errorf("%s: another token %t, pods changed %v", step.name, got != first, changed)
		}
	}
	second := get()
	if err := tok.dropUnsigned(t.Context()); err != nil || get() != second || len(changed) != 1 {
		t.Errorf("the new token was given up, too: %v, %v", err, changed)
	}
}
