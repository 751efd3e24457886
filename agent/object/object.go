// Package object keeps the ConfigMaps, Secrets and ClusterTrustBundles that this
// node's pods name,
// each by a watch of its own, so that a node sees no more of them than it
// needs (and, by its authorization, may). A pod acquires what it names and
// releases it when it ends; a change tells the pods that hold the object.
package object

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
)

// Ref names one object, or the ClusterTrustBundles of a signer.
type Ref struct {
	Resource  string // ConfigMaps, Secrets, TrustBundles or SignerBundles
	Namespace string // "" for bundles
	Name      string // of SignerBundles: the signer's
}

// Resources a Ref can name.
const (
	ConfigMaps    = "configmaps"
	Secrets       = "secrets"
	TrustBundles  = "clustertrustbundles"
	SignerBundles = "clustertrustbundles of a signer"
)

// Cache holds the objects in use. Its methods may be called concurrently.
type Cache struct {
	client  kubernetes.Interface
	changed func(pod types.UID, ref Ref)

	mu      sync.Mutex // guards all below
	entries map[Ref]*entry
	pods    map[types.UID]map[Ref]bool
	closed  bool
	wg      sync.WaitGroup
}

type entry struct {
	users    map[types.UID]bool
	stop     context.CancelFunc
	informer cache.SharedIndexInformer
	done     chan struct{} // closed when the watch has ended
}

// New makes a cache; changed is called, from a goroutine of the watch, for
// each pod that holds an object that appeared, changed or vanished. It must
// not block.
func New(client kubernetes.Interface, changed func(pod types.UID, ref Ref)) *Cache {
	return &Cache{client: client, changed: changed, entries: map[Ref]*entry{}, pods: map[types.UID]map[Ref]bool{}}
}

// Close ends all watches and waits for them.
func (c *Cache) Close() {
	c.mu.Lock()
	c.closed = true
	for _, e := range c.entries {
		e.stop()
	}
	c.mu.Unlock()
	c.wg.Wait()
}

// Acquire makes refs the set of objects that the pod holds: new ones are
// watched from now on, ones no pod holds any more are dropped.
func (c *Cache) Acquire(pod types.UID, refs []Ref) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	want := map[Ref]bool{}
	for _, r := range refs {
		want[r] = true
		e := c.entries[r]
		if e == nil {
			e = c.start(r)
			c.entries[r] = e
		}
		e.users[pod] = true
	}
	for r := range c.pods[pod] {
		if !want[r] {
			c.drop(pod, r)
		}
	}
	if len(want) == 0 {
		delete(c.pods, pod)
	} else {
		c.pods[pod] = want
	}
}

// Release drops all that the pod holds.
func (c *Cache) Release(pod types.UID) { c.Acquire(pod, nil) }

func (c *Cache) drop(pod types.UID, r Ref) {
	e := c.entries[r]
	if e == nil {
		return
	}
	delete(e.users, pod)
	if len(e.users) == 0 {
		e.stop()
		delete(c.entries, r)
	}
}

// start begins the watch of one object. The caller holds mu.
func (c *Cache) start(r Ref) *entry {
	ctx, cancel := context.WithCancel(context.Background()) // ends with its last user or Close
	kind, lw := c.listWatch(r)
	inf := cache.NewSharedIndexInformer(cache.ToListWatcherWithWatchListSemantics(lw, c.client), kind, 0, cache.Indexers{})
	e := &entry{users: map[types.UID]bool{}, stop: cancel, informer: inf, done: make(chan struct{})}
	tell := func(any) { c.tell(r) }
	_, _ = inf.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: tell, DeleteFunc: tell, UpdateFunc: func(_, _ any) { c.tell(r) },
	})
	c.wg.Go(func() {
		defer close(e.done)
		inf.RunWithContext(ctx)
	})
	return e
}

// listWatch lists and watches what r names, and nothing else.
func (c *Cache) listWatch(r Ref) (runtime.Object, *cache.ListWatch) {
	field := metav1.ObjectNameField
	if r.Resource == SignerBundles {
		field = "spec.signerName"
	}
	sel := fields.OneTermEqualSelector(field, r.Name).String()
	core := c.client.CoreV1()
	switch r.Resource {
	case ConfigMaps:
		return &v1.ConfigMap{}, only(sel, core.ConfigMaps(r.Namespace).List, core.ConfigMaps(r.Namespace).Watch)
	case Secrets:
		return &v1.Secret{}, only(sel, core.Secrets(r.Namespace).List, core.Secrets(r.Namespace).Watch)
	}
	bundles := c.client.CertificatesV1().ClusterTrustBundles()
	return &certificatesv1.ClusterTrustBundle{}, only(sel, bundles.List, bundles.Watch)
}

// only lists and watches what a field selector selects.
func only[T runtime.Object](sel string, list func(context.Context, metav1.ListOptions) (T, error), watching func(context.Context, metav1.ListOptions) (watch.Interface, error)) *cache.ListWatch {
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = sel
			return list(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = sel
			return watching(ctx, o)
		},
	}
}

func (c *Cache) tell(r Ref) {
	c.mu.Lock()
	var pods []types.UID
	if e := c.entries[r]; e != nil {
		for p := range e.users {
			pods = append(pods, p)
		}
	}
	c.mu.Unlock()
	for _, p := range pods {
		c.changed(p, r)
	}
}

// ConfigMap returns the object, read-only; a NotFound error when the API has
// none. It waits for the first answer of the API.
func (c *Cache) ConfigMap(ctx context.Context, namespace, name string) (*v1.ConfigMap, error) {
	o, err := c.get(ctx, Ref{ConfigMaps, namespace, name})
	if err != nil {
		return nil, err
	}
	return o.(*v1.ConfigMap), nil
}

// Secret returns the object like ConfigMap.
func (c *Cache) Secret(ctx context.Context, namespace, name string) (*v1.Secret, error) {
	o, err := c.get(ctx, Ref{Secrets, namespace, name})
	if err != nil {
		return nil, err
	}
	return o.(*v1.Secret), nil
}

// TrustBundle returns a ClusterTrustBundle like ConfigMap.
func (c *Cache) TrustBundle(ctx context.Context, name string) (*certificatesv1.ClusterTrustBundle, error) {
	o, err := c.get(ctx, Ref{Resource: TrustBundles, Name: name})
	if err != nil {
		return nil, err
	}
	return o.(*certificatesv1.ClusterTrustBundle), nil
}

// TrustBundlesOf returns the ClusterTrustBundles of a signer, read-only, in the
// order of their names. It waits for the first answer of the API.
func (c *Cache) TrustBundlesOf(ctx context.Context, signer string) ([]*certificatesv1.ClusterTrustBundle, error) {
	r := Ref{Resource: SignerBundles, Name: signer}
	store, err := c.synced(ctx, r)
	if err != nil {
		return nil, err
	}
	var out []*certificatesv1.ClusterTrustBundle
	if store == nil {
		ctx, cancel := context.WithTimeout(ctx, firstAnswer)
		defer cancel()
		list, err := c.client.CertificatesV1().ClusterTrustBundles().List(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.signerName", signer).String()})
		if err != nil {
			return nil, err
		}
		for i := range list.Items {
			out = append(out, &list.Items[i])
		}
	} else {
		for _, o := range store.List() {
			out = append(out, o.(*certificatesv1.ClusterTrustBundle))
		}
	}
	slices.SortFunc(out, func(a, b *certificatesv1.ClusterTrustBundle) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// Held are the objects that the pod holds and the API has, and what it holds and the API
// does not have; complete is false while it has not answered for one of them. It does not wait.
func (c *Cache) Held(pod types.UID) (objects []runtime.Object, absent []Ref, complete bool) {
	c.mu.Lock()
	informers := map[Ref]cache.SharedIndexInformer{}
	for r := range c.pods[pod] {
		informers[r] = c.entries[r].informer
	}
	c.mu.Unlock()
	complete = true
	for r, i := range informers {
		if !i.HasSynced() {
			complete = false
			continue
		}
		list := i.GetStore().List()
		for _, o := range list {
			objects = append(objects, o.(runtime.Object))
		}
		if len(list) == 0 {
			absent = append(absent, r)
		}
	}
	return objects, absent, complete
}

// firstAnswer bounds the wait for an object whose list is refused or stuck.
const firstAnswer = 10 * time.Second

// synced is the store of what r names once the API has answered; nil: it is not
// watched, or the watch gives no answer, and is to be asked for plainly.
func (c *Cache) synced(ctx context.Context, r Ref) (cache.Store, error) {
	c.mu.Lock()
	e := c.entries[r]
	c.mu.Unlock()
	if e == nil {
		return nil, nil
	}
	select {
	case <-e.informer.HasSyncedChecker().Done():
		return e.informer.GetStore(), nil
	default:
	}
	timer := time.NewTimer(firstAnswer)
	defer timer.Stop()
	select {
	case <-e.informer.HasSyncedChecker().Done():
		return e.informer.GetStore(), nil
	case <-e.done:
		return nil, nil
	case <-timer.C:
		return nil, nil // asked plainly, the API tells why
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (c *Cache) get(ctx context.Context, r Ref) (any, error) {
	store, err := c.synced(ctx, r)
	if err != nil {
		return nil, err
	}
	if store == nil {
		return c.direct(ctx, r)
	}
	o, ok, err := store.GetByKey(cache.NewObjectName(r.Namespace, r.Name).String())
	if err != nil {
		return nil, fmt.Errorf("look up %s %s/%s: %w", r.Resource, r.Namespace, r.Name, err)
	}
	if !ok {
		return nil, notFound(r)
	}
	return o, nil
}

// notFound says it in the words of Kubernetes' nodes, which name the kind and
// not the resource: secret "late" not found.
func notFound(r Ref) error {
	return apierrors.NewNotFound(schema.GroupResource{Resource: strings.TrimSuffix(r.Resource, "s")}, r.Name)
}

func (c *Cache) direct(ctx context.Context, r Ref) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, firstAnswer)
	defer cancel()
	var o any
	var err error
	switch r.Resource {
	case ConfigMaps:
		o, err = c.client.CoreV1().ConfigMaps(r.Namespace).Get(ctx, r.Name, metav1.GetOptions{})
	case Secrets:
		o, err = c.client.CoreV1().Secrets(r.Namespace).Get(ctx, r.Name, metav1.GetOptions{})
	default:
		o, err = c.client.CertificatesV1().ClusterTrustBundles().Get(ctx, r.Name, metav1.GetOptions{})
	}
	if apierrors.IsNotFound(err) {
		return nil, notFound(r)
	}
	return o, err
}

// RefsOf lists what a pod names in its volumes, environment and pull secrets.
func RefsOf(pod *v1.Pod) []Ref {
	var out []Ref
	seen := map[Ref]bool{}
	add := func(resource, name string) {
		r := Ref{resource, pod.Namespace, name}
		if resource == TrustBundles || resource == SignerBundles {
			r.Namespace = ""
		}
		if name != "" && !seen[r] {
			seen[r] = true
			out = append(out, r)
		}
	}
	for _, v := range pod.Spec.Volumes {
		switch {
		case v.ConfigMap != nil:
			add(ConfigMaps, v.ConfigMap.Name)
		case v.Secret != nil:
			add(Secrets, v.Secret.SecretName)
		case v.Projected != nil:
			for _, s := range v.Projected.Sources {
				if s.ConfigMap != nil {
					add(ConfigMaps, s.ConfigMap.Name)
				}
				if s.Secret != nil {
					add(Secrets, s.Secret.Name)
				}
				if b := s.ClusterTrustBundle; b != nil {
					add(TrustBundles, ptr.Deref(b.Name, ""))
					add(SignerBundles, ptr.Deref(b.SignerName, ""))
				}
			}
		}
	}
	env := func(from []v1.EnvFromSource, vars []v1.EnvVar) {
		for _, f := range from {
			if f.ConfigMapRef != nil {
				add(ConfigMaps, f.ConfigMapRef.Name)
			}
			if f.SecretRef != nil {
				add(Secrets, f.SecretRef.Name)
			}
		}
		for _, e := range vars {
			if e.ValueFrom == nil {
				continue
			}
			if k := e.ValueFrom.ConfigMapKeyRef; k != nil {
				add(ConfigMaps, k.Name)
			}
			if k := e.ValueFrom.SecretKeyRef; k != nil {
				add(Secrets, k.Name)
			}
		}
	}
	for _, c := range pod.Spec.InitContainers {
		env(c.EnvFrom, c.Env)
	}
	for _, c := range pod.Spec.Containers {
		env(c.EnvFrom, c.Env)
	}
	for _, c := range pod.Spec.EphemeralContainers {
		env(c.EnvFrom, c.Env)
	}
	for _, s := range pod.Spec.ImagePullSecrets {
		if s.Name != "" {
			add(Secrets, s.Name)
		}
	}
	return out
}
