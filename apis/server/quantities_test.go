package server_test

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/apis/server/servertest"
)

// Quantities with which nothing can compute are refused, in each form of a write,
// before they take the server's memory.
func TestQuantitiesOutOfBounds(t *testing.T) {
	s := servertest.Start(t, nil)
	core := s.Client.CoreV1()
	must[*corev1.ResourceQuota](t)(core.ResourceQuotas("default").Create(t.Context(), &corev1.ResourceQuota{ObjectMeta: meta("q")}, metav1.CreateOptions{}))
	const huge = "1e2000000000"
	quota := `{"kind":"ResourceQuota","apiVersion":"v1","metadata":{"name":"q2"},"spec":{"hard":{"pods":"` + huge + `"}}}`
	patch := func(kind types.PatchType, body string) error {
		_, err := core.ResourceQuotas("default").Patch(t.Context(), "q", kind, []byte(body), metav1.PatchOptions{FieldManager: "test"})
		return err
	}
	for name, err := range map[string]error{
		"create":      core.RESTClient().Post().Namespace("default").Resource("resourcequotas").Body([]byte(quota)).Do(t.Context()).Error(),
		"replace":     core.RESTClient().Put().Namespace("default").Resource("resourcequotas").Name("q").Body([]byte(strings.Replace(quota, "q2", "q", 1))).Do(t.Context()).Error(),
		"status":      core.RESTClient().Put().Namespace("default").Resource("resourcequotas").Name("q").SubResource("status").Body([]byte(`{"kind":"ResourceQuota","apiVersion":"v1","metadata":{"name":"q"},"status":{"used":{"pods":"1e-2000000000"}}}`)).Do(t.Context()).Error(),
		"merge patch": patch(types.MergePatchType, quota),
		"strategic":   patch(types.StrategicMergePatchType, quota),
		"JSON patch":  patch(types.JSONPatchType, `[{"op":"add","path":"/spec","value":{"hard":{"pods":"`+huge+`"}}}]`),
		"apply":       patch(types.ApplyYAMLPatchType, "kind: ResourceQuota\napiVersion: v1\nmetadata: {name: q}\nspec: {hard: {pods: "+huge+"}}\n"),
	} {
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "exponent has to be between -99 and 99") {
			t.Errorf("%s: %v", name, err)
		}
	}
	began := time.Now()
	cm := configMap("free", map[string]string{"a": huge})
	cm.Labels = map[string]string{"commit": "12e4567"}
	must[*corev1.ConfigMap](t)(core.ConfigMaps("default").Create(t.Context(), cm, metav1.CreateOptions{}))
	t.Logf("a ConfigMap with that text was made after %s", time.Since(began))
}
