package kubestore

import (
	"context"
	"errors"
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/cacher"
)

// resuming is a watch cache whose clients can go on from where they were also
// where the cache cannot: it begins with the state it found at its start, and
// without this every informer in the cluster would list everything again after
// a server's restart. The store's history reaches further back, so the watch is
// then fed from there, as it would be without a cache.
type resuming struct {
	*cacher.CacheDelegator
	raw *Storage
}

// Watch implements storage.Interface.
func (r *resuming) Watch(ctx context.Context, key string, opts storage.ListOptions) (watch.Interface, error) {
	w, err := r.CacheDelegator.Watch(ctx, key, opts)
	if err != nil || opts.SendInitialEvents != nil && *opts.SendInitialEvents {
		return w, err
	}
	if w, err = unlessTooOld(w); !errors.Is(err, errTooOld) {
		return w, err
	}
	// Where the store does not reach back either, its refusal says how far it
	// does. Clients of a cache get bookmarks when they allow them.
	opts.ProgressNotify = opts.Predicate.AllowWatchBookmarks
	return r.raw.Watch(ctx, key, opts)
}

var (
	errTooOld   = errors.New("the watch cache does not reach back that far")
	errStranger = errors.New("kubestore: a watch of the cache looks like its refusals and is none: the library has changed")
)

// unlessTooOld looks at a watch that the cache has just begun. The cache puts
// its refusal into a channel of length one that has ended: nothing else looks
// like that. With errTooOld the watch is over; any other refusal is still
// delivered by the watch returned.
func unlessTooOld(w watch.Interface) (watch.Interface, error) {
	ch := w.ResultChan()
	if cap(ch) != 1 || len(ch) != 1 {
		return w, nil
	}
	e := <-ch
	select {
	case _, more := <-ch:
		if !more {
			break
		}
		return nil, errStranger
	default:
		return nil, errStranger
	}
	if status, ok := e.Object.(*metav1.Status); ok && e.Type == watch.Error && status.Code == http.StatusGone {
		return nil, errTooOld
	}
	again := make(chan watch.Event, 1)
	again <- e
	close(again)
	return watch.NewProxyWatcher(again), nil
}
