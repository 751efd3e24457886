package schedtest_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagemigrationv1 "k8s.io/api/storagemigration/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/yaml"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// spoons is a custom kind in two versions; its verbs say which of them is stored.
const spoons = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: spoons.kitchen.example.com}
spec:
  group: kitchen.example.com
  scope: Namespaced
  names: {plural: spoons, singular: spoon, kind: Spoon}
  versions:
  - {name: v1, served: true, storage: %t, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
  - {name: v2, served: true, storage: %t, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
`

// TestStorageMigration: a custom kind whose storage version changes, until its
// old version can be taken away, and Secrets under a key that is replaced, on a
// real store whose bytes are looked at.
func TestStorageMigration(t *testing.T) {
	members := raftstoretest.New(t, 1, raftstoretest.Steady)
	store := members.Leader()
	key := func(id string) kubestore.SealKey {
		k, err := kubestore.DeriveSealKey(id, []byte("master"))
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	seal, err := kubestore.NewSeal([]kubestore.SealKey{key("one")})
	if err != nil {
		t.Fatal(err)
	}
	l := newLineWith(t, func(c *server.Config) {
		c.Storage = kubestore.NewDecorator(kubestore.Config{Store: store, Cache: true, Transformer: func(r schema.GroupResource) value.Transformer {
			if r == corev1.Resource("secrets") {
				return seal
			}
			return nil
		}})
	})
	custom, err := dynamic.NewForConfig(l.server.LoopbackConfig())
	if err != nil {
		t.Fatal(err)
	}
	definitions := custom.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
	of := func(version string) dynamic.ResourceInterface {
		return custom.Resource(schema.GroupVersionResource{Group: "kitchen.example.com", Version: version, Resource: "spoons"}).Namespace(ns)
	}
	ctx := t.Context()
	// stored is how many objects of a resource the store holds in a form.
	stored := func(resource, form string) (n int) {
		list, err := store.List(ctx, kubestore.DefaultPrefix, raftstore.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, kv := range list.KVs {
			if strings.Contains(kv.Key, "/"+resource+"/") && bytes.Contains(kv.Value, []byte(form)) {
				n++
			}
		}
		return n
	}
	read := func(text string) *unstructured.Unstructured {
		u := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(text), &u.Object); err != nil {
			t.Fatal(err)
		}
		return u
	}
	if _, err := definitions.Create(ctx, read(fmt.Sprintf(spoons, true, false)), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	const many = 7
	for i := range many {
		name := fmt.Sprint("s", i)
		schedtest.Eventually(t, func() string {
			_, err := of("v2").Create(ctx, read("{apiVersion: kitchen.example.com/v2, kind: Spoon, metadata: {name: "+name+"}, size: 3}"), metav1.CreateOptions{})
			if err != nil {
				return err.Error()
			}
			return ""
		})
		if _, err := l.client.CoreV1().Secrets(ns).Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if v1, sealed := stored("spoons", `"apiVersion":"kitchen.example.com/v1"`), stored("secrets", "k8s:enc:clusterd:one:"); v1 != many || sealed < many {
		t.Fatalf("stored: %d spoons of v1, %d secrets under the first key", v1, sealed)
	}

	// The storage version changes, and so does the key.
	update := func(change func(d *unstructured.Unstructured)) error {
		return retry.RetryOnConflict(retry.DefaultBackoff, func() error { // its status is written meanwhile
			d, err := definitions.Get(ctx, "spoons.kitchen.example.com", metav1.GetOptions{})
			if err != nil {
				return err
			}
			change(d)
			_, err = definitions.Update(ctx, d, metav1.UpdateOptions{})
			return err
		})
	}
	if err := update(func(d *unstructured.Unstructured) {
		d.Object["spec"] = read(fmt.Sprintf(spoons, false, true)).Object["spec"]
	}); err != nil {
		t.Fatal(err)
	}
	withoutV1 := func(d *unstructured.Unstructured) {
		spec := d.Object["spec"].(map[string]any)
		spec["versions"] = spec["versions"].([]any)[1:]
	}
	if err := update(withoutV1); err == nil || !strings.Contains(err.Error(), "v1") {
		t.Errorf("a version that the store holds was taken away: %v", err)
	}
	if err := seal.Use([]kubestore.SealKey{key("two"), key("one")}); err != nil {
		t.Fatal(err)
	}
	migrations := l.client.StoragemigrationV1().StorageVersionMigrations()
	for name, resource := range map[string]metav1.GroupResource{
		"spoons": {Group: "kitchen.example.com", Resource: "spoons"}, "secrets": {Resource: "secrets"}, "reviews": {Group: "authentication.k8s.io", Resource: "tokenreviews"},
	} {
		if _, err := migrations.Create(ctx, &storagemigrationv1.StorageVersionMigration{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: storagemigrationv1.StorageVersionMigrationSpec{Resource: resource}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for name, end := range map[string]storagemigrationv1.MigrationConditionType{
		"spoons": storagemigrationv1.MigrationSucceeded, "secrets": storagemigrationv1.MigrationSucceeded, "reviews": storagemigrationv1.MigrationFailed,
	} {
		schedtest.Eventually(t, func() string {
			m, err := migrations.Get(ctx, name, metav1.GetOptions{})
			if err != nil || !meta.IsStatusConditionTrue(m.Status.Conditions, string(end)) {
				return fmt.Sprintf("%s has not %s: %v %v", name, end, m.Status, err)
			}
			return ""
		})
	}
	if v1, v2 := stored("spoons", `"apiVersion":"kitchen.example.com/v1"`), stored("spoons", `"apiVersion":"kitchen.example.com/v2"`); v1 != 0 || v2 != many {
		t.Errorf("stored: %d spoons of v1, %d of v2", v1, v2)
	}
	if one, two := stored("secrets", "k8s:enc:clusterd:one:"), stored("secrets", "k8s:enc:clusterd:two:"); one != 0 || two < many {
		t.Errorf("stored: %d secrets under the old key, %d under the new one", one, two)
	}

	// Now nothing needs v1 any more, nor the old key.
	schedtest.Eventually(t, func() string {
		if err := update(withoutV1); err != nil {
			return err.Error()
		}
		return ""
	})
	if err := seal.Use([]kubestore.SealKey{key("two")}); err != nil {
		t.Fatal(err)
	}
	schedtest.Eventually(t, func() string {
		list, err := of("v2").List(ctx, metav1.ListOptions{})
		if err != nil || len(list.Items) != many || list.Items[0].Object["size"] != int64(3) {
			return fmt.Sprintf("spoons: %v, %v", list, err)
		}
		return ""
	})
	if list, err := l.client.CoreV1().Secrets(ns).List(ctx, metav1.ListOptions{}); err != nil || len(list.Items) < many {
		t.Errorf("secrets: %v", err)
	}
}
