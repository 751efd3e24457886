package gc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/clusterd/clusterd/leaktest"
	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/schedtest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// client serves pods, replicasets, deployments and nodes; the group of
// widgets does not answer.
type client struct {
	*fake.Clientset
	gadgets *atomic.Bool // nil: they are not served, nor do widgets answer
}

func (c client) Discovery() discovery.DiscoveryInterfaces {
	return kinds{c.Clientset.Discovery(), c.gadgets}
}

type kinds struct {
	discovery.DiscoveryInterfaces
	gadgets *atomic.Bool
}

func (k kinds) ServerPreferredResourcesWithContext(context.Context) ([]*metav1.APIResourceList, error) {
	verbs := metav1.Verbs{"list", "watch", "delete"}
	if k.gadgets != nil {
		all := []*metav1.APIResourceList{{GroupVersion: "v1", APIResources: []metav1.APIResource{{Name: "pods", Kind: "Pod", Namespaced: true, Verbs: verbs}}}}
		if k.gadgets.Load() {
			all = append(all, &metav1.APIResourceList{GroupVersion: "example.com/v1", APIResources: []metav1.APIResource{{Name: "gadgets", Kind: "Gadget", Namespaced: true, Verbs: verbs}}})
		}
		return all, nil
	}
	return []*metav1.APIResourceList{
			{GroupVersion: "v1", APIResources: []metav1.APIResource{
				{Name: "pods", Kind: "Pod", Namespaced: true, Verbs: verbs}, {Name: "pods/log", Kind: "Pod", Namespaced: true},
				{Name: "nodes", Kind: "Node", Verbs: verbs}, {Name: "events", Kind: "Event", Namespaced: true, Verbs: verbs},
			}},
			{GroupVersion: "apps/v1", APIResources: []metav1.APIResource{
				{Name: "replicasets", Kind: "ReplicaSet", Namespaced: true, Verbs: verbs},
				{Name: "deployments", Kind: "Deployment", Namespaced: true, Verbs: verbs},
			}},
		}, &discovery.ErrGroupDiscoveryFailed{Groups: map[schema.GroupVersion]error{
			{Group: "example.com", Version: "v1"}: fmt.Errorf("the server is currently unable to handle the request"),
		}}
}

// thing builds an object "ns/Kind/name"; its UID is that text. Cluster-scoped
// kinds have no ns.
func thing(text string, owners ...string) *metav1.PartialObjectMetadata {
	ns, kind, name := split(text)
	o := &metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{APIVersion: version(kind), Kind: kind},
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, UID: types.UID(text), ResourceVersion: "1"},
	}
	block := true
	for _, owner := range owners {
		_, kind, name := split(owner)
		o.OwnerReferences = append(o.OwnerReferences, metav1.OwnerReference{
			APIVersion: version(kind), Kind: kind, Name: name, UID: types.UID(owner), BlockOwnerDeletion: &block,
		})
	}
	return o
}

func split(text string) (ns, kind, name string) {
	parts := strings.Split(text, "/")
	return parts[0], parts[1], parts[2]
}

func version(kind string) string {
	switch kind {
	case "Pod", "Node":
		return "v1"
	case "Widget", "Gadget":
		return "example.com/v1"
	}
	return "apps/v1"
}

func resourceOf(text string) schema.GroupVersionResource {
	_, kind, _ := split(text)
	gv, _ := schema.ParseGroupVersion(version(kind))
	return gv.WithResource(strings.ToLower(kind) + "s")
}

// world runs a collector over the objects.
type world struct {
	t      *testing.T
	client *metadatafake.FakeMetadataClient
}

func newWorld(t *testing.T, objects ...*metav1.PartialObjectMetadata) *world {
	t.Helper()
	return newSharingWorld(t, nil, objects...)
}

// newSharingWorld runs a collector beside loops that share informers with it.
func newSharingWorld(t *testing.T, shared Shared, objects ...*metav1.PartialObjectMetadata) *world {
	t.Helper()
	scheme := metadatafake.NewTestScheme()
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	var list []runtime.Object
	for _, o := range objects {
		list = append(list, o)
	}
	w := &world{t: t, client: metadatafake.NewSimpleMetadataClient(scheme, list...)}
	// What the server does that the fake does not: finalizers and propagation.
	w.client.PrependReactor("delete", "*", w.delete)
	w.client.PrependReactor("patch", "*", w.patched)

	cs := client{fake.NewSimpleClientset(), nil}
	l := New(loop.Env{Client: cs, Events: loop.NewEvents(cs, clock.RealClock{}), Clock: clock.RealClock{}}, w.client, shared)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := l.Run(ctx); err != nil {
			t.Errorf("loop ended with %v", err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	// What is deleted between an informer's list and its watch is lost with the fake.
	schedtest.Eventually(t, func() string {
		watched := map[string]bool{"pods": shared != nil}
		for _, action := range w.client.Actions() {
			if action.GetVerb() == "watch" {
				watched[action.GetResource().Resource] = true
			}
		}
		for _, resource := range []string{"pods", "nodes", "replicasets", "deployments"} {
			if !watched[resource] {
				return resource + " are not watched"
			}
		}
		return ""
	})
	return w
}

func (w *world) delete(action clienttesting.Action) (bool, runtime.Object, error) {
	a := action.(clienttesting.DeleteActionImpl)
	obj, err := w.client.Tracker().Get(a.GetResource(), a.GetNamespace(), a.GetName())
	if err != nil {
		return true, nil, err
	}
	o := obj.(*metav1.PartialObjectMetadata)
	if p := a.DeleteOptions.PropagationPolicy; p != nil {
		switch *p {
		case metav1.DeletePropagationForeground:
			o.Finalizers = append(o.Finalizers, metav1.FinalizerDeleteDependents)
		case metav1.DeletePropagationOrphan:
			o.Finalizers = append(o.Finalizers, metav1.FinalizerOrphanDependents)
		}
	}
	if len(o.Finalizers) == 0 {
		return true, nil, w.client.Tracker().Delete(a.GetResource(), a.GetNamespace(), a.GetName())
	}
	now := metav1.Now()
	o.DeletionTimestamp = &now
	return true, nil, w.client.Tracker().Update(a.GetResource(), o, a.GetNamespace())
}

// patched applies a merge patch and lets a deleted object without finalizers go.
func (w *world) patched(action clienttesting.Action) (bool, runtime.Object, error) {
	handled, obj, err := clienttesting.ObjectReaction(w.client.Tracker())(action)
	if o, ok := obj.(*metav1.PartialObjectMetadata); ok && err == nil && o.DeletionTimestamp != nil && len(o.Finalizers) == 0 {
		err = w.client.Tracker().Delete(action.GetResource(), o.Namespace, o.Name)
	}
	return handled, obj, err
}

func (w *world) remove(text string, policy metav1.DeletionPropagation) {
	w.t.Helper()
	ns, _, name := split(text)
	err := w.client.Resource(resourceOf(text)).Namespace(ns).Delete(w.t.Context(), name, metav1.DeleteOptions{PropagationPolicy: &policy})
	if err != nil {
		w.t.Fatal(err)
	}
}

// left lists what exists, with owners in brackets, sorted.
func (w *world) left() string {
	var out []string
	for _, kind := range []string{"/Pod/", "/Node/", "/ReplicaSet/", "/Deployment/"} {
		list, err := w.client.Resource(resourceOf(kind)).List(w.t.Context(), metav1.ListOptions{})
		if err != nil {
			w.t.Fatal(err)
		}
		for _, o := range list.Items {
			text := string(o.UID)
			for _, ref := range o.OwnerReferences {
				text += "[" + string(ref.UID) + "]"
			}
			out = append(out, text)
		}
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

func (w *world) eventually(want string) {
	w.t.Helper()
	schedtest.Eventually(w.t, func() string {
		if got := w.left(); got != want {
			return fmt.Sprintf("left is %s, want %s", got, want)
		}
		return ""
	})
}

// TestKindThatEnds: objects of a kind that is not served any more are forgotten: who
// waited for them goes on, who depends on them stays, until the kind is served again
// and the owner is not there.
func TestKindThatEnds(t *testing.T) {
	scheme := metadatafake.NewTestScheme()
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	owner := thing("ns/Pod/waits")
	now := metav1.Now()
	owner.DeletionTimestamp, owner.Finalizers = &now, []string{metav1.FinalizerDeleteDependents}
	w := &world{t: t, client: metadatafake.NewSimpleMetadataClient(scheme,
		owner, thing("ns/Gadget/blocks", "ns/Pod/waits"), thing("ns/Gadget/owner"), thing("ns/Pod/depends", "ns/Gadget/owner"))}
	// The collector's own deletion of the gadget is refused, so that the pod waits.
	w.client.PrependReactor("delete", "gadgets", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("not now")
	})
	w.client.PrependReactor("delete", "pods", w.delete)
	w.client.PrependReactor("patch", "*", w.patched)
	cs := client{fake.NewSimpleClientset(), new(atomic.Bool)}
	cs.gadgets.Store(true)
	clock := clocktesting.NewFakeClock(time.Unix(1000, 0))
	l := New(loop.Env{Client: cs, Events: loop.NewEvents(cs, clock), Clock: clock}, w.client, nil)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := l.Run(ctx); err != nil {
			t.Errorf("loop ended with %v", err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	asked := func() (n int) {
		for _, a := range w.client.Actions() {
			if a.Matches("delete", "gadgets") {
				n++
			}
		}
		return n
	}
	pods := func() string {
		var out []string
		list, err := w.client.Resource(resourceOf("/Pod/")).List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range list.Items {
			out = append(out, o.Name)
		}
		slices.Sort(out)
		return strings.Join(out, " ")
	}
	left := func(want string) {
		t.Helper()
		schedtest.Eventually(t, func() string {
			if got := pods(); got != want {
				clock.Step(rediscoverEvery)
				return fmt.Sprintf("left is %q, want %q", got, want)
			}
			return ""
		})
	}
	schedtest.Eventually(t, func() string {
		if asked() == 0 {
			return "the gadget that the pod waits for is left alone"
		}
		return ""
	})
	if got := pods(); got != "depends waits" {
		t.Fatalf("left is %q", got)
	}
	// The kind goes, and its objects with it; the watch ended before it could say so.
	cs.gadgets.Store(false)
	left("depends")
	for _, name := range []string{"blocks", "owner"} {
		if err := w.client.Tracker().Delete(resourceOf("/Gadget/"), "ns", name); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 { // it stays
		clock.Step(rediscoverEvery)
	}
	if got := pods(); got != "depends" {
		t.Fatalf("left is %q while its owner's kind is not served", got)
	}
	cs.gadgets.Store(true)
	left("")
}

func app() []*metav1.PartialObjectMetadata {
	return []*metav1.PartialObjectMetadata{
		thing("ns/Deployment/web"),
		thing("ns/ReplicaSet/web-1", "ns/Deployment/web"),
		thing("ns/Pod/web-1-a", "ns/ReplicaSet/web-1"),
		thing("ns/Pod/web-1-b", "ns/ReplicaSet/web-1"),
		thing("ns/Pod/bare"),
	}
}

func TestBackground(t *testing.T) {
	w := newWorld(t, app()...)
	w.remove("ns/Deployment/web", metav1.DeletePropagationBackground)
	w.eventually("ns/Pod/bare")
}

func TestForeground(t *testing.T) {
	w := newWorld(t, app()...)
	w.remove("ns/Deployment/web", metav1.DeletePropagationForeground)
	w.eventually("ns/Pod/bare")
	// The owner went last.
	var order []string
	for _, action := range w.client.Actions() {
		if p, ok := action.(clienttesting.PatchAction); ok {
			order = append(order, p.GetName())
		}
	}
	if got := strings.Join(slices.Compact(order), " "); got != "web-1 web" {
		t.Errorf("finalizers were taken off %s, want web-1 web", got)
	}
}

// TestRing: objects that own each other in a ring go when one of them is deleted,
// in the foreground, too.
func TestRing(t *testing.T) {
	for _, policy := range []metav1.DeletionPropagation{metav1.DeletePropagationForeground, metav1.DeletePropagationBackground} {
		t.Run(string(policy), func(t *testing.T) {
			w := newWorld(t, thing("ns/Pod/a", "ns/Pod/b"), thing("ns/Pod/b", "ns/Pod/c"), thing("ns/Pod/c", "ns/Pod/a"), thing("ns/Pod/of-a", "ns/Pod/a"), thing("ns/Pod/bare"))
			w.remove("ns/Pod/a", policy)
			w.eventually("ns/Pod/bare")
		})
	}
}

func TestOrphan(t *testing.T) {
	w := newWorld(t, app()...)
	w.remove("ns/Deployment/web", metav1.DeletePropagationOrphan)
	w.eventually("ns/Pod/bare ns/Pod/web-1-a[ns/ReplicaSet/web-1] ns/Pod/web-1-b[ns/ReplicaSet/web-1] ns/ReplicaSet/web-1")
}

// Owners that went while no leader ran are noticed; a second owner saves an
// object; what cannot be verified is left alone.
func TestWhatIsFoundAtTheStart(t *testing.T) {
	w := newWorld(t,
		thing("ns/Pod/orphan", "ns/ReplicaSet/gone"),
		thing("ns/ReplicaSet/here"),
		thing("ns/Pod/two-owners", "ns/ReplicaSet/gone", "ns/ReplicaSet/here"),
		thing("ns/Pod/of-other-namespace", "other/ReplicaSet/there"),
		thing("other/ReplicaSet/there"),
		thing("ns/Pod/of-node", "/Node/n1"),
		thing("/Node/n1"),
		thing("/Node/n2", "ns/ReplicaSet/gone"),
		thing("ns/Pod/of-widget", "ns/Widget/w"),
	)
	w.eventually("/Node/n1 /Node/n2[ns/ReplicaSet/gone] ns/Pod/of-node[/Node/n1] ns/Pod/of-widget[ns/Widget/w] " +
		"ns/Pod/two-owners[ns/ReplicaSet/here] ns/ReplicaSet/here other/ReplicaSet/there")
}

// TestSharedInformers: a kind that another loop watches is not watched again, and
// its objects are collected like all others.
func TestSharedInformers(t *testing.T) {
	others := fake.NewSimpleClientset()
	for _, o := range app() {
		if o.Kind == "Pod" {
			pod := &corev1.Pod{ObjectMeta: *o.ObjectMeta.DeepCopy()}
			if err := others.Tracker().Add(pod); err != nil {
				t.Fatal(err)
			}
		}
	}
	factory := informers.NewSharedInformerFactory(others, 0)
	pods := factory.Core().V1().Pods().Informer()
	ctx, cancel := context.WithCancel(t.Context())
	factory.StartWithContext(ctx)
	t.Cleanup(func() { cancel(); factory.Shutdown() })

	w := newSharingWorld(t, func(_ context.Context, resource schema.GroupVersionResource, kind string) cache.SharedIndexInformer {
		if resource == corev1.SchemeGroupVersion.WithResource("pods") && kind == "Pod" {
			return pods
		}
		return nil
	}, app()...)
	w.remove("ns/Deployment/web", metav1.DeletePropagationBackground)
	schedtest.Eventually(t, func() string {
		var gone []string
		for _, action := range w.client.Actions() {
			if d, ok := action.(clienttesting.DeleteAction); ok && d.GetResource().Resource == "pods" {
				gone = append(gone, d.GetName())
			}
		}
		slices.Sort(gone)
		if got := strings.Join(slices.Compact(gone), " "); got != "web-1-a web-1-b" {
			return fmt.Sprintf("deleted pods: %q, want web-1-a and web-1-b", got)
		}
		return ""
	})
	for _, action := range w.client.Actions() {
		if verb := action.GetVerb(); action.GetResource().Resource == "pods" && (verb == "list" || verb == "watch") {
			t.Errorf("pods were asked for a second time: %s", verb)
		}
	}
}
