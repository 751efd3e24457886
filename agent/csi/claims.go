package csi

import (
	"context"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// claimKey names a claim.
type claimKey struct{ namespace, name string }

// claimWatch is the watch of one claim, by name: of others the node sees nothing.
type claimWatch struct {
	users map[recordKey]bool
	stop  context.CancelFunc
}

// watchClaims watches the claims of all records.
func (m *Manager) watchClaims() {
	for _, e := range m.entries(func(*entry) bool { return true }) {
		m.watchClaim(&e.record)
	}
}

// watchClaim watches the claim of a volume, which tells when the volume grows.
func (m *Manager) watchClaim(r *record) {
	if r.Claim == "" {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ctx == nil || m.ctx.Err() != nil {
		return
	}
	key := claimKey{r.Namespace, r.Claim}
	if w := m.claims[key]; w != nil {
		w.users[r.key()] = true
		return
	}
	ctx, cancel := context.WithCancel(m.ctx)
	m.claims[key] = &claimWatch{users: map[recordKey]bool{r.key(): true}, stop: cancel}
	m.wg.Go(func() { m.followClaim(ctx, key) })
}

// unwatchClaim ends the watch with the last volume that it is for.
func (m *Manager) unwatchClaim(r *record) {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := claimKey{r.Namespace, r.Claim}
	w := m.claims[key]
	if w == nil {
		return
	}
	if delete(w.users, r.key()); len(w.users) == 0 {
		w.stop()
		delete(m.claims, key)
	}
}

// Bounds of the wait before a failed expansion is tried again.
const (
	firstExpandRetry = time.Second
	lastExpandRetry  = 2 * time.Minute
)

// followClaim expands the claim's volume whenever the claim says that it has
// grown.
func (m *Manager) followClaim(ctx context.Context, key claimKey) {
	changed := make(chan struct{}, 1)
	poke := func(any) {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	api, selector := m.cfg.Client.CoreV1().PersistentVolumeClaims(key.namespace), fields.OneTermEqualSelector(metav1.ObjectNameField, key.name).String()
	store, informer := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				o.FieldSelector = selector
				return api.List(ctx, o)
			},
			WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
				o.FieldSelector = selector
				return api.Watch(ctx, o)
			},
		}, m.cfg.Client),
		ObjectType: &v1.PersistentVolumeClaim{},
		Handler:    cache.ResourceEventHandlerFuncs{AddFunc: poke, UpdateFunc: func(_, o any) { poke(o) }},
	})
	m.wg.Go(func() { informer.RunWithContext(ctx) })
	delay := firstExpandRetry
	var retry <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-retry:
		}
		retry = nil
		object, ok, err := store.GetByKey(key.namespace + "/" + key.name)
		if err != nil || !ok {
			continue
		}
		claim := object.(*v1.PersistentVolumeClaim)
		if err := m.expandAll(ctx, key, claim); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Info("Volume has not grown on this node yet, will retry", "claim", key.namespace+"/"+key.name, "err", err, "after", delay)
			m.cfg.Recorder.Eventf(claim, v1.EventTypeWarning, "VolumeResizeFailed", "NodeExpandVolume failed: %v", err)
			retry, delay = time.After(delay), min(2*delay, lastExpandRetry)
		} else {
			delay = firstExpandRetry
		}
	}
}

// expandAll expands the claim's volume once: for whichever pod.
func (m *Manager) expandAll(ctx context.Context, key claimKey, claim *v1.PersistentVolumeClaim) error {
	m.mu.Lock()
	var one *recordKey
	if w := m.claims[key]; w != nil {
		for k := range w.users {
			one = &k
		}
	}
	m.mu.Unlock()
	if one == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return m.expandUsed(ctx, *one, claim)
}
