package namespace

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/leaktest"
	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/schedtest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// server serves configmaps and secrets; failing groups can be set.
type server struct {
	*fake.Clientset
	mu     sync.Mutex
	broken map[schema.GroupVersion]error
	empty  bool
}

func (s *server) Discovery() discovery.DiscoveryInterfaces {
	return kinds{s.Clientset.Discovery(), s}
}

type kinds struct {
	discovery.DiscoveryInterfaces
	server *server
}

func (k kinds) ServerPreferredResourcesWithContext(context.Context) ([]*metav1.APIResourceList, error) {
	k.server.mu.Lock()
	defer k.server.mu.Unlock()
	if k.server.empty {
		return nil, nil
	}
	lists := []*metav1.APIResourceList{{GroupVersion: "v1", APIResources: []metav1.APIResource{
		{Name: "pods", Kind: "Pod", Namespaced: true, Verbs: metav1.Verbs{"list", "delete"}},
		{Name: "configmaps", Kind: "ConfigMap", Namespaced: true, Verbs: metav1.Verbs{"list", "delete"}},
		{Name: "secrets", Kind: "Secret", Namespaced: true, Verbs: metav1.Verbs{"list", "delete"}},
		{Name: "namespaces", Kind: "Namespace", Verbs: metav1.Verbs{"list", "delete"}},
	}}}
	if len(k.server.broken) > 0 {
		return lists, &discovery.ErrGroupDiscoveryFailed{Groups: k.server.broken}
	}
	return lists, nil
}

func object(kind, name string, finalizers ...string) *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: kind},
		ObjectMeta: metav1.ObjectMeta{Namespace: "doomed", Name: name, Finalizers: finalizers},
	}
}

func start(t *testing.T, s *server, objects ...runtime.Object) (*metadatafake.FakeMetadataClient, *schedtest.Cluster) {
	t.Helper()
	now := metav1.Now()
	c := schedtest.New(t, &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{Name: "doomed", DeletionTimestamp: &now, Finalizers: []string{"keeps-the-fake-from-removing-it"}},
		Spec:       corev1.NamespaceSpec{Finalizers: []corev1.FinalizerName{"other.example/finalizer", corev1.FinalizerKubernetes}},
	})
	s.Clientset = c.Client
	scheme := metadatafake.NewTestScheme()
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	md := metadatafake.NewSimpleMetadataClient(scheme, objects...)
	md.PrependReactor("delete", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
		a := action.(clienttesting.DeleteAction)
		obj, err := md.Tracker().Get(a.GetResource(), a.GetNamespace(), a.GetName())
		if err != nil {
			return true, nil, err
		}
		o := obj.(*metav1.PartialObjectMetadata)
		if len(o.Finalizers) == 0 {
			return false, nil, nil
		}
		o.DeletionTimestamp = &now
		return true, nil, md.Tracker().Update(a.GetResource(), o, a.GetNamespace())
	})
	env := loop.Env{
		Client: s, Informers: informers.NewSharedInformerFactory(c.Client, 0),
		Events: loop.NewEvents(s, clock.RealClock{}), Clock: clock.RealClock{},
	}
	l := New(env, md)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	env.Informers.StartWithContext(ctx)
	wg.Go(func() {
		if err := l.Run(ctx); err != nil {
			t.Errorf("loop ended with %v", err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait(); env.Informers.Shutdown() })
	return md, c
}

func get(t *testing.T, c *schedtest.Cluster) *corev1.Namespace {
	t.Helper()
	ns, err := c.Client.CoreV1().Namespaces().Get(t.Context(), "doomed", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return ns
}

func finalized(t *testing.T, c *schedtest.Cluster) string {
	if got := get(t, c).Spec.Finalizers; len(got) != 1 || got[0] != "other.example/finalizer" {
		return fmt.Sprintf("finalizers %v, want the other's alone", got)
	}
	return ""
}

func says(t *testing.T, c *schedtest.Cluster, kind corev1.NamespaceConditionType, message string) string {
	for _, cond := range get(t, c).Status.Conditions {
		if cond.Type == kind && cond.Status == corev1.ConditionTrue && cond.Message == message {
			return ""
		}
	}
	return fmt.Sprintf("conditions %+v, want %s: %s", get(t, c).Status.Conditions, kind, message)
}

// TestPodsFirst: as long as a pod is there, nothing else goes.
func TestPodsFirst(t *testing.T) {
	s := &server{}
	md, c := start(t, s, object("Pod", "p", "holds.example/it"), object("ConfigMap", "a"), object("Secret", "c"))
	schedtest.Eventually(t, func() string {
		return says(t, c, corev1.NamespaceContentRemaining, "Some resources are remaining: pods has 1 resource instances")
	})
	pods := corev1.SchemeGroupVersion.WithResource("pods")
	for _, resource := range []string{"configmaps", "secrets"} {
		list, err := md.Resource(corev1.SchemeGroupVersion.WithResource(resource)).Namespace("doomed").List(t.Context(), metav1.ListOptions{})
		if err != nil || len(list.Items) != 1 {
			t.Errorf("%s while a pod is there: %v %v", resource, list, err)
		}
	}
	if err := md.Tracker().Delete(pods, "doomed", "p"); err != nil {
		t.Fatal(err)
	}
	schedtest.Eventually(t, func() string { return finalized(t, c) })
}

func TestEmptiesAndFinalizes(t *testing.T) {
	s := &server{}
	md, c := start(t, s, object("ConfigMap", "a"), object("ConfigMap", "b"), object("Secret", "c"))
	schedtest.Eventually(t, func() string { return finalized(t, c) })
	list, err := md.Resource(corev1.SchemeGroupVersion.WithResource("configmaps")).Namespace("doomed").List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) != 0 {
		t.Errorf("left %v, %v", list, err)
	}
	if get(t, c).Status.Phase != corev1.NamespaceTerminating {
		t.Error("phase is not Terminating")
	}
}

func TestWaitsForFinalizers(t *testing.T) {
	s := &server{}
	md, c := start(t, s, object("ConfigMap", "held", "example.com/hold"))
	schedtest.Eventually(t, func() string {
		return says(t, c, corev1.NamespaceFinalizersRemaining, "Some content in the namespace has finalizers remaining: example.com/hold in 1 resource instances")
	})
	schedtest.Eventually(t, func() string {
		return says(t, c, corev1.NamespaceContentRemaining, "Some resources are remaining: configmaps has 1 resource instances")
	})
	if finalized(t, c) == "" {
		t.Fatal("finalized with content left")
	}
	if err := md.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("configmaps"), "doomed", "held"); err != nil {
		t.Fatal(err)
	}
	schedtest.Eventually(t, func() string { return finalized(t, c) })
}

// A group that does not answer keeps the namespace, but not the others' content.
func TestUnavailableGroup(t *testing.T) {
	s := &server{broken: map[schema.GroupVersion]error{{Group: "metrics.k8s.io", Version: "v1"}: errors.New("unavailable")}}
	md, c := start(t, s, object("Secret", "c"))
	schedtest.Eventually(t, func() string {
		return says(t, c, corev1.NamespaceDeletionDiscoveryFailure, "Discovery failed for some groups, 1 remaining: metrics.k8s.io/v1: unavailable")
	})
	list, err := md.Resource(corev1.SchemeGroupVersion.WithResource("secrets")).Namespace("doomed").List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) != 0 {
		t.Errorf("left %v, %v", list, err)
	}
	if finalized(t, c) == "" {
		t.Fatal("finalized though a group did not answer")
	}
	s.mu.Lock()
	s.broken = nil
	s.mu.Unlock()
	schedtest.Eventually(t, func() string { return finalized(t, c) })
}

// A server that names no kinds is a fault, not an empty namespace.
func TestNoKindsAtAll(t *testing.T) {
	s := &server{empty: true}
	_, c := start(t, s, object("Secret", "c"))
	schedtest.Eventually(t, func() string {
		return says(t, c, corev1.NamespaceDeletionDiscoveryFailure, "Discovery failed for some groups, 1 remaining: the server names no kinds at all")
	})
	if finalized(t, c) == "" {
		t.Fatal("finalized without having looked")
	}
}
