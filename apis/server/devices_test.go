package server_test

import (
	"os"
	"path/filepath"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"

	"github.com/clusterd/clusterd/apis"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/features"
)

// TestDeviceKinds: each kind of resource.k8s.io answers every verb, and warns of
// nothing but the effect of a taint that is not there yet; so does
// StorageVersionMigration.
func TestDeviceKinds(t *testing.T) {
	features.Conforms(t, 90, 356, 357, 358, 359, 360)
	s := servertest.Start(t, nil)
	client := must[*dynamic.DynamicClient](t)(dynamic.NewForConfig(s.LoopbackConfig()))
	for _, kind := range apis.Kinds() {
		devices := kind.GVK.Group == "resource.k8s.io"
		if !devices && kind.GVK.Group != "storagemigration.k8s.io" {
			continue
		}
		t.Run(kind.Resource, func(t *testing.T) {
			text := must[[]byte](t)(os.ReadFile(filepath.Join("..", "testdata", kind.GVK.Kind+".yaml")))
			obj := &unstructured.Unstructured{}
			if err := yaml.Unmarshal(text, &obj.Object); err != nil {
				t.Fatal(err)
			}
			status := obj.Object["status"]
			delete(obj.Object, "status")
			all := client.Resource(kind.GVK.GroupVersion().WithResource(kind.Resource))
			var c dynamic.ResourceInterface = all
			path := "/apis/" + kind.GVK.Group + "/v1/" + kind.Resource
			if kind.Namespaced {
				obj.SetNamespace("default")
				c, path = all.Namespace("default"), "/apis/resource.k8s.io/v1/namespaces/default/"+kind.Resource
			}
			body := string(must[[]byte](t)(obj.MarshalJSON()))
			code, refusal, warnings := raw(t, s.LoopbackConfig(), "POST", path+"?dryRun=All", body)
			if code != 201 || len(warnings) > 0 {
				t.Fatalf("dry run: %d %s, warnings %q", code, refusal.Message, warnings)
			}

			seen := must[watch.Interface](t)(all.Watch(t.Context(), metav1.ListOptions{}))
			defer seen.Stop()
			name := obj.GetName()
			made := must[*unstructured.Unstructured](t)(c.Create(t.Context(), obj, metav1.CreateOptions{}))
			if event := <-seen.ResultChan(); event.Type != watch.Added {
				t.Errorf("watched %s %v, want ADDED", event.Type, event.Object)
			}
			made.SetLabels(map[string]string{"a": "b"})
			must[*unstructured.Unstructured](t)(c.Update(t.Context(), made, metav1.UpdateOptions{}))
			must[*unstructured.Unstructured](t)(c.Patch(t.Context(), name, types.MergePatchType, []byte(`{"metadata":{"labels":{"c":"d"}}}`), metav1.PatchOptions{}))
			must[*unstructured.Unstructured](t)(c.Apply(t.Context(), name, &unstructured.Unstructured{Object: map[string]any{
				"apiVersion": kind.GVK.Group + "/v1", "kind": kind.GVK.Kind, "metadata": map[string]any{"name": name, "labels": map[string]any{"e": "f"}},
			}}, metav1.ApplyOptions{FieldManager: "test"}))
			read := must[*unstructured.Unstructured](t)(c.Get(t.Context(), name, metav1.GetOptions{}))
			if labels := read.GetLabels(); len(labels) != 3 {
				t.Errorf("labels %v, want those of update, patch and apply", labels)
			}
			if kind.Status != nil {
				read.Object["status"] = status
				written := must[*unstructured.Unstructured](t)(c.UpdateStatus(t.Context(), read, metav1.UpdateOptions{}))
				results, _, _ := unstructured.NestedSlice(written.Object, "status", "allocation", "devices", "results")
				conditions, _, _ := unstructured.NestedSlice(written.Object, "status", "conditions")
				if len(results)+len(conditions) != 1 {
					t.Errorf("status %v, want the allocation or the condition", written.Object["status"])
				}
			}
			if list := must[*unstructured.UnstructuredList](t)(all.List(t.Context(), metav1.ListOptions{LabelSelector: "c=d"})); len(list.Items) != 1 {
				t.Errorf("%d in the list, want 1", len(list.Items))
			}
			if err := c.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "c=d"}); err != nil {
				t.Fatal(err)
			}
			if list := must[*unstructured.UnstructuredList](t)(all.List(t.Context(), metav1.ListOptions{})); len(list.Items) != 0 {
				t.Errorf("%d are left, want 0", len(list.Items))
			}
		})
	}
}
