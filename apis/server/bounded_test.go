package server_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/apis/server/servertest"
)

// TestTooManyKeys has objects whose number of parts, not their size, is the
// burden. Each refusal has to come before anything is computed of it: the
// client's timeout is far below what the computation would take.
func TestTooManyKeys(t *testing.T) {
	s := servertest.Start(t, nil)
	keys := make(map[string]string, 150_000)
	for i := range 150_000 {
		keys[fmt.Sprint(i)] = ""
	}
	var patch strings.Builder
	patch.WriteString(`{"data":{"a":""`)
	for key := range keys {
		fmt.Fprintf(&patch, `,%q:""`, key)
	}
	patch.WriteString("}}")
	maps := s.Client.CoreV1().ConfigMaps("default")
	must[*corev1.ConfigMap](t)(maps.Create(t.Context(), configMap("small", nil), metav1.CreateOptions{}))
	annotated := configMap("annotated", nil)
	annotated.Annotations = keys
	for name, call := range map[string]func() error{
		"create": func() error {
			_, err := maps.Create(t.Context(), configMap("big", keys), metav1.CreateOptions{})
			return err
		},
		"annotations": func() error {
			_, err := maps.Create(t.Context(), annotated, metav1.CreateOptions{})
			return err
		},
		"patch": func() error {
			_, err := maps.Patch(t.Context(), "small", types.MergePatchType, []byte(patch.String()), metav1.PatchOptions{})
			return err
		},
	} {
		begin := time.Now()
		err := call()
		if status, ok := err.(apierrors.APIStatus); !ok || status.Status().Code < 400 || status.Status().Code > 499 || !strings.Contains(err.Error(), "at most 32768 are allowed") {
			t.Errorf("%s: %v", name, err)
		}
		t.Logf("%s refused in %v", name, time.Since(begin).Round(time.Millisecond))
	}
}
