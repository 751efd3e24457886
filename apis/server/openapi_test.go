package server_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

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
