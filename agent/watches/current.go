package watches

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
)

const (
	// lookEvery is how often is looked whether the watches have arrived.
	lookEvery = 100 * time.Millisecond
	// A node lists later the more nodes there are, at random: all do so after the
	// same outage.
	spreadPerNode, maxSpread = 5 * time.Millisecond, 5 * time.Second
)

// Current returns nil when all watches hold what the API had when this was called, or
// newer. After a time without the API a watch begins again when its turn comes, and
// shows the past until then. It lists everything once and waits for that, whatever is
// written meanwhile: it is for who must not go by the past.
func (w *Watches) Current(ctx context.Context) error {
	spread := min(time.Duration(len(w.Nodes.GetStore().ListKeys()))*spreadPerNode, maxSpread)
	if err := pause(ctx, rand.N(spread+1)); err != nil {
		return err
	}
	for _, list := range []struct {
		what string
		held cache.Store
		list func() (runtime.Object, error)
	}{
		{"Nodes", w.Nodes.GetStore(), func() (runtime.Object, error) {
			return w.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		}},
		{"Services", w.Services.GetStore(), func() (runtime.Object, error) {
			return w.client.CoreV1().Services(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
		}},
		{"EndpointSlices", w.Slices.GetStore(), func() (runtime.Object, error) {
			return w.client.DiscoveryV1().EndpointSlices(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
		}},
	} {
		now, err := list.list()
		if err != nil {
			return fmt.Errorf("list %s: %w", list.what, err)
		}
		m, err := markOf(list.held, now)
		if err != nil {
			return fmt.Errorf("list %s: %w", list.what, err)
		}
		for !m.reached(list.held) {
			if err := pause(ctx, lookEvery); err != nil {
				return fmt.Errorf("the watch of %s does not show what the API held at version %s yet: %w", list.what, m.version, err)
			}
		}
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// mark is what a watch has not shown yet of a list.
type mark struct {
	version string
	missing map[string]string // the version of what is not held, or older, by key
	stale   map[string]bool   // what is held and was deleted
}

func markOf(held cache.Store, list runtime.Object) (*mark, error) {
	m := &mark{version: version(list), missing: map[string]string{}, stale: map[string]bool{}}
	objects, err := meta.ExtractList(list)
	if err != nil {
		return nil, err
	}
	for _, o := range objects {
		key, err := cache.MetaNamespaceKeyFunc(o)
		if err != nil {
			return nil, err
		}
		m.missing[key] = version(o)
	}
	for _, key := range held.ListKeys() {
		if _, listed := m.missing[key]; !listed {
			m.stale[key] = true
		}
	}
	return m, nil
}

// reached reports whether the store is as new as the list was, and forgets what it
// shows. The store's own version says so for what has been deleted since; it moves with
// what happens to objects of the kind, or once a minute.
func (m *mark) reached(held cache.Store) bool {
	if !older(held.LastStoreSyncResourceVersion(), m.version) {
		return true
	}
	for key, v := range m.missing {
		if have, ok, err := held.GetByKey(key); err == nil && ok && !older(version(have), v) {
			delete(m.missing, key)
		}
	}
	for key := range m.stale {
		if have, ok, err := held.GetByKey(key); err == nil && (!ok || !older(version(have), m.version)) {
			delete(m.stale, key)
		}
	}
	return len(m.missing) == 0 && len(m.stale) == 0
}

// older reports whether the version x is before y.
func older(x, y string) bool {
	m, err := strconv.ParseUint(x, 10, 64)
	n, err2 := strconv.ParseUint(y, 10, 64)
	if err != nil || err2 != nil {
		return x != y
	}
	return m < n
}

func version(obj any) string {
	m, err := meta.CommonAccessor(obj)
	if err != nil {
		return ""
	}
	return m.GetResourceVersion()
}
