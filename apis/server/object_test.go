package server_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/apis"
	"github.com/clusterd/clusterd/apis/server/extend"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/features"
)

func TestStartToReady(t *testing.T) {
	begin := time.Now()
	s := servertest.Start(t, nil)
	t.Logf("start to ready: %v", time.Since(begin))
	list := must[*corev1.NamespaceList](t)(s.Client.CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{}))
	var names []string
	for _, ns := range list.Items {
		names = append(names, ns.Name)
	}
	if diff := cmp.Diff([]string{"default", "kube-node-lease", "kube-public", "kube-system"}, names); diff != "" {
		t.Error(diff)
	}
}

func TestCreateReadUpdateDelete(t *testing.T) {
	features.Shows(t, 41)
	s := servertest.Start(t, nil)
	maps := s.Client.CoreV1().ConfigMaps("default")

	made := must[*corev1.ConfigMap](t)(maps.Create(t.Context(), configMap("a", map[string]string{"k": "1"}), metav1.CreateOptions{}))
	if made.UID == "" || made.ResourceVersion == "" || made.CreationTimestamp.IsZero() {
		t.Errorf("system fields are missing: %+v", made.ObjectMeta)
	}
	read := must[*corev1.ConfigMap](t)(maps.Get(t.Context(), "a", metav1.GetOptions{}))
	if diff := cmp.Diff(made, read); diff != "" {
		t.Errorf("answer of POST and GET differ:\n%s", diff)
	}
	if _, err := maps.Create(t.Context(), configMap("a", nil), metav1.CreateOptions{}); !apierrors.IsAlreadyExists(err) {
		t.Errorf("second create: %v, want AlreadyExists", err)
	}

	read.Data["k"] = "2"
	updated := must[*corev1.ConfigMap](t)(maps.Update(t.Context(), read, metav1.UpdateOptions{}))
	if _, err := maps.Update(t.Context(), read, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
		t.Errorf("update of an old version: %v, want Conflict", err)
	}
	unchanged := must[*corev1.ConfigMap](t)(maps.Update(t.Context(), updated, metav1.UpdateOptions{}))
	if unchanged.ResourceVersion != updated.ResourceVersion {
		t.Error("an update that changes nothing moved the resource version")
	}

	wrong := types.UID("another")
	if err := maps.Delete(t.Context(), "a", metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &wrong}}); !apierrors.IsConflict(err) {
		t.Errorf("delete of another uid: %v, want Conflict", err)
	}
	if err := maps.Delete(t.Context(), "a", metav1.DeleteOptions{}); err != nil {
		t.Error(err)
	}
	if _, err := maps.Get(t.Context(), "a", metav1.GetOptions{}); !apierrors.IsNotFound(err) || err.Error() != `configmaps "a" not found` {
		t.Errorf("get after delete: %v", err)
	}
}

func TestGenerateName(t *testing.T) {
	s := servertest.Start(t, nil)
	made := must[*corev1.ConfigMap](t)(s.Client.CoreV1().ConfigMaps("default").Create(t.Context(),
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "x-"}}, metav1.CreateOptions{}))
	if !strings.HasPrefix(made.Name, "x-") || len(made.Name) != len("x-")+5 {
		t.Errorf("generated name %q", made.Name)
	}
}

func TestFinalizersHoldADeletion(t *testing.T) {
	s := servertest.Start(t, nil)
	maps := s.Client.CoreV1().ConfigMaps("default")
	held := configMap("held", nil)
	held.Finalizers = []string{"example.com/hold"}
	must[*corev1.ConfigMap](t)(maps.Create(t.Context(), held, metav1.CreateOptions{}))
	if err := maps.Delete(t.Context(), "held", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	still := must[*corev1.ConfigMap](t)(maps.Get(t.Context(), "held", metav1.GetOptions{}))
	if still.DeletionTimestamp == nil {
		t.Error("no deletion timestamp")
	}
	must[*corev1.ConfigMap](t)(maps.Patch(t.Context(), "held", types.JSONPatchType, []byte(`[{"op":"remove","path":"/metadata/finalizers"}]`), metav1.PatchOptions{}))
	if _, err := maps.Get(t.Context(), "held", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("after the last finalizer went: %v, want NotFound", err)
	}
}

func TestDeleteCollection(t *testing.T) {
	s := servertest.Start(t, nil)
	maps := s.Client.CoreV1().ConfigMaps("default")
	for i := range 5 {
		m := configMap(fmt.Sprint("m", i), nil)
		m.Labels = map[string]string{"odd": fmt.Sprint(i%2 == 1)}
		must[*corev1.ConfigMap](t)(maps.Create(t.Context(), m, metav1.CreateOptions{}))
	}
	if err := maps.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "odd=true"}); err != nil {
		t.Fatal(err)
	}
	left := must[*corev1.ConfigMapList](t)(maps.List(t.Context(), metav1.ListOptions{}))
	if len(left.Items) != 3 {
		t.Errorf("%d left, want 3", len(left.Items))
	}
}

func TestPatchTypes(t *testing.T) {
	s := servertest.Start(t, nil)
	maps := s.Client.CoreV1().ConfigMaps("default")
	must[*corev1.ConfigMap](t)(maps.Create(t.Context(), configMap("p", map[string]string{"a": "1", "b": "2"}), metav1.CreateOptions{}))
	for _, test := range []struct {
		name string
		kind types.PatchType
		body string
		want map[string]string
	}{
		{"json", types.JSONPatchType, `[{"op":"replace","path":"/data/a","value":"9"}]`, map[string]string{"a": "9", "b": "2"}},
		{"merge", types.MergePatchType, `{"data":{"b":null,"c":"3"}}`, map[string]string{"a": "9", "c": "3"}},
		{"strategic", types.StrategicMergePatchType, `{"data":{"d":"4"}}`, map[string]string{"a": "9", "c": "3", "d": "4"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := must[*corev1.ConfigMap](t)(maps.Patch(t.Context(), "p", test.kind, []byte(test.body), metav1.PatchOptions{}))
			if diff := cmp.Diff(test.want, got.Data); diff != "" {
				t.Error(diff)
			}
		})
	}
	t.Run("a test that fails", func(t *testing.T) {
		_, err := maps.Patch(t.Context(), "p", types.JSONPatchType, []byte(`[{"op":"test","path":"/data/a","value":"no"}]`), metav1.PatchOptions{})
		if !apierrors.IsInvalid(err) {
			t.Errorf("%v, want Invalid", err)
		}
	})
	t.Run("strategic merge knows list keys", func(t *testing.T) {
		deployments := s.Client.AppsV1().Deployments("default")
		must[*appsv1.Deployment](t)(deployments.Create(t.Context(), deployment("web", 1), metav1.CreateOptions{}))
		got := must[*appsv1.Deployment](t)(deployments.Patch(t.Context(), "web", types.StrategicMergePatchType,
			[]byte(`{"spec":{"template":{"spec":{"containers":[{"name":"side","image":"side:1"}]}}}}`), metav1.PatchOptions{}))
		if n := len(got.Spec.Template.Spec.Containers); n != 2 {
			t.Errorf("%d containers, want 2", n)
		}
	})
}

func TestServerSideApply(t *testing.T) {
	s := servertest.Start(t, nil)
	maps := s.Client.CoreV1().ConfigMaps("default")
	apply := func(manager, body string, force bool) (*corev1.ConfigMap, error) {
		return maps.Patch(t.Context(), "conf", types.ApplyPatchType, []byte(body), metav1.PatchOptions{FieldManager: manager, Force: &force})
	}
	one := `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"conf"},"data":{"shared":"one","own":"1"}}`
	must[*corev1.ConfigMap](t)(apply("one", one, false))

	_, err := apply("two", `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"conf"},"data":{"shared":"two"}}`, false)
	if !apierrors.IsConflict(err) || !strings.Contains(err.Error(), `conflict with "one": .data.shared`) {
		t.Fatalf("apply by another manager: %v, want a conflict that names manager and field", err)
	}
	forced := must[*corev1.ConfigMap](t)(apply("two", `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"conf"},"data":{"shared":"two"}}`, true))
	if diff := cmp.Diff(map[string]string{"shared": "two", "own": "1"}, forced.Data); diff != "" {
		t.Error(diff)
	}
	// Manager one no longer names own: it owned it alone, so it goes.
	gone := must[*corev1.ConfigMap](t)(apply("one", `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"conf"}}`, false))
	if diff := cmp.Diff(map[string]string{"shared": "two"}, gone.Data); diff != "" {
		t.Error(diff)
	}
	var managers []string
	for _, entry := range gone.ManagedFields {
		managers = append(managers, entry.Manager)
	}
	if diff := cmp.Diff([]string{"two"}, managers); diff != "" {
		t.Errorf("managers:\n%s", diff)
	}
}

func TestStatusIsWrittenThroughItsSubresourceOnly(t *testing.T) {
	s := servertest.Start(t, nil)
	deployments := s.Client.AppsV1().Deployments("default")
	d := deployment("web", 2)
	d.Status.Replicas = 7
	made := must[*appsv1.Deployment](t)(deployments.Create(t.Context(), d, metav1.CreateOptions{}))

	made.Status.Replicas = 2
	three := int32(3)
	made.Spec.Replicas = &three
	written := must[*appsv1.Deployment](t)(deployments.UpdateStatus(t.Context(), made, metav1.UpdateOptions{}))
	if written.Status.Replicas != 2 {
		t.Errorf("status.replicas %d, want 2", written.Status.Replicas)
	}
	applied := must[*appsv1.Deployment](t)(deployments.Patch(t.Context(), "web", types.ApplyPatchType,
		[]byte(`{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"web","labels":{"x":"y"}},"status":{"replicas":99}}`),
		metav1.PatchOptions{FieldManager: "m"}))
	for _, entry := range applied.ManagedFields {
		if entry.Manager == "m" && strings.Contains(string(entry.FieldsV1.Raw), "f:status") {
			t.Errorf("applying the main resource took ownership of the status: %s", entry.FieldsV1.Raw)
		}
	}
}

func TestScale(t *testing.T) {
	s := servertest.Start(t, nil)
	deployments := s.Client.AppsV1().Deployments("default")
	must[*appsv1.Deployment](t)(deployments.Create(t.Context(), deployment("web", 2), metav1.CreateOptions{}))
	scale := must[*autoscalingv1.Scale](t)(deployments.GetScale(t.Context(), "web", metav1.GetOptions{}))
	if scale.Spec.Replicas != 2 || scale.Status.Selector != "app=web" {
		t.Errorf("scale: %+v", scale)
	}
	scale.Spec.Replicas = 5
	scaled := must[*autoscalingv1.Scale](t)(deployments.UpdateScale(t.Context(), "web", scale, metav1.UpdateOptions{}))
	if scaled.Spec.Replicas != 5 {
		t.Errorf("scaled to %d", scaled.Spec.Replicas)
	}
	if _, err := deployments.UpdateScale(t.Context(), "web", scale, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
		t.Errorf("scale of an old version: %v, want Conflict", err)
	}
	scaled.Spec.Replicas = -1
	if _, err := deployments.UpdateScale(t.Context(), "web", scaled, metav1.UpdateOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("negative scale: %v, want Invalid", err)
	}
}

func TestDryRunStoresNothing(t *testing.T) {
	s := servertest.Start(t, nil)
	maps := s.Client.CoreV1().ConfigMaps("default")
	dry := []string{metav1.DryRunAll}
	made := must[*corev1.ConfigMap](t)(maps.Create(t.Context(), configMap("ghost", nil), metav1.CreateOptions{DryRun: dry}))
	if made.UID == "" {
		t.Error("a dry run answers with the whole object")
	}
	if _, err := maps.Get(t.Context(), "ghost", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("get after a dry run: %v, want NotFound", err)
	}
	kept := must[*corev1.ConfigMap](t)(maps.Create(t.Context(), configMap("kept", nil), metav1.CreateOptions{}))
	must[*corev1.ConfigMap](t)(maps.Patch(t.Context(), "kept", types.MergePatchType, []byte(`{"data":{"a":"b"}}`), metav1.PatchOptions{DryRun: dry}))
	if err := maps.Delete(t.Context(), "kept", metav1.DeleteOptions{DryRun: dry}); err != nil {
		t.Error(err)
	}
	after := must[*corev1.ConfigMap](t)(maps.Get(t.Context(), "kept", metav1.GetOptions{}))
	if diff := cmp.Diff(kept, after); diff != "" {
		t.Errorf("a dry run changed the object:\n%s", diff)
	}
}

func TestSelectorsAndChunks(t *testing.T) {
	s := servertest.Start(t, nil)
	maps := s.Client.CoreV1().ConfigMaps("default")
	for i := range 10 {
		m := configMap(fmt.Sprint("m", i), nil)
		m.Labels = map[string]string{"third": fmt.Sprint(i%3 == 0)}
		must[*corev1.ConfigMap](t)(maps.Create(t.Context(), m, metav1.CreateOptions{}))
	}
	for _, test := range []struct {
		name    string
		options metav1.ListOptions
		want    int
	}{
		{"label", metav1.ListOptions{LabelSelector: "third=true"}, 4},
		{"label set", metav1.ListOptions{LabelSelector: "third in (false)"}, 6},
		{"name", metav1.ListOptions{FieldSelector: "metadata.name=m3"}, 1},
		{"not name", metav1.ListOptions{FieldSelector: "metadata.name!=m3"}, 9},
		{"other namespace", metav1.ListOptions{FieldSelector: "metadata.namespace=x"}, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			list := must[*corev1.ConfigMapList](t)(maps.List(t.Context(), test.options))
			if len(list.Items) != test.want {
				t.Errorf("%d items, want %d", len(list.Items), test.want)
			}
		})
	}
	if _, err := maps.List(t.Context(), metav1.ListOptions{FieldSelector: "spec.nothing=1"}); !apierrors.IsBadRequest(err) {
		t.Errorf("unknown field selector: %v, want BadRequest", err)
	}
	seen, token := 0, ""
	for range 5 {
		list := must[*corev1.ConfigMapList](t)(maps.List(t.Context(), metav1.ListOptions{Limit: 3, Continue: token}))
		seen += len(list.Items)
		if token = list.Continue; token == "" {
			break
		}
	}
	if seen != 10 {
		t.Errorf("chunks of 3 gave %d items, want 10", seen)
	}

	createPod(t, s.Client, pod("placed"), "n1")
	createPod(t, s.Client, pod("waiting"), "")
	pods := must[*corev1.PodList](t)(s.Client.CoreV1().Pods("").List(t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=n1"}))
	if len(pods.Items) != 1 || pods.Items[0].Name != "placed" {
		t.Errorf("pods of node n1: %v", pods.Items)
	}
}

// raw sends body with the given content type and returns status code, parsed
// Status (if it is one) and Warning headers.
func raw(t *testing.T, config *rest.Config, method, path, body string) (int, metav1.Status, []string) {
	t.Helper()
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), method, config.Host+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var status metav1.Status
	_ = json.NewDecoder(resp.Body).Decode(&status) // other answers are not looked at
	return resp.StatusCode, status, resp.Header["Warning"]
}

func TestRefusalsSayWhy(t *testing.T) {
	features.Shows(t, 39, 61, 70, 72, 73)
	s := servertest.Start(t, nil)
	config := s.LoopbackConfig()
	const maps = "/api/v1/namespaces/default/configmaps"
	for _, test := range []struct {
		name, method, path, body string
		code                     int
		message                  string
	}{
		{"unknown field, strict", "POST", maps + "?fieldValidation=Strict",
			`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"x"},"dat":{"a":"b"}}`, 400, `strict decoding error: unknown field "dat"`},
		{"duplicate field, strict", "POST", maps + "?fieldValidation=Strict",
			`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"x"},"data":{"a":"b"},"data":{}}`, 400, `strict decoding error: duplicate field "data"`},
		{"wrong kind", "POST", maps,
			`{"apiVersion":"v1","kind":"Secret","metadata":{"name":"x"}}`, 400, `Secret in version "v1" cannot be handled as a ConfigMap`},
		{"wrong version", "POST", "/api/v1/namespaces/default/pods",
			`{"apiVersion":"v2","kind":"Pod","metadata":{"name":"x"}}`, 400, `no kind "Pod" is registered for version "v2"`},
		{"wrong namespace", "POST", maps,
			`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"x","namespace":"other"}}`, 400, `the namespace of the provided object does not match the namespace sent on the request`},
		{"bad JSON", "POST", maps, `{"apiVersion":`, 400, `unexpected end of JSON input`},
		{"bad quantity", "POST", "/api/v1/namespaces/default/pods",
			`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"x"},"spec":{"containers":[{"name":"c","image":"i","resources":{"limits":{"cpu":"much"}}}]}}`, 400, `quantities must match the regular expression`},
		{"bad name", "POST", maps,
			`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"No Name"}}`, 422, `metadata.name: Invalid value: "No Name"`},
		{"no name", "POST", maps,
			`{"apiVersion":"v1","kind":"ConfigMap","metadata":{}}`, 422, `name or generateName is required`},
		{"no containers", "POST", "/api/v1/namespaces/default/pods",
			`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"x"},"spec":{}}`, 422, `Pod "x" is invalid: spec.containers: Required value`},
		{"unknown resource", "GET", "/api/v1/namespaces/default/nothings", "", 404, `the server could not find the requested resource`},
		{"unknown path", "GET", "/nosuch", "", 404, `the server could not find the requested resource`},
	} {
		t.Run(test.name, func(t *testing.T) {
			code, status, _ := raw(t, config, test.method, test.path, test.body)
			if code != test.code || !strings.Contains(status.Message, test.message) {
				t.Errorf("%d %q, want %d with %q", code, status.Message, test.code, test.message)
			}
		})
	}
	t.Run("nothing was stored", func(t *testing.T) {
		config := s.LoopbackConfig()
		config.Impersonate.UserName = "jane"
		if code, _, _ := raw(t, config, "POST", maps, `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"x"}}`); code != 403 {
			t.Errorf("forbidden: %d", code)
		}
		left := must[*corev1.ConfigMapList](t)(s.Client.CoreV1().ConfigMaps("").List(t.Context(), metav1.ListOptions{}))
		pods := must[*corev1.PodList](t)(s.Client.CoreV1().Pods("").List(t.Context(), metav1.ListOptions{}))
		if len(left.Items)+len(pods.Items) > 0 {
			t.Errorf("stored: %v %v", left.Items, pods.Items)
		}
	})
	t.Run("unknown field, warn", func(t *testing.T) {
		code, _, warnings := raw(t, config, "POST", maps+"?fieldValidation=Warn", `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"w"},"dat":{}}`)
		if code != 201 || len(warnings) != 1 || !strings.Contains(warnings[0], `unknown field \"dat\"`) {
			t.Errorf("%d %v", code, warnings)
		}
	})
}

func TestTables(t *testing.T) {
	s := servertest.Start(t, nil)
	createPod(t, s.Client, pod("one"), "n1")
	var table metav1.Table
	err := s.Client.CoreV1().RESTClient().Get().Namespace("default").Resource("pods").
		SetHeader("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").Do(t.Context()).Into(&table)
	if err != nil {
		t.Fatal(err)
	}
	var columns []string
	for _, c := range table.ColumnDefinitions {
		if c.Priority == 0 {
			columns = append(columns, c.Name)
		}
	}
	if diff := cmp.Diff([]string{"Name", "Ready", "Status", "Restarts", "Age"}, columns); diff != "" {
		t.Error(diff)
	}
	if len(table.Rows) != 1 || fmt.Sprint(table.Rows[0].Cells[:3]) != "[one 0/1 Pending]" {
		t.Errorf("rows: %+v", table.Rows)
	}
}

// TestRaw is the API without a client: what curl sends and gets.
func TestRaw(t *testing.T) {
	s := servertest.Start(t, nil)
	config := s.LoopbackConfig()
	t.Run("a pod", func(t *testing.T) {
		features.Shows(t, 14, 71, 82, 85)
		code, _, _ := raw(t, config, "POST", "/api/v1/namespaces/default/pods?includeUninitialized=true",
			`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"hello"},"spec":{"containers":[{"name":"c","image":"i"}]}}`)
		p := must[*corev1.Pod](t)(s.Client.CoreV1().Pods("default").Get(t.Context(), "hello", metav1.GetOptions{}))
		if code != 201 || p.Status.Phase != corev1.PodPending || p.UID == "" || p.CreationTimestamp.IsZero() ||
			p.Spec.RestartPolicy != corev1.RestartPolicyAlways || p.Spec.DNSPolicy != corev1.DNSClusterFirst {
			t.Errorf("%d %+v", code, p)
		}
	})
	t.Run("namespaces and names", func(t *testing.T) {
		features.Shows(t, 76)
		body := `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"same"}}`
		for path, want := range map[string]int{"/api/v1/namespaces/default/configmaps": 201, "/api/v1/namespaces/kube-public/configmaps": 201} {
			if code, _, _ := raw(t, config, "POST", path, body); code != want {
				t.Errorf("%s: %d", path, code)
			}
		}
		code, status, _ := raw(t, config, "POST", "/api/v1/namespaces/default/configmaps", body)
		if code != 409 || status.Reason != metav1.StatusReasonAlreadyExists {
			t.Errorf("again: %d %s", code, status.Reason)
		}
	})
	t.Run("groups", func(t *testing.T) {
		features.Shows(t, 36)
		for path, want := range map[string]string{"/api/v1": "pods", "/apis/apps/v1": "deployments"} {
			var list metav1.APIResourceList
			if err := s.Client.Discovery().RESTClient().Get().AbsPath(path).SetHeader("Accept", "application/json").Do(t.Context()).Into(&list); err != nil {
				t.Fatal(err)
			}
			if !slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == want }) {
				t.Errorf("%s does not list %s", path, want)
			}
		}
	})
}

func TestWireFormats(t *testing.T) {
	features.Shows(t, 75)
	s := servertest.Start(t, nil)
	want := configMap("x", map[string]string{"a": "b"})
	want.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}
	for _, mediaType := range []string{runtime.ContentTypeJSON, runtime.ContentTypeYAML, runtime.ContentTypeProtobuf} {
		info, ok := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), mediaType)
		if !ok {
			t.Fatalf("no serializer of %s", mediaType)
		}
		body := must[[]byte](t)(runtime.Encode(info.Serializer, want))
		rest := s.Client.CoreV1().RESTClient()
		if err := rest.Post().Namespace("default").Resource("configmaps").SetHeader("Content-Type", mediaType).Body(body).Do(t.Context()).Error(); err != nil {
			t.Fatalf("%s: %v", mediaType, err)
		}
		got := must[*corev1.ConfigMap](t)(s.Client.CoreV1().ConfigMaps("default").Get(t.Context(), "x", metav1.GetOptions{}))
		if diff := cmp.Diff(want.Data, got.Data); diff != "" {
			t.Errorf("%s:\n%s", mediaType, diff)
		}
		if err := s.Client.CoreV1().ConfigMaps("default").Delete(t.Context(), "x", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestEveryKind lists, pages and watches all there is in discovery.
func TestEveryKind(t *testing.T) {
	features.Shows(t, 77)
	s := servertest.Start(t, nil)
	lists := must[[]*metav1.APIResourceList](t)(s.Client.Discovery().ServerPreferredResources())
	kinds := 0
	for _, list := range lists {
		for _, r := range list.APIResources {
			if !slices.Contains(r.Verbs, "list") {
				continue
			}
			queries := []string{"", "?limit=1", "?resourceVersion=0"}
			if slices.Contains(r.Verbs, "watch") { // what nodes and pods use is not kept
				kinds++
				queries = append(queries, "?watch=1&timeoutSeconds=1&resourceVersion=1")
			}
			path := "/apis/" + list.GroupVersion + "/" + r.Name
			if list.GroupVersion == "v1" {
				path = "/api/v1/" + r.Name
			}
			for _, query := range queries {
				t.Run(path+query, func(t *testing.T) {
					t.Parallel()
					if code, status, _ := raw(t, s.LoopbackConfig(), "GET", path+query, ""); code != 200 {
						t.Errorf("%d %s", code, status.Message)
					}
				})
			}
		}
	}
	// Beside ours, the kinds by which users add more.
	want := len(apis.Kinds()) + len(extend.Versions)
	for _, k := range apis.Kinds() {
		for _, view := range k.Views {
			if k.ViewGVK(view).Group != k.GVK.Group {
				want++ // two groups prefer a version each
			}
		}
	}
	if kinds != want {
		t.Errorf("discovery offers %d kinds that are kept, want %d", kinds, want)
	}
}

func TestStoreWithoutLeaderIsNotReady(t *testing.T) {
	s := servertest.Start(t, nil)
	s.Memory.SetReady(servertest.ErrUnready)
	if code, _, _ := raw(t, s.LoopbackConfig(), "GET", "/readyz", ""); code != 500 {
		t.Errorf("/readyz answers %d, want 500", code)
	}
	if code, _, _ := raw(t, s.LoopbackConfig(), "GET", "/livez", ""); code != 200 {
		t.Errorf("/livez answers %d, want 200: a store without a leader is no reason to restart", code)
	}
	_, err := s.Client.CoreV1().ConfigMaps("default").Create(t.Context(), configMap("x", nil), metav1.CreateOptions{})
	if !apierrors.IsServiceUnavailable(err) && !apierrors.IsInternalError(err) {
		t.Errorf("create: %v", err)
	}
	s.Memory.SetReady(nil)
	if code, _, _ := raw(t, s.LoopbackConfig(), "GET", "/readyz", ""); code != 200 {
		t.Errorf("/readyz answers %d after the leader came back, want 200", code)
	}
}
