// Package object keeps the ConfigMaps and Secrets that this node's pods name,
// each by a watch of its own, so that a node sees no more of them than it
// needs (and, by its authorization, may). A pod acquires what it names and
// releases it when it ends; a change tells the pods that hold the object.
package object

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

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
)

// Ref names one object.
type Ref struct {
	Resource  string // "configmaps" or "secrets"
	Namespace string
	Name      string
}

// Resources a Ref can name.
const (
	ConfigMaps = "configmaps"
	Secrets    = "secrets"
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
	sel := fields.OneTermEqualSelector(metav1.ObjectNameField, r.Name).String()
	lw := &cache.ListWatch{}
	var kind runtime.Object
	switch r.Resource {
	case ConfigMaps:
		kind = &v1.ConfigMap{}
		lw.ListWithContextFunc = func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = sel
			return c.client.CoreV1().ConfigMaps(r.Namespace).List(ctx, o)
		}
		lw.WatchFuncWithContext = func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = sel
			return c.client.CoreV1().ConfigMaps(r.Namespace).Watch(ctx, o)
		}
	default:
		kind = &v1.Secret{}
		lw.ListWithContextFunc = func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = sel
			return c.client.CoreV1().Secrets(r.Namespace).List(ctx, o)
		}
		lw.WatchFuncWithContext = func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = sel
			return c.client.CoreV1().Secrets(r.Namespace).Watch(ctx, o)
		}
	}
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

// firstAnswer bounds the wait for an object whose list is refused or stuck.
const firstAnswer = 10 * time.Second

func (c *Cache) get(ctx context.Context, r Ref) (any, error) {
	c.mu.Lock()
	e := c.entries[r]
	c.mu.Unlock()
	if e == nil {
		return c.direct(ctx, r)
	}
	select {
	case <-e.informer.HasSyncedChecker().Done():
	default:
		timer := time.NewTimer(firstAnswer)
		defer timer.Stop()
		select {
		case <-e.informer.HasSyncedChecker().Done():
		case <-e.done:
			return c.direct(ctx, r)
		case <-timer.C:
			// The watch gives no answer: ask plainly, which tells why.
			return c.direct(ctx, r)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	o, ok, err := e.informer.GetStore().GetByKey(r.Namespace + "/" + r.Name)
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
	if r.Resource == ConfigMaps {
		o, err = c.client.CoreV1().ConfigMaps(r.Namespace).Get(ctx, r.Name, metav1.GetOptions{})
	} else {
		o, err = c.client.CoreV1().Secrets(r.Namespace).Get(ctx, r.Name, metav1.GetOptions{})
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
		add(Secrets, s.Name)
	}
	return out
}
