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

// TestTokenRefusals: an account that does not exist and an API that issues no
// tokens both answer 404, and are told apart.
func TestTokenRefusals(t *testing.T) {
	const none = "this cluster issues no tokens of service accounts"
	for _, tt := range []struct {
		name  string
		err   error
		issue bool
	}{
		{"no such call", apierrors.NewGenericServerResponse(404, "POST", v1.Resource("serviceaccounts"), "default", "404 page not found", 0, true), false},
		{"no such account", apierrors.NewNotFound(v1.Resource("serviceaccounts"), "default"), true},
	} {
		client := fake.NewClientset()
		client.PrependReactor("create", "serviceaccounts", func(k8stesting.Action) (bool, kruntime.Object, error) { return true, nil, tt.err })
		_, err := (&tokens{client: client}).Token(t.Context(), &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "ns", UID: "u"}}, "", 3600)
		if err == nil || !strings.Contains(err.Error(), "service account ns/default") || strings.Contains(err.Error(), none) == tt.issue {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}
