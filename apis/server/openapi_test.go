package server_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	crdclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/kube-openapi/pkg/handler3"

	"github.com/clusterd/clusterd/apis"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// TestOpenAPIDocuments asks for the document of each group version under the
// address that is listed, which is built only then, and for one of none.
func TestOpenAPIDocuments(t *testing.T) {
	s := servertest.Start(t, nil)
	config := s.Listen(t)
	client := must[*http.Client](t)(rest.HTTPClientFor(config))
	get := func(path string) *http.Response {
		t.Helper()
		request := must[*http.Request](t)(http.NewRequestWithContext(t.Context(), http.MethodGet, config.Host+path, nil))
		request.Header.Set("Accept", "application/json")
		response := must[*http.Response](t)(client.Do(request))
		t.Cleanup(func() { response.Body.Close() })
		return response
	}
	var list handler3.OpenAPIV3Discovery
	if err := json.NewDecoder(get("/openapi/v3").Body).Decode(&list); err != nil {
		t.Fatal(err)
	}
	kinds := map[string][]string{}
	for _, kind := range apis.Kinds() {
		path := "apis/" + kind.GVK.GroupVersion().String()
		if kind.GVK.Group == "" {
			path = "api/" + kind.GVK.Version
		}
		kinds[path] = append(kinds[path], kind.GVK.Kind)
	}
	for path, names := range kinds {
		response := get(list.Paths[path].ServerRelativeURL)
		var document struct {
			Paths      map[string]any
			Components struct{ Schemas map[string]any }
		}
		if err := json.NewDecoder(response.Body).Decode(&document); err != nil || response.StatusCode != http.StatusOK {
			t.Errorf("%s at %q: status %d: %v", path, list.Paths[path].ServerRelativeURL, response.StatusCode, err)
			continue
		}
		// The address that is listed leads to one that can be cached without a limit.
		if hash := response.Request.URL.Query().Get("hash"); !strings.Contains(response.Header.Get("Etag"), hash) || hash == "" ||
			!strings.Contains(response.Header.Get("Cache-Control"), "immutable") {
			t.Errorf("%s: hash %q, etag %q, cache control %q", path, hash, response.Header.Get("Etag"), response.Header.Get("Cache-Control"))
		}
		for name := range document.Paths {
			if !strings.HasPrefix(name, "/"+path+"/") {
				t.Errorf("%s speaks of %s", path, name)
			}
		}
		for _, kind := range names {
			found := false
			for name := range document.Components.Schemas {
				found = found || strings.HasSuffix(name, "."+kind)
			}
			if !found {
				t.Errorf("%s has no schema of %s", path, kind)
			}
		}
	}
	if response := get("/openapi/v3/apis/absent.example.com/v1"); response.StatusCode != http.StatusNotFound {
		t.Errorf("an unknown group: status %d", response.StatusCode)
	}
}

// TestOpenAPIAskedOnce: the library, which asks once a second all servers of this process
// that it knows for their documents of version 3, knows none but the one in front.
func TestOpenAPIAskedOnce(t *testing.T) {
	s := servertest.Start(t, nil)
	answer := httptest.NewRecorder()
	s.Library().ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/openapi/v3", nil))
	var list handler3.OpenAPIV3Discovery
	if err := json.Unmarshal(answer.Body.Bytes(), &list); err != nil || answer.Code != http.StatusOK {
		t.Fatalf("status %d: %v", answer.Code, err)
	}
	// The path without a name is that of a server which has documents of version 2 alone.
	for _, path := range []string{"", "api/v1", "apis/apps/v1", "apis/apiextensions.k8s.io/v1"} {
		if _, ok := list.Paths[path]; ok {
			t.Errorf("the library lists %q, so it asks the server of it for more once a second", path)
		}
	}
	if n := s.Behind(); n > 0 {
		t.Errorf("the library sees %d servers behind the front", n)
	}
	if _, ok := list.Paths["apis/apiregistration.k8s.io/v1"]; !ok {
		t.Errorf("the library lists %v, without what is in front", list.Paths)
	}
}

// TestCustomDocuments follows the schema of a custom kind through both versions of
// documents: when the kind has come, when it has another schema, when it is gone.
func TestCustomDocuments(t *testing.T) {
	s := servertest.Start(t, nil)
	get := func(ctx context.Context, path string) string {
		body, err := s.Client.Discovery().RESTClient().Get().RequestURI(path).SetHeader("Accept", "application/json").DoRaw(ctx)
		if err != nil {
			return err.Error()
		}
		return string(body)
	}
	const group = "apis/kitchen.example.com/v1"
	listed := func(ctx context.Context) string {
		var list handler3.OpenAPIV3Discovery
		if err := json.Unmarshal([]byte(get(ctx, "/openapi/v3")), &list); err != nil {
			return ""
		}
		return list.Paths[group].ServerRelativeURL
	}
	// both waits until each version of the documents has text, or has not.
	both := func(step, text string, want bool) {
		t.Helper()
		for _, version := range []string{"v2", "v3"} {
			err := wait.PollUntilContextCancel(waitContext(t), 10*time.Millisecond, true, func(ctx context.Context) (bool, error) {
				path := "/openapi/v2"
				if version == "v3" {
					if path = listed(ctx); path == "" {
						return !want, nil
					}
				}
				return strings.Contains(get(ctx, path), text) == want, nil
			})
			if err != nil {
				t.Errorf("%s: version %s has %q: %v, want %v", step, version, text, !want, want)
			}
		}
	}
	both("before", "Heat in degrees.", false)
	definition := define(t, s.LoopbackConfig(), ovenKind)
	both("a new kind", "Heat in degrees.", true)
	before := listed(t.Context())

	definitions := must[*crdclient.Clientset](t)(crdclient.NewForConfig(s.LoopbackConfig())).ApiextensionsV1().CustomResourceDefinitions()
	patch := `[{"op":"replace","path":"/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/heat/description","value":"Heat in kelvins."}]`
	must[*apiextensionsv1.CustomResourceDefinition](t)(definitions.Patch(t.Context(), definition.Name, types.JSONPatchType, []byte(patch), metav1.PatchOptions{}))
	both("another schema", "Heat in kelvins.", true)
	both("another schema", "Heat in degrees.", false)
	if after := listed(t.Context()); after == before {
		t.Errorf("%s is listed for both schemas", after)
	}
	if err := definitions.Delete(t.Context(), definition.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	both("a kind that is gone", "Heat in kelvins.", false)
	if path := listed(t.Context()); path != "" {
		t.Errorf("%s is listed after its only kind was deleted", path)
	}
	if body := get(t.Context(), "/openapi/v3/"+group); strings.Contains(body, "Heat") {
		t.Errorf("the document is there after its only kind was deleted: %s", body)
	}
}
