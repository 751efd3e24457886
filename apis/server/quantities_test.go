package server_test

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/apis"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// Quantities with which nothing can compute are refused, in each form of a write,
// before they take the server's memory.
func TestQuantitiesOutOfBounds(t *testing.T) {
	s := servertest.Start(t, nil)
	core := s.Client.CoreV1()
	const huge, tiny = "1e2000000000", "1e-2000000000"
	quota := func(name, hard string) string {
		return `{"kind":"ResourceQuota","apiVersion":"v1","metadata":{"name":"` + name + `"},"spec":{"hard":` + hard + `}}`
	}
	noted := &corev1.ResourceQuota{ObjectMeta: meta("q")}
	noted.Annotations = map[string]string{"text": tiny} // any text may stand there
	must[*corev1.ResourceQuota](t)(core.ResourceQuotas("default").Create(t.Context(), noted, metav1.CreateOptions{}))
	admin := s.LoopbackConfig()
	client := must[*http.Client](t)(rest.HTTPClientFor(admin))
	const quotas = "/api/v1/namespaces/default/resourcequotas"
	pod := `{"kind":"Pod","apiVersion":"v1","metadata":{"name":"p"},"spec":{"containers":[{"name":"a","image":"i","resources":{"limits":{"cpu":"` + tiny + `"}}}]}}`
	info, _ := runtime.SerializerInfoForMediaType(apis.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	message := must[[]byte](t)(runtime.Encode(info.Serializer, &corev1.ResourceQuota{
		TypeMeta: metav1.TypeMeta{Kind: "ResourceQuota", APIVersion: "v1"}, ObjectMeta: meta("q2"),
		Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"pods": resource.MustParse("1234567890123")}},
	}))
	message = bytes.Replace(message, []byte("1234567890123"), []byte(tiny), 1)
	for _, test := range []struct{ name, method, path, contentType, body string }{
		{"create", "POST", quotas, "application/json", quota("q2", `{"pods":"`+huge+`"}`)},
		{"create, without digits", "POST", quotas, "application/json", quota("q2", `{"pods":"e2000000000"}`)},
		{"apply, without digits", "PATCH", quotas + "/q?fieldManager=t", "application/apply-patch+yaml", "kind: ResourceQuota\napiVersion: v1\nmetadata: {name: q}\nspec: {hard: {pods: \" +e2000000000\"}}\n"},
		{"create in YAML", "POST", quotas, "application/yaml", `{kind: ResourceQuota, apiVersion: v1, metadata: {name: q2}, spec: {hard: {pods: "1\x65-2000000000"}}}`},
		{"create in protobuf", "POST", quotas, "application/vnd.kubernetes.protobuf", string(message)},
		{"doubled key", "POST", quotas, "application/json", quota("q2", `{"pods":"`+tiny+`","pods":"1"}`)},
		{"doubled field", "POST", quotas, "application/json", strings.Replace(quota("q2", `{"pods":"`+tiny+`"}`), `"metadata"`, `"spec":{"hard":{"pods":"`+tiny+`"}},"metadata"`, 1)},
		{"replace", "PUT", quotas + "/q", "application/json", quota("q", `{"pods":"`+huge+`"}`)},
		{"status", "PUT", quotas + "/q/status", "application/json", `{"kind":"ResourceQuota","apiVersion":"v1","metadata":{"name":"q"},"status":{"used":{"pods":"` + tiny + `"}}}`},
		{"merge patch", "PATCH", quotas + "/q", "application/merge-patch+json", quota("q", `{"pods":"`+huge+`"}`)},
		{"strategic patch", "PATCH", quotas + "/q", "application/strategic-merge-patch+json", quota("q", `{"pods":"`+huge+`"}`)},
		{"strategic patch, escaped", "PATCH", quotas + "/q", "application/strategic-merge-patch+json", quota("q", `{"pods":"1\u0065-2000000000"}`)},
		{"strategic patch, a parameter that is none", "PATCH", quotas + "/q", "application/strategic-merge-patch+json;x", quota("q", `{"pods":"`+tiny+`"}`)},
		{"JSON patch", "PATCH", quotas + "/q", "application/json-patch+json", `[{"op":"add","path":"/spec","value":{"hard":{"pods":"` + huge + `"}}}]`},
		{"JSON patch, a parameter that is none", "PATCH", quotas + "/q", "application/json-patch+json;x", `[{"op":"add","path":"/spec","value":{"hard":{"pods":"` + tiny + `"}}}]`},
		{"JSON patch that copies", "PATCH", quotas + "/q", "application/json-patch+json", `[{"op":"add","path":"/spec","value":{"hard":{}}},{"op":"copy","from":"/metadata/annotations/text","path":"/spec/hard/pods"}]`},
		{"apply", "PATCH", quotas + "/q?fieldManager=t", "application/apply-patch+yaml", "kind: ResourceQuota\napiVersion: v1\nmetadata: {name: q}\nspec: {hard: {pods: " + huge + "}}\n"},
		{"apply, escaped", "PATCH", quotas + "/q?fieldManager=t", "application/apply-patch+yaml;x", `{kind: ResourceQuota, apiVersion: v1, metadata: {name: q}, spec: {hard: {pods: "1\x65-2000000000"}}}`},
		// What a body says that it is decides what it is decoded to.
		{"a pod for a ConfigMap", "POST", "/api/v1/namespaces/default/configmaps", "application/json", pod},
		{"a pod for a question", "POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", "application/json", pod},
		{"a pod for a binding", "POST", "/api/v1/namespaces/default/pods/p/binding", "application/json", pod},
		{"an annotation of an autoscaler", "POST", "/apis/autoscaling/v1/namespaces/default/horizontalpodautoscalers", "application/json", `{"metadata":{"name":"h","annotations":{"clusterd.local/autoscaling-v2":` +
			`"{\"metrics\":[{\"type\":\"Pods\",\"pods\":{\"metric\":{\"name\":\"m\"},\"target\":{\"type\":\"AverageValue\",\"averageValue\":\"` + tiny + `\"}}}]}"}},"spec":{"maxReplicas":2,"scaleTargetRef":{"kind":"D","name":"d"}}}`},
		{"a resource's name", "POST", "/api/v1/namespaces/default/pods", "application/json", strings.Replace(pod, `{"cpu":"`+tiny+`"}`, `{"cpu":"1","hugepages-`+tiny+`":"1"}`, 1)},
	} {
		req := must[*http.Request](t)(http.NewRequestWithContext(waitContext(t), test.method, admin.Host+test.path, strings.NewReader(test.body)))
		req.Header.Set("Content-Type", test.contentType)
		resp, err := client.Do(req)
		if err != nil {
			t.Errorf("%s: %v", test.name, err)
			continue
		}
		answer, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		code := http.StatusBadRequest // as the library answers what a decoder says of a whole object
		if test.method == "PATCH" || test.name == "a resource's name" {
			code = http.StatusUnprocessableEntity
		}
		if resp.StatusCode != code || !strings.Contains(string(answer), "exponent has to be between -99 and 99") {
			t.Errorf("%s: %d, want %d: %.500s", test.name, resp.StatusCode, code, answer)
		}
	}
	began := time.Now()
	cm := configMap("free", map[string]string{"a": huge})
	cm.Labels = map[string]string{"commit": "12e4567"}
	must[*corev1.ConfigMap](t)(core.ConfigMaps("default").Create(t.Context(), cm, metav1.CreateOptions{}))
	t.Logf("a ConfigMap with that text was made after %s", time.Since(began))
	// A name that reads like a quantity out of bounds, sent as the loops send pods.
	must[*corev1.ServiceAccount](t)(core.ServiceAccounts("default").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: meta("builder"), ImagePullSecrets: []corev1.LocalObjectReference{{Name: "12e4567"}}}, metav1.CreateOptions{}))
	must[*corev1.Pod](t)(core.Pods("default").Create(t.Context(), &corev1.Pod{ObjectMeta: meta("named"), Spec: corev1.PodSpec{
		Containers: []corev1.Container{{Name: "a", Image: "i"}}, ImagePullSecrets: []corev1.LocalObjectReference{{Name: "1e200"}},
	}}, metav1.CreateOptions{}))
	if _, err := core.ResourceQuotas("default").Patch(t.Context(), "q", types.JSONPatchType, []byte(`[{"op":"copy","from":"/metadata/annotations/text","path":"/metadata/annotations/more"}]`), metav1.PatchOptions{}); err != nil {
		t.Errorf("a text copied to where any may stand: %v", err)
	}
}
