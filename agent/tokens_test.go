package agent

import (
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
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
