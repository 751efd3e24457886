package gc

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/internal/served"
)

const (
	// rediscoverEvery is how often kinds that came or went are noticed.
	rediscoverEvery = 30 * time.Second
	// retryEvery is the same while some group did not answer.
	retryEvery = 2 * time.Second
)

// ignored kinds have no owners worth following and change all the time.
var ignored = map[schema.GroupResource]bool{
	{Resource: "events"}:                         true,
	{Group: "events.k8s.io", Resource: "events"}: true,
}

// Shared returns the informer that others run for a kind, nil if there is none. It
// may wait until they run, or ctx ends.
type Shared func(ctx context.Context, resource schema.GroupVersionResource, kind string) cache.SharedIndexInformer

// monitors watch the metadata of every kind that can be listed, watched and
// deleted.
type monitors struct {
	metadata  metadata.Interface
	shared    Shared // nil: nothing is shared
	discovery discovery.DiscoveryInterfaces
	clock     clock.WithTicker
	onChange  func(old, now *object)
	// onEnd is called after the last event of a resource that is not watched any
	// more, onListed when all objects of a kind are known that is watched again.
	onEnd    func(schema.GroupVersionResource)
	onListed func(schema.GroupKind)
	first    chan struct{} // closed after the first discovery
	gone     chan struct{} // a kind that is watched is not served any more

	mu      sync.Mutex // guards below
	running map[schema.GroupVersionResource]*monitor
	// ended are resources that are not watched any more and whose end was not told
	// yet: their kind is being listed in another version.
	ended map[schema.GroupVersionResource]schema.GroupKind
	// kinds tells how a reference's kind is served.
	kinds map[schema.GroupKind]kindInfo
	// partial: some group did not answer last time.
	partial bool
}

type kindInfo struct {
	schema.GroupVersionResource
	namespaced bool
}

type monitor struct {
	kind   schema.GroupKind
	synced cache.InformerSynced
	listed bool // that was told
	stop   context.CancelFunc

	mu    sync.Mutex // held while an event is told
	ended bool       // none is any more
}

// tell tells an event, unless the monitor has ended.
func (m *monitor) tell(event func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.ended {
		event()
	}
}

// end stops the monitor; no event of it comes afterwards.
func (m *monitor) end() {
	m.stop()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ended = true
}

func newMonitors(metadata metadata.Interface, discovery discovery.DiscoveryInterfaces, clock clock.WithTicker, onChange func(old, now *object)) *monitors {
	return &monitors{
		metadata: metadata, discovery: discovery, clock: clock, onChange: onChange,
		first:   make(chan struct{}),
		gone:    make(chan struct{}, 1),
		running: map[schema.GroupVersionResource]*monitor{},
		ended:   map[schema.GroupVersionResource]schema.GroupKind{},
		onEnd:   func(schema.GroupVersionResource) {}, onListed: func(schema.GroupKind) {},
		kinds: map[schema.GroupKind]kindInfo{},
	}
}

// run keeps one informer per kind until ctx ends, and waits for all of them.
func (m *monitors) run(ctx context.Context) error {
	var group errgroup.Group
	defer group.Wait() //nolint:errcheck // informers return nothing
	first := sync.OnceFunc(func() { close(m.first) })
	for ctx.Err() == nil {
		complete := m.refresh(ctx, &group)
		if m.started() > 0 {
			first()
		}
		pause := rediscoverEvery
		if !complete {
			pause = retryEvery
		}
		next := m.clock.After(pause)
		select {
		case <-ctx.Done():
			return nil
		case <-next:
			continue
		case <-m.gone:
		}
		// Discovery follows the watch within moments; it is not asked at once
		// again and again.
		select {
		case <-ctx.Done():
		case <-next:
		case <-m.clock.After(retryEvery):
		}
	}
	return nil
}

// watchFailed logs that a watch failed, unless its kind is no longer served: such
// watches are stopped when discovery says so.
func (m *monitors) watchFailed(ctx context.Context, r *cache.Reflector, err error) {
	if !apierrors.IsNotFound(err) {
		cache.DefaultWatchErrorHandler(ctx, r, err)
		return
	}
	select {
	case m.gone <- struct{}{}:
	default:
	}
}

func (m *monitors) started() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.running)
}

// refresh starts and stops informers as discovery says; it reports whether
// every group answered. Kinds of a group that did not answer are left as they
// are: not to know is not to know that they are gone.
func (m *monitors) refresh(ctx context.Context, group *errgroup.Group) bool {
	resources, failed := served.Resources(ctx, m.discovery)
	if ctx.Err() != nil {
		return false
	}
	for _, err := range failed {
		klog.FromContext(ctx).V(2).Info("kinds unknown to the collector for now", "err", err)
	}
	wanted := map[schema.GroupVersionResource]schema.GroupKind{}
	kinds := map[schema.GroupKind]kindInfo{}
	for _, r := range resources {
		kind := schema.GroupKind{Group: r.Group, Kind: r.Kind}
		kinds[kind] = kindInfo{r.GroupVersionResource, r.Namespaced}
		if r.Can("list") && r.Can("watch") && r.Can("delete") && !ignored[r.GroupResource()] {
			wanted[r.GroupVersionResource] = kind
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.partial = len(failed) > 0
	if m.partial {
		maps.Copy(m.kinds, kinds)
	} else {
		m.kinds = kinds
	}
	for resource, kind := range wanted {
		if m.running[resource] == nil {
			if _, ok := m.ended[resource]; ok {
				m.tellEnd(resource) // what the next one shows is kept apart from that
			}
			m.start(ctx, group, resource, kind)
		}
	}
	if !m.partial {
		for resource, running := range m.running {
			if _, ok := wanted[resource]; !ok {
				running.end()
				delete(m.running, resource)
				m.ended[resource] = running.kind
			}
		}
	}
	m.tellOfKinds()
	return !m.partial
}

// tellOfKinds tells which kinds are listed by now, and which resources have ended. If
// the kind of one is being listed in another version, its objects are known until
// they are known in that. mu is held.
func (m *monitors) tellOfKinds() {
	listing := map[schema.GroupKind]bool{}
	for _, running := range m.running {
		switch synced := running.synced(); {
		case !synced:
			listing[running.kind] = true
		case !running.listed:
			running.listed = true
			m.onListed(running.kind)
		}
	}
	for resource, kind := range m.ended {
		if !listing[kind] {
			m.tellEnd(resource)
		}
	}
}

func (m *monitors) tellEnd(resource schema.GroupVersionResource) {
	delete(m.ended, resource)
	m.onEnd(resource)
}

// start begins to watch one kind; mu is held.
func (m *monitors) start(ctx context.Context, group *errgroup.Group, resource schema.GroupVersionResource, kind schema.GroupKind) {
	var informer cache.SharedIndexInformer
	if m.shared != nil {
		informer = m.shared(ctx, resource, kind.Kind)
	}
	own := informer == nil
	if own {
		var err error
		if informer, err = m.ownInformer(resource); err != nil {
			klog.FromContext(ctx).Error(err, "informer cannot be set up", "resource", resource)
			return
		}
	}
	mon := &monitor{kind: kind}
	changed := func(old, now any) { mon.tell(func() { m.changed(resource, kind, old, now) }) }
	registration, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) { changed(nil, obj) },
		UpdateFunc: func(old, obj any) {
			if o, ok := old.(metav1.Object); ok {
				if n, ok := obj.(metav1.Object); ok && o.GetUID() != n.GetUID() {
					changed(old, nil) // deleted and created again
				}
			}
			changed(nil, obj)
		},
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			changed(obj, nil)
		},
	})
	if err != nil {
		klog.FromContext(ctx).Error(err, "informer cannot be set up", "resource", resource)
		return
	}
	ctx, stop := context.WithCancel(ctx)
	mon.synced, mon.stop = registration.HasSynced, stop
	m.running[resource] = mon
	if !own {
		context.AfterFunc(ctx, func() { informer.RemoveEventHandler(registration) }) //nolint:errcheck // one that ended has none
		return
	}
	group.Go(func() error {
		informer.RunWithContext(ctx)
		return nil
	})
}

// ownInformer makes an informer of the metadata of a kind that no other loop watches.
func (m *monitors) ownInformer(resource schema.GroupVersionResource) (cache.SharedIndexInformer, error) {
	informer := metadatainformer.NewFilteredMetadataInformer(m.metadata, resource, metav1.NamespaceAll, 0, cache.Indexers{}, func(o *metav1.ListOptions) {
		if o.ResourceVersion == "0" {
			o.ResourceVersion = "" // the newest state, as in sched.newInformers
		}
	}).Informer()
	// Nothing is read from the store: keep what is needed for deltas alone.
	if err := informer.SetTransform(trim); err != nil {
		return nil, err
	}
	return informer, informer.SetWatchErrorHandlerWithContext(m.watchFailed)
}

// trim strips what the collector does not look at.
func trim(obj any) (any, error) {
	if o, ok := obj.(*metav1.PartialObjectMetadata); ok {
		return &metav1.PartialObjectMetadata{TypeMeta: o.TypeMeta, ObjectMeta: metav1.ObjectMeta{
			Name: o.Name, Namespace: o.Namespace, UID: o.UID, ResourceVersion: o.ResourceVersion,
			DeletionTimestamp: o.DeletionTimestamp, Finalizers: o.Finalizers, OwnerReferences: o.OwnerReferences,
		}}, nil
	}
	return obj, nil
}

func (m *monitors) changed(resource schema.GroupVersionResource, kind schema.GroupKind, old, now any) {
	var before, after *object
	if o, ok := old.(metav1.Object); ok {
		before = newObject(resource, kind, o)
	}
	if o, ok := now.(metav1.Object); ok {
		after = newObject(resource, kind, o)
	}
	if before != nil || after != nil {
		m.onChange(before, after)
	}
}

func newObject(resource schema.GroupVersionResource, kind schema.GroupKind, o metav1.Object) *object {
	return &object{
		uid: o.GetUID(), resource: resource, kind: kind, namespace: o.GetNamespace(), name: o.GetName(),
		owners: o.GetOwnerReferences(), finalizers: o.GetFinalizers(), deleting: o.GetDeletionTimestamp() != nil,
	}
}

// waitSynced waits until the kinds of the first discovery have been listed. It
// returns false if ctx ends before. A kind that cannot be listed (its server
// is down) must not hold up all others without a limit: what depends on it is safe,
// since owners that the graph lacks are looked up at the server.
func (m *monitors) waitSynced(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-m.first:
	}
	m.mu.Lock()
	var synced []cache.InformerSynced
	for _, running := range m.running {
		synced = append(synced, running.synced)
	}
	m.mu.Unlock()
	wait, cancel := context.WithTimeout(ctx, maxSyncWait)
	defer cancel()
	if !cache.WaitForCacheSync(wait.Done(), synced...) && ctx.Err() == nil {
		klog.FromContext(ctx).Info("some kinds could not be listed yet; collecting the others")
	}
	return ctx.Err() == nil
}

// maxSyncWait bounds waitSynced.
const maxSyncWait = 30 * time.Second

// errUnknownKind is returned when no API serves an owner's kind.
var errUnknownKind = errors.New("no such kind is served")

// mapping tells how the kind of an owner is served. Any version will do: it is
// the same object.
func (m *monitors) mapping(ctx context.Context, ref *metav1.OwnerReference) (kindInfo, error) {
	gv, err := schema.ParseGroupVersion(ref.APIVersion)
	if err != nil {
		return kindInfo{}, fmt.Errorf("apiVersion %q: %w", ref.APIVersion, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	info, ok := m.kinds[schema.GroupKind{Group: gv.Group, Kind: ref.Kind}]
	if !ok {
		return kindInfo{}, fmt.Errorf("%s: %w", gv.WithKind(ref.Kind), errUnknownKind)
	}
	return info, nil
}
