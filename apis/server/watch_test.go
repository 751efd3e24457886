package server_test

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/features"
)

// expect reads events until one is of the wanted type and name.
func expect(t *testing.T, w watch.Interface, kind watch.EventType, name string) {
	t.Helper()
	select {
	case e, ok := <-w.ResultChan():
		if !ok {
			t.Fatalf("watch ended, want %s %s", kind, name)
		}
		obj, isMap := e.Object.(*corev1.ConfigMap)
		if e.Type != kind || isMap && name != "" && obj.Name != name {
			t.Fatalf("got %s %v, want %s %s", e.Type, e.Object, kind, name)
		}
	case <-time.After(testTimeout):
		t.Fatalf("no event, want %s %s", kind, name)
	}
}

func TestWatch(t *testing.T) {
	features.Conforms(t, 98)
	s := servertest.Start(t, nil)
	over := map[string]kubernetes.Interface{"in process": s.Client}
	network, err := kubernetes.NewForConfig(s.Listen(t))
	if err != nil {
		t.Fatal(err)
	}
	over["network"] = network
	for name, client := range over {
		t.Run(name, func(t *testing.T) {
			ns := must[*corev1.Namespace](t)(client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "w-"}}, metav1.CreateOptions{}))
			maps := client.CoreV1().ConfigMaps(ns.Name)
			w := must[watch.Interface](t)(maps.Watch(t.Context(), metav1.ListOptions{LabelSelector: "see=me", ResourceVersion: ns.ResourceVersion}))
			defer w.Stop()
			m := configMap("a", nil)
			m.Labels = map[string]string{"see": "me"}
			must[*corev1.ConfigMap](t)(maps.Create(t.Context(), configMap("unseen", nil), metav1.CreateOptions{}))
			must[*corev1.ConfigMap](t)(maps.Create(t.Context(), m, metav1.CreateOptions{}))
			expect(t, w, watch.Added, "a")
			must[*corev1.ConfigMap](t)(maps.Patch(t.Context(), "a", types.MergePatchType, []byte(`{"data":{"x":"y"}}`), metav1.PatchOptions{}))
			expect(t, w, watch.Modified, "a")
			// Out of the selector is as good as deleted.
			must[*corev1.ConfigMap](t)(maps.Patch(t.Context(), "a", types.MergePatchType, []byte(`{"metadata":{"labels":{"see":"no"}}}`), metav1.PatchOptions{}))
			expect(t, w, watch.Deleted, "a")
			must[*corev1.ConfigMap](t)(maps.Patch(t.Context(), "a", types.MergePatchType, []byte(`{"metadata":{"labels":{"see":"me"}}}`), metav1.PatchOptions{}))
			expect(t, w, watch.Added, "a")
			if err := maps.Delete(t.Context(), "a", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			expect(t, w, watch.Deleted, "a")
		})
	}
}

func TestWatchBookmarks(t *testing.T) {
	s := servertest.Start(t, nil)
	maps := s.Client.CoreV1().ConfigMaps("default")
	must[*corev1.ConfigMap](t)(maps.Create(t.Context(), configMap("a", nil), metav1.CreateOptions{}))
	yes := true
	w := must[watch.Interface](t)(maps.Watch(t.Context(), metav1.ListOptions{
		SendInitialEvents: &yes, AllowWatchBookmarks: true, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan,
	}))
	defer w.Stop()
	expect(t, w, watch.Added, "a")
	select {
	case e := <-w.ResultChan():
		m, ok := e.Object.(*corev1.ConfigMap)
		if e.Type != watch.Bookmark || !ok || m.Annotations[metav1.InitialEventsAnnotationKey] != "true" {
			t.Errorf("got %s %v, want the bookmark that ends the initial events", e.Type, e.Object)
		}
	case <-time.After(testTimeout):
		t.Error("no bookmark")
	}
}

// TestInformer is what schedulers and agents do: a shared informer over the
// in-process transport.
func TestInformer(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	factory := informers.NewSharedInformerFactory(s.ClientFor(t, "system:kube-controller-manager"), 0)
	seen := make(chan string, 10)
	informer := factory.Core().V1().ConfigMaps().Informer()
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) { seen <- obj.(*corev1.ConfigMap).Name },
	}); err != nil {
		t.Fatal(err)
	}
	factory.Start(ctx.Done())
	defer factory.Shutdown()
	defer cancel()
	if !cache.WaitForCacheSync(waitContext(t).Done(), informer.HasSynced) {
		t.Fatal("informer did not sync")
	}
	must[*corev1.ConfigMap](t)(s.Client.CoreV1().ConfigMaps("default").Create(t.Context(), configMap("later", nil), metav1.CreateOptions{}))
	select {
	case name := <-seen:
		if name != "later" {
			t.Errorf("saw %s", name)
		}
	case <-time.After(testTimeout):
		t.Error("informer saw nothing")
	}
}
