package fault

import (
	"context"
	"slices"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"
)

// seen is one revision that a watcher received.
type seen struct {
	revision int64
	key      string
	n        int
}

// watcher follows the ConfigMaps through one node. When its connection breaks
// it goes on after the last revision it received.
type watcher struct {
	r    *run
	node int
	from int64

	mu      sync.Mutex
	heard   []seen
	last    int64 // of events and bookmarks
	resumed int   // how often the watch was opened again
	// gaps are the times the node had forgotten the revisions in between, and
	// everything had to be listed again, which clients support at a cost.
	gaps [][2]int64
}

// run follows until ctx ends.
func (w *watcher) run(ctx context.Context) {
	w.last = w.from
	for ctx.Err() == nil {
		if err := w.follow(ctx); apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
			w.relist(ctx)
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond): // the node may be down
		}
	}
}

// follow watches until the connection ends.
func (w *watcher) follow(ctx context.Context) error {
	stream, err := w.r.api(w.node).CoreV1().ConfigMaps(namespace).Watch(ctx, metav1.ListOptions{
		ResourceVersion: strconv.FormatInt(w.at(), 10), AllowWatchBookmarks: true, TimeoutSeconds: ptr.To[int64](600),
	})
	if err != nil {
		return err
	}
	defer stream.Stop()
	w.mu.Lock()
	w.resumed++
	w.mu.Unlock()
	for e := range stream.ResultChan() {
		if e.Type == watch.Error {
			return apierrors.FromObject(e.Object)
		}
		if !w.hear(e) {
			return nil
		}
	}
	return nil
}

func (w *watcher) at() int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.last
}

// hear notes one event.
func (w *watcher) hear(e watch.Event) bool {
	cm, ok := e.Object.(*corev1.ConfigMap)
	if !ok {
		w.r.t.Errorf("the watcher of n%d received a %T", w.node+1, e.Object)
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if e.Type == watch.Bookmark {
		revision, err := strconv.ParseInt(cm.ResourceVersion, 10, 64)
		if err != nil || revision < w.last {
			w.r.t.Errorf("the watcher of n%d is at %d and got a bookmark of %q", w.node+1, w.last, cm.ResourceVersion)
			return false
		}
		w.last = revision
		return true
	}
	if cm.Name == "kube-root-ca.crt" {
		return true
	}
	n, revision, err := counted(cm)
	if err != nil || revision <= w.last {
		w.r.t.Errorf("OUT OF ORDER: the watcher of n%d is at %d and received %s %s = %d at %d (%v)", w.node+1, w.last, e.Type, cm.Name, n, revision, err)
		return false
	}
	w.last = revision
	w.heard = append(w.heard, seen{revision, cm.Name, n})
	return true
}

// relist lists and starts over where the node is now.
func (w *watcher) relist(ctx context.Context) {
	list, err := w.r.api(w.node).CoreV1().ConfigMaps(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return
	}
	revision, err := strconv.ParseInt(list.ResourceVersion, 10, 64)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil || revision < w.last {
		w.r.t.Errorf("n%d forgot what came after %d and lists %q", w.node+1, w.last, list.ResourceVersion)
		return
	}
	w.gaps = append(w.gaps, [2]int64{w.last, revision})
	w.last = revision
}

// missed returns the acknowledged writes that the watcher did not receive.
func (w *watcher) missed(all map[string][]ack) []ack {
	w.mu.Lock()
	defer w.mu.Unlock()
	received := map[int64]seen{}
	for _, s := range w.heard {
		received[s.revision] = s
	}
	var missed []ack
	for _, acks := range all {
		for _, a := range acks {
			if s, ok := received[a.revision]; (ok && s.key == a.key && s.n == a.n) || w.inGap(a.revision) {
				continue
			}
			missed = append(missed, a)
		}
	}
	return missed
}

// all is what the watcher has received so far.
func (w *watcher) all() []seen {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.heard)
}

func (w *watcher) skipped(revision int64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.inGap(revision)
}

// inGap is called with mu held.
func (w *watcher) inGap(revision int64) bool {
	for _, g := range w.gaps {
		if g[0] < revision && revision <= g[1] {
			return true
		}
	}
	return false
}
