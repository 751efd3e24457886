package watches

import (
	"context"
	"fmt"
	"strconv"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
)

// Current reports whether all watches hold what the API has now, or newer. After a time
// without the API a watch begins anew when its turn comes, and shows the past until then.
// It lists everything: that is for who must not go by the past, once.
func (w *Watches) Current(ctx context.Context) (bool, error) {
	for what, list := range map[string]struct {
		held cache.Store
		list func() (runtime.Object, error)
	}{
		"Nodes": {w.Nodes.GetStore(), func() (runtime.Object, error) {
			return w.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		}},
		"Services": {w.Services.GetStore(), func() (runtime.Object, error) {
			return w.client.CoreV1().Services(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
		}},
		"EndpointSlices": {w.Slices.GetStore(), func() (runtime.Object, error) {
			return w.client.DiscoveryV1().EndpointSlices(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
		}},
	} {
		now, err := list.list()
		if err != nil {
			return false, fmt.Errorf("list %s: %w", what, err)
		}
		if ok, err := holds(list.held, now); !ok || err != nil {
			return false, err
		}
	}
	return true, nil
}

// holds reports whether a store is as new as a list.
func holds(held cache.Store, list runtime.Object) (bool, error) {
	objects, err := meta.ExtractList(list)
	if err != nil {
		return false, err
	}
	listed := make(map[string]bool, len(objects))
	for _, o := range objects {
		key, err := cache.MetaNamespaceKeyFunc(o)
		if err != nil {
			return false, err
		}
		listed[key] = true
		have, ok, err := held.GetByKey(key)
		if err != nil || !ok || older(have, o) {
			return false, err
		}
	}
	for _, have := range held.List() {
		key, err := cache.MetaNamespaceKeyFunc(have)
		if err != nil {
			return false, err
		}
		if !listed[key] && older(have, list) {
			return false, nil // it was deleted
		}
	}
	return true, nil
}

// older reports whether a is of an older version than b, which may be a list.
func older(a, b any) bool {
	x, y := version(a), version(b)
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
