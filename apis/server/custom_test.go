package server_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	crdclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/features"
)

// ovenKind is a custom kind with all that such a kind can have.
const ovenKind = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: ovens.kitchen.example.com}
spec:
  group: kitchen.example.com
  scope: Namespaced
  names: {plural: ovens, singular: oven, kind: Oven, shortNames: [ov], categories: [kitchen]}
  versions:
  - name: v1
    served: true
    storage: true
    subresources:
      status: {}
      scale: {specReplicasPath: .spec.racks, statusReplicasPath: .status.racks, labelSelectorPath: .status.selector}
    selectableFields: [{jsonPath: .spec.fuel}]
    additionalPrinterColumns:
    - {name: Fuel, type: string, jsonPath: .spec.fuel}
    - {name: Heat, type: integer, jsonPath: .spec.heat}
    schema:
      openAPIV3Schema:
        type: object
        description: Oven bakes.
        properties:
          spec:
            type: object
            required: [heat]
            x-kubernetes-validations:
            - {rule: "self.fuel != 'gas' || self.heat <= 300", message: "gas reaches 300 degrees"}
            - {rule: "self.fuel == oldSelf.fuel", message: "fuel is immutable"}
            properties:
              fuel: {type: string, default: wood, enum: [wood, gas, coal]}
              heat: {type: integer, minimum: 1, maximum: 900, description: Heat in degrees.}
              racks: {type: integer, default: 1}
              shelves: {type: array, items: {type: string}, x-kubernetes-list-type: set}
          status:
            type: object
            properties:
              racks: {type: integer}
              selector: {type: string}
`

var ovensV1 = schema.GroupVersionResource{Group: "kitchen.example.com", Version: "v1", Resource: "ovens"}

// define makes a custom kind and waits until it is served.
func define(t *testing.T, config *rest.Config, manifest string) *apiextensionsv1.CustomResourceDefinition {
	t.Helper()
	var definition apiextensionsv1.CustomResourceDefinition
	if err := yaml.UnmarshalStrict([]byte(manifest), &definition); err != nil {
		t.Fatal(err)
	}
	client := must[*crdclient.Clientset](t)(crdclient.NewForConfig(config)).ApiextensionsV1().CustomResourceDefinitions()
	must[*apiextensionsv1.CustomResourceDefinition](t)(client.Create(t.Context(), &definition, metav1.CreateOptions{}))
	var last *apiextensionsv1.CustomResourceDefinition
	err := wait.PollUntilContextCancel(waitContext(t), 5*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		var err error
		last, err = client.Get(ctx, definition.Name, metav1.GetOptions{})
		return err == nil && slices.ContainsFunc(last.Status.Conditions, func(c apiextensionsv1.CustomResourceDefinitionCondition) bool {
			return c.Type == apiextensionsv1.Established && c.Status == apiextensionsv1.ConditionTrue
		}), err
	})
	if err != nil {
		t.Fatalf("%s is not established: %v\n%+v", definition.Name, err, last.Status)
	}
	// What serves the kind reads of it a moment later.
	served := must[*dynamic.DynamicClient](t)(dynamic.NewForConfig(config))
	for _, version := range definition.Spec.Versions {
		if !version.Served {
			continue
		}
		resource := schema.GroupVersionResource{Group: definition.Spec.Group, Version: version.Name, Resource: definition.Spec.Names.Plural}
		comesTrue(t, resource.String()+" to be served", func(ctx context.Context) bool {
			_, err := served.Resource(resource).List(ctx, metav1.ListOptions{Limit: 1})
			return err == nil
		})
	}
	return last
}

func oven(name string, spec map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "kitchen.example.com/v1", "kind": "Oven",
		"metadata": map[string]any{"name": name}, "spec": spec,
	}}
}

func TestCustomKind(t *testing.T) {
	features.Conforms(t, 33)
	s := servertest.Start(t, nil)
	define(t, jsonConfig(s), ovenKind)
	ovens := must[*dynamic.DynamicClient](t)(dynamic.NewForConfig(jsonConfig(s))).Resource(ovensV1).Namespace("default")
	ctx := t.Context()

	// Defaults, pruning, refusals.
	made := must[*unstructured.Unstructured](t)(ovens.Create(ctx, oven("a", map[string]any{"heat": int64(250), "colour": "red"}), metav1.CreateOptions{}))
	if fuel, _, _ := unstructured.NestedString(made.Object, "spec", "fuel"); fuel != "wood" {
		t.Errorf("fuel is %q, want the default", fuel)
	}
	if colour, ok, _ := unstructured.NestedString(made.Object, "spec", "colour"); ok {
		t.Errorf("the unknown field was kept: %q", colour)
	}
	if made.GetGeneration() != 1 {
		t.Errorf("generation is %d", made.GetGeneration())
	}
	for want, spec := range map[string]map[string]any{
		"spec.heat: Required value":                 {"fuel": "coal"},
		"should be less than or equal to 900":       {"heat": int64(901)},
		`Unsupported value: "steam"`:                {"heat": int64(1), "fuel": "steam"},
		"gas reaches 300 degrees":                   {"heat": int64(301), "fuel": "gas"},
		"must be of type integer":                   {"heat": "hot"},
		`spec.shelves[1]: Duplicate value: "upper"`: {"heat": int64(1), "shelves": []any{"upper", "upper"}},
	} {
		if _, err := ovens.Create(ctx, oven("bad", spec), metav1.CreateOptions{}); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v; want %q", spec, err, want)
		}
	}
	strict := metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}
	if _, err := ovens.Create(ctx, oven("bad", map[string]any{"heat": int64(1), "colour": "red"}), strict); !apierrors.IsBadRequest(err) || !strings.Contains(err.Error(), `unknown field "spec.colour"`) {
		t.Errorf("an unknown field under strict validation: %v", err)
	}
	if _, err := ovens.Patch(ctx, "a", types.MergePatchType, []byte(`{"spec":{"fuel":"coal"}}`), metav1.PatchOptions{}); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "fuel is immutable") {
		t.Errorf("change of an immutable field: %v", err)
	}

	// Status and scale.
	patched := must[*unstructured.Unstructured](t)(ovens.Patch(ctx, "a", types.MergePatchType, []byte(`{"status":{"racks":2,"selector":"x=y"},"spec":{"heat":1}}`), metav1.PatchOptions{}, "status"))
	if heat, _, _ := unstructured.NestedInt64(patched.Object, "spec", "heat"); heat != 250 || patched.GetGeneration() != 1 {
		t.Errorf("a write of the status changed the spec: %v", patched.Object)
	}
	scale := must[*unstructured.Unstructured](t)(ovens.Patch(ctx, "a", types.MergePatchType, []byte(`{"spec":{"replicas":4}}`), metav1.PatchOptions{}, "scale"))
	if n, _, _ := unstructured.NestedInt64(scale.Object, "status", "replicas"); n != 2 || scale.GetKind() != "Scale" {
		t.Errorf("scale says %v", scale.Object)
	}
	now := must[*unstructured.Unstructured](t)(ovens.Get(ctx, "a", metav1.GetOptions{}))
	if racks, _, _ := unstructured.NestedInt64(now.Object, "spec", "racks"); racks != 4 || now.GetGeneration() != 2 {
		t.Errorf("scaled to %d racks, generation %d", racks, now.GetGeneration())
	}

	// Selection by a field of its own.
	must[*unstructured.Unstructured](t)(ovens.Create(ctx, oven("b", map[string]any{"heat": int64(1), "fuel": "gas"}), metav1.CreateOptions{}))
	list := must[*unstructured.UnstructuredList](t)(ovens.List(ctx, metav1.ListOptions{FieldSelector: "spec.fuel=gas"}))
	if len(list.Items) != 1 || list.Items[0].GetName() != "b" {
		t.Errorf("selected by fuel: %v", list.Items)
	}

	// Server-side apply, with a conflict.
	apply := func(manager string, heat int64) error {
		_, err := ovens.Apply(ctx, "c", oven("c", map[string]any{"heat": heat}), metav1.ApplyOptions{FieldManager: manager})
		return err
	}
	if err := apply("one", 5); err != nil {
		t.Error(err)
	}
	if err := apply("two", 6); !apierrors.IsConflict(err) || !strings.Contains(err.Error(), `"one"`) {
		t.Errorf("apply over another's field: %v", err)
	}

	// A finalizer holds the object.
	must[*unstructured.Unstructured](t)(ovens.Patch(ctx, "b", types.MergePatchType, []byte(`{"metadata":{"finalizers":["example.com/hold"]}}`), metav1.PatchOptions{}))
	if err := ovens.Delete(ctx, "b", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if held := must[*unstructured.Unstructured](t)(ovens.Get(ctx, "b", metav1.GetOptions{})); held.GetDeletionTimestamp() == nil {
		t.Error("deleted, but not marked")
	}
	must[*unstructured.Unstructured](t)(ovens.Patch(ctx, "b", types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}))
	if _, err := ovens.Get(ctx, "b", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("released, but there: %v", err)
	}

	// With the kind its objects go.
	definitions := must[*crdclient.Clientset](t)(crdclient.NewForConfig(s.LoopbackConfig())).ApiextensionsV1().CustomResourceDefinitions()
	if err := definitions.Delete(ctx, "ovens.kitchen.example.com", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	err := wait.PollUntilContextCancel(waitContext(t), 5*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		_, err := definitions.Get(ctx, "ovens.kitchen.example.com", metav1.GetOptions{})
		return apierrors.IsNotFound(err), nil
	})
	if err != nil {
		t.Fatalf("the definition is not gone: %v", err)
	}
	define(t, s.LoopbackConfig(), ovenKind)
	if list := must[*unstructured.UnstructuredList](t)(ovens.List(ctx, metav1.ListOptions{})); len(list.Items) > 0 {
		t.Errorf("of the old kind there is left: %v", list.Items)
	}
}

// jsonConfig is for objects without a Go type.
func jsonConfig(s *servertest.Server) *rest.Config {
	config := s.LoopbackConfig()
	config.ContentType, config.AcceptContentTypes = "application/json", "application/json"
	return config
}

// TestCustomKindEverywhere looks for a custom kind where clients look for kinds.
func TestCustomKindEverywhere(t *testing.T) {
	features.Conforms(t, 26)
	s := servertest.Start(t, nil)
	config := s.Listen(t)
	k := newKubectl(t, config)
	define(t, s.LoopbackConfig(), ovenKind)
	discovered(t, s, "kitchen.example.com/v1")
	k.steps(t, []step{
		{args: "api-resources --api-group=kitchen.example.com", out: `ovens +ov +kitchen.example.com/v1 +true +Oven`},
		{args: "create -f -", stdin: `{"apiVersion": "kitchen.example.com/v1", "kind": "Oven", "metadata": {"name": "a"}, "spec": {"heat": 3}}`, out: "oven.kitchen.example.com/a created"},
		{args: "get ov", out: `NAME +FUEL +HEAT\na +wood +3`},
		{args: "get kitchen -o name", out: "oven.kitchen.example.com/a"},
		{args: "explain oven.spec.heat", out: "Heat in degrees"},
		{args: "scale oven/a --replicas=7", out: "scaled"},
		{args: "apply --server-side -f -", stdin: `{"apiVersion": "kitchen.example.com/v1", "kind": "Oven", "metadata": {"name": "b"}, "spec": {"heat": 3}}`, out: "serverside-applied"},
		{args: "apply -f -", stdin: `{"apiVersion": "kitchen.example.com/v1", "kind": "Oven", "metadata": {"name": "c"}, "spec": {"heat": 3}}`, out: "created"},
		{args: "apply -f -", stdin: `{"apiVersion": "kitchen.example.com/v1", "kind": "Oven", "metadata": {"name": "c"}, "spec": {"heat": 4}}`, out: "configured"},
		{args: "delete oven --all", out: `"a" deleted`},
	})
	for path, want := range map[string]string{
		"/openapi/v2": "com.example.kitchen.v1.Oven",
		"/openapi/v3": "apis/kitchen.example.com/v1",
		"/apis":       "kitchen.example.com",
	} {
		err := wait.PollUntilContextCancel(waitContext(t), 50*time.Millisecond, true, func(ctx context.Context) (bool, error) {
			body, err := s.Client.Discovery().RESTClient().Get().AbsPath(path).SetHeader("Accept", "application/json").DoRaw(ctx)
			return err == nil && strings.Contains(string(body), want), nil
		})
		if err != nil {
			t.Errorf("%s does not speak of %s", path, want)
		}
	}
}

// discovered waits until a group version is in aggregated discovery.
func discovered(t *testing.T, s *servertest.Server, version string) {
	t.Helper()
	err := wait.PollUntilContextCancel(waitContext(t), 5*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		groups, err := s.Client.Discovery().ServerGroups()
		if err != nil {
			return false, nil
		}
		return slices.ContainsFunc(groups.Groups, func(g metav1.APIGroup) bool {
			return slices.ContainsFunc(g.Versions, func(v metav1.GroupVersionForDiscovery) bool { return v.GroupVersion == version })
		}), nil
	})
	if err != nil {
		t.Fatalf("%s is not discovered: %v", version, err)
	}
}
