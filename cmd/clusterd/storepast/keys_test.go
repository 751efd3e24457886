package storepast

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	crdclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	apistorage "k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

const kitchen = "kitchen.example.com"

// opened has the resources whose storage a server has asked for.
type opened struct {
	mu  sync.Mutex
	all []string
}

func (o *opened) has(resource string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Contains(o.all, resource)
}

// quietServer is a server that knows which folders are empty, and what it has
// opened.
func quietServer(t *testing.T) (*servertest.Server, *opened) {
	t.Helper()
	store := raftstoretest.New(t, 1, nil).Leader()
	o := &opened{}
	decorator := kubestore.NewDecorator(kubestore.Config{Store: store, Cache: true, Origin: server.Caller})
	return servertest.Start(t, func(c *server.Config) {
		c.Storage = func(config *storagebackend.ConfigForResource, prefix string, key func(runtime.Object) (string, error), newFunc, newList func() runtime.Object,
			attrs apistorage.AttrFunc, triggers apistorage.IndexerFuncs, indexers *cache.Indexers,
		) (apistorage.Interface, factory.DestroyFunc, error) {
			o.mu.Lock()
			o.all = append(o.all, config.GroupResource.String())
			o.mu.Unlock()
			return decorator(config, prefix, key, newFunc, newList, attrs, triggers, indexers)
		}
		c.Keys = NewKeys(store)
	}), o
}

func patient(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// define makes a custom kind and waits until it is served.
func define(t *testing.T, s *servertest.Server, plural, kind string) (schema.GroupVersionResource, *crdclient.Clientset) {
	t.Helper()
	client, err := crdclient.NewForConfig(s.LoopbackConfig())
	if err != nil {
		t.Fatal(err)
	}
	keep := true
	definitions := client.ApiextensionsV1().CustomResourceDefinitions()
	made, err := definitions.Create(t.Context(), &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: plural + "." + kitchen},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: kitchen, Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: plural, Kind: kind},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: "v1", Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object", XPreserveUnknownFields: &keep}},
			}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, made.Name+" is established", func(ctx context.Context) bool {
		now, err := definitions.Get(ctx, made.Name, metav1.GetOptions{})
		return err == nil && slices.ContainsFunc(now.Status.Conditions, func(c apiextensionsv1.CustomResourceDefinitionCondition) bool {
			return c.Type == apiextensionsv1.Established && c.Status == apiextensionsv1.ConditionTrue
		})
	})
	return schema.GroupVersionResource{Group: kitchen, Version: "v1", Resource: plural}, client
}

func eventually(t *testing.T, what string, done func(context.Context) bool) {
	t.Helper()
	err := wait.PollUntilContextCancel(patient(t), 5*time.Millisecond, true, func(ctx context.Context) (bool, error) { return done(ctx), nil })
	if err != nil {
		t.Fatalf("not within time: %s", what)
	}
}

func clients(t *testing.T, config *rest.Config) (metadata.Interface, dynamic.Interface) {
	t.Helper()
	meta, err := metadata.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	json := rest.CopyConfig(config)
	json.ContentType, json.AcceptContentTypes = "application/json", "application/json"
	objects, err := dynamic.NewForConfig(json)
	if err != nil {
		t.Fatal(err)
	}
	return meta, objects
}

// TestQuietKinds: caches of a kind without objects are filled without its storage,
// and see the first object and its end as those of any kind.
func TestQuietKinds(t *testing.T) {
	t.Parallel()
	s, o := quietServer(t)
	ovens, _ := define(t, s, "ovens", "Oven")
	meta, objects := clients(t, s.LoopbackConfig())
	// Nobody may have asked for a kind before it was established.
	eventually(t, "the kind is served", func(ctx context.Context) bool {
		list, err := meta.Resource(ovens).List(ctx, metav1.ListOptions{})
		return err == nil && list.ResourceVersion != "" && len(list.Items) == 0
	})
	list, err := objects.Resource(ovens).Namespace("default").List(t.Context(), metav1.ListOptions{})
	if err != nil || list.GetKind() != "OvenList" || list.GetAPIVersion() != kitchen+"/v1" || list.GetResourceVersion() == "" || len(list.Items) > 0 {
		t.Fatalf("%v %v", list, err)
	}
	informers := []cache.SharedIndexInformer{
		metadatainformer.NewSharedInformerFactory(meta, 0).ForResource(ovens).Informer(),
		dynamicinformer.NewDynamicSharedInformerFactory(objects, 0).ForResource(ovens).Informer(),
	}
	ctx := patient(t)
	for _, informer := range informers {
		go informer.RunWithContext(ctx)
		if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
			t.Fatal("a cache was not filled")
		}
	}
	if o.has("ovens." + kitchen) {
		t.Error("caches of a kind without objects have opened its storage")
	}
	oven := &unstructured.Unstructured{Object: map[string]any{"apiVersion": kitchen + "/v1", "kind": "Oven", "metadata": map[string]any{"name": "a"}}}
	if _, err := objects.Resource(ovens).Namespace("default").Create(t.Context(), oven, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for i, informer := range informers {
		eventually(t, "the first object is known", func(context.Context) bool {
			_, found, _ := informer.GetStore().GetByKey("default/a")
			return found
		})
		if !o.has("ovens." + kitchen) {
			t.Errorf("informer %d has an object of a storage that was not opened", i)
		}
	}
	if err := objects.Resource(ovens).Namespace("default").Delete(t.Context(), "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, informer := range informers {
		eventually(t, "the object is gone", func(context.Context) bool { return len(informer.GetStore().List()) == 0 })
	}
}

// TestQuietWatch: a watch of a kind without objects ends with the kind and with its
// time, and one from outside is the library's.
func TestQuietWatch(t *testing.T) {
	t.Parallel()
	s, o := quietServer(t)
	pans, definitions := define(t, s, "pans", "Pan")
	meta, objects := clients(t, s.LoopbackConfig())
	var list *metav1.PartialObjectMetadataList
	eventually(t, "the kind is served", func(ctx context.Context) bool {
		var err error
		list, err = meta.Resource(pans).List(ctx, metav1.ListOptions{})
		return err == nil && list.ResourceVersion != ""
	})
	second := int64(1)
	w, err := objects.Resource(pans).Watch(t.Context(), metav1.ListOptions{ResourceVersion: list.ResourceVersion, AllowWatchBookmarks: true, TimeoutSeconds: &second})
	if err != nil {
		t.Fatal(err)
	}
	var events []watch.Event
	for e := range w.ResultChan() {
		events = append(events, e)
	}
	if len(events) != 1 || events[0].Type != watch.Bookmark || events[0].Object.GetObjectKind().GroupVersionKind() != pans.GroupVersion().WithKind("Pan") {
		t.Errorf("a watch over its time had %v", events)
	}
	if w, err = meta.Resource(pans).Watch(t.Context(), metav1.ListOptions{ResourceVersion: list.ResourceVersion}); err != nil {
		t.Fatal(err)
	}
	if o.has("pans." + kitchen) {
		t.Error("the storage was opened")
	}
	outside, _ := clients(t, s.Listen(t))
	if _, err := outside.Resource(pans).List(t.Context(), metav1.ListOptions{}); err != nil || !o.has("pans."+kitchen) {
		t.Errorf("a list from outside: %v, storage opened: %t", err, o.has("pans."+kitchen))
	}
	if err := definitions.ApiextensionsV1().CustomResourceDefinitions().Delete(t.Context(), "pans."+kitchen, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	select {
	case e, open := <-w.ResultChan():
		if open {
			t.Errorf("an event of a kind that is gone: %v", e)
		}
	case <-patient(t).Done():
		t.Error("the watch goes on after its kind")
	}
}

// TestKeys: a folder is empty until a key below it is written, and a watch knows
// what was written since its revision.
func TestKeys(t *testing.T) {
	t.Parallel()
	store := raftstoretest.New(t, 1, nil).Leader()
	keys, ctx := NewKeys(store), patient(t)
	put := func(key string) {
		t.Helper()
		if _, err := store.Txn(ctx, mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: kubestore.DefaultPrefix + key, Value: []byte("x")}}}); err != nil {
			t.Fatal(err)
		}
	}
	put("/a.example.com/ovensmore/x")
	empty, now, err := keys.Empty(ctx, "/a.example.com/ovens")
	if err != nil || !empty || now == 0 {
		t.Fatalf("%t %d %v", empty, now, err)
	}
	written, err := keys.Watch(ctx, "/a.example.com/ovens", now)
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-written:
		t.Fatal("nothing was written")
	default:
	}
	put("/a.example.com/ovens/default/a")
	select {
	case <-written:
	case <-ctx.Done():
		t.Fatal("the watch did not notice")
	}
	if empty, _, err := keys.Empty(ctx, "/a.example.com/ovens"); err != nil || empty {
		t.Errorf("%t %v", empty, err)
	}
	if _, err := keys.Watch(ctx, "/a.example.com/ovens", now); !errors.Is(err, server.ErrWritten) {
		t.Errorf("a watch from before the write: %v", err)
	}
}
