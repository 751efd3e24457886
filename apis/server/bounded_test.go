package server_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/apis/server/servertest"
)

// TestTooManyKeys has objects whose number of parts, not their size, is the
// burden. Each refusal has to come before anything is computed of it, and leave
// nothing behind: of a patch half a minute would be computed.
func TestTooManyKeys(t *testing.T) {
	s := servertest.Start(t, nil)
	const many = 150_000
	keys := make(map[string]string, many)
	var members, lines, env strings.Builder
	for i := range many {
		keys[fmt.Sprint(i)] = ""
		fmt.Fprintf(&members, `,"%d":""`, i)
		fmt.Fprintf(&lines, "\n    k%d: ''", i)
		fmt.Fprintf(&env, `,{"name":"e%d"}`, i)
	}
	jsons := s.LoopbackConfig()
	jsons.ContentType = "application/json"
	client := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(jsons))
	define(t, jsons, ovenKind)
	maps := s.Client.CoreV1().ConfigMaps("default")
	must[*corev1.ConfigMap](t)(maps.Create(t.Context(), configMap("small", nil), metav1.CreateOptions{}))
	annotated := configMap("annotated", nil)
	annotated.Annotations = keys
	patch := func(kind types.PatchType, body string) func() error {
		return func() error {
			options := metav1.PatchOptions{}
			if kind == types.ApplyPatchType {
				options.FieldManager = "test"
			}
			_, err := maps.Patch(t.Context(), "small", kind, []byte(body), options)
			return err
		}
	}
	post := func(path, body string) func() error {
		return func() error { return postJSON(t, client.CoreV1().RESTClient(), path, body) }
	}
	data := `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"small"},"data":{"a":""` + members.String() + `}}`
	for name, call := range map[string]func() error{
		"protobuf": func() error {
			_, err := maps.Create(t.Context(), configMap("big", keys), metav1.CreateOptions{})
			return err
		},
		"annotations in protobuf": func() error {
			_, err := maps.Create(t.Context(), annotated, metav1.CreateOptions{})
			return err
		},
		"JSON": func() error {
			_, err := client.CoreV1().ConfigMaps("default").Create(t.Context(), configMap("big", keys), metav1.CreateOptions{})
			return err
		},
		"merge patch":     patch(types.MergePatchType, data),
		"strategic patch": patch(types.StrategicMergePatchType, data),
		"JSON patch":      patch(types.JSONPatchType, `[{"op":"add","path":"/data","value":{"a":""`+members.String()+`}}]`),
		"applied":         patch(types.ApplyPatchType, data),
		"applied as YAML": patch(types.ApplyPatchType, "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: small\ndata:"+lines.String()),
		"a template's annotations": post("/apis/apps/v1/namespaces/default/deployments", `{"metadata":{"name":"d"},"spec":{"selector":{"matchLabels":{"a":"b"}},"template":{"metadata":{"labels":{"a":"b"},"annotations":{"a":""`+
			members.String()+`}},"spec":{"containers":[{"name":"c","image":"i"}]}}}}`),
		"a container's environment": post("/api/v1/namespaces/default/pods", `{"metadata":{"name":"p"},"spec":{"containers":[{"name":"c","image":"i","env":[{"name":"e"}`+env.String()+`]}]}}`),
		"a custom kind": post("/apis/kitchen.example.com/v1/namespaces/default/ovens", `{"apiVersion":"kitchen.example.com/v1","kind":"Oven","metadata":{"name":"o"},"spec":{"heat":1,"shelves":["a"`+
			strings.ReplaceAll(members.String(), `:""`, "")+`]}}`),
	} {
		begin := time.Now()
		err := call()
		want := int32(http.StatusRequestEntityTooLarge)
		if strings.Contains(name, "protobuf") {
			want = http.StatusBadRequest // the library makes that of what a decoder says
		}
		if status, ok := err.(apierrors.APIStatus); !ok || status.Status().Code != want || !strings.Contains(err.Error(), "at most 32768 are allowed") {
			t.Errorf("%s: %.300v", name, err)
		}
		t.Logf("%s refused in %v", name, time.Since(begin).Round(time.Millisecond))
	}
	if small := must[*corev1.ConfigMap](t)(maps.Get(t.Context(), "small", metav1.GetOptions{})); len(small.Data) > 0 {
		t.Errorf("%d keys were written", len(small.Data))
	}
}

// postJSON sends a body as it is.
func postJSON(t *testing.T, client rest.Interface, path, body string) error {
	t.Helper()
	result := client.Post().AbsPath(path).SetHeader("Content-Type", "application/json").SetHeader("Accept", "application/json").Body([]byte(body)).Do(t.Context())
	return result.Error()
}
