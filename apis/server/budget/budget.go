// Package budget keeps one writer from filling the store's history, which all
// watches and lists live from, and its log, which all heartbeats go through:
// each writer has a token bucket of bytes, and is answered 429 while it is
// empty.
//
// What was written is heard from the store's log, on every server alike, so a
// writer has one budget however many servers it speaks to; what is under way
// through this server is counted until the log has it.
package budget

import (
	"context"
	"fmt"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// Config is what a Budget is made from. All fields but the last three are
// required.
type Config struct {
	// HistoryBytes is what the store's history holds.
	HistoryBytes int64
	// Window is the time in which one writer may fill half of the history.
	Window time.Duration
	// Writer is whom an origin of the store's history belongs to: several
	// programs of one user are one writer. Nil: each origin is one.
	Writer func(origin string) string
	// Now is the store's clock, in which its log is stamped. Nil: time.Now.
	Now func() time.Time
	// Refused is called for each write that is refused; begins says that the
	// writer has not been for a while. It must not wait. Nil: no call.
	Refused func(writer, why string, begins bool)
}

// maxWriters bounds the number of writers with a bucket of their own; further ones
// share the bucket of others.
const maxWriters = 4096

// others is the name of the shared bucket.
const others = "(others)"

// remindAfter is after how many milliseconds a writer that is still held back is
// reported again: Refused is called with begins.
const remindAfter = 10 * 60 * 1000

// Budget bounds writers. A nil Budget bounds no writer. It is safe for concurrent
// use.
type Budget struct {
	cfg    Config
	limits limits

	mu      sync.Mutex
	writers map[string]*writer
	swept   int64 // when writers with nothing used were last forgotten
}

type writer struct {
	bucket
	pending float64 // bytes under way through this server
	noticed int64   // when Refused was last called for it; 0: never
}

// New makes a Budget in which nothing is used.
func New(cfg Config) *Budget {
	if cfg.Writer == nil {
		cfg.Writer = func(origin string) string { return origin }
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Refused == nil {
		cfg.Refused = func(string, string, bool) {}
	}
	return &Budget{cfg: cfg, limits: limitsFor(cfg.HistoryBytes, cfg.Window), writers: map[string]*writer{}}
}

// Written counts what the log says was written, in order or not; millis is the
// log's time. Changes without a user are not counted: the store's own, and those from
// outside of requests.
func (b *Budget) Written(origin string, millis, bytes int64) {
	if b == nil || origin == "" {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	_, w := b.of(origin, millis)
	w.use(b.limits, millis, float64(bytes))
}

// Reserve lets a write of so many bytes begin, or refuses it. done has to be
// called when its outcome is known. The cluster's own Leases and the status of nodes are
// counted but never refused: without them nodes would be given up for dead, and loops
// without a leader.
func (b *Budget) Reserve(ctx context.Context, origin string, bytes int64) (done func(), err error) {
	if b == nil || origin == "" {
		return func() {}, nil
	}
	now := b.cfg.Now().UnixMilli()
	b.mu.Lock()
	name, w := b.of(origin, now)
	wait := w.wait(b.limits, now, w.pending)
	if wait > 0 && !vital(ctx) {
		begins := w.noticed == 0 || now-w.noticed > remindAfter
		if begins {
			w.noticed = now
		}
		b.mu.Unlock()
		why := b.why(name)
		b.cfg.Refused(name, why, begins)
		seconds := int((wait + time.Second - 1) / time.Second)
		return nil, apierrors.NewTooManyRequests(fmt.Sprintf("%s; nothing was changed, try again in %d s", why, seconds), seconds)
	}
	w.pending += float64(bytes)
	b.mu.Unlock()
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		w.pending -= float64(bytes)
	}, nil
}

// HeldBack reports whether the writer of an origin would be refused now.
func (b *Budget) HeldBack(origin string) bool {
	if b == nil || origin == "" {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	w := b.writers[b.cfg.Writer(origin)]
	return w != nil && w.wait(b.limits, b.cfg.Now().UnixMilli(), w.pending) > 0
}

// why is what a writer did, what it may do, and what is to be done.
func (b *Budget) why(name string) string {
	atOnce := resource.NewQuantity(int64(b.limits.burst), resource.BinarySI)
	return fmt.Sprintf("writer %q is held back: it may write %s at once and %.1f KiB a second after that, so that it fills no more than half of the store's history in %s;"+
		" let it write less (`clusterctl store top` names writers and what they write), or raise storeHistorySize or lower storeWriterWindow on every server",
		name, atOnce, b.limits.rate*1000/1024, b.cfg.Window)
}

// of is the writer of an origin. Caller holds mu.
func (b *Budget) of(origin string, millis int64) (string, *writer) {
	name := b.cfg.Writer(origin)
	if w := b.writers[name]; w != nil {
		return name, w
	}
	if len(b.writers) >= maxWriters {
		if b.forget(millis); len(b.writers) >= maxWriters {
			name = others
		}
	}
	w := b.writers[name]
	if w == nil {
		w = &writer{bucket: bucket{at: millis}}
		b.writers[name] = w
	}
	return name, w
}

// forget drops writers of whom nothing is left to count, once a second at most:
// when all are busy there is nothing to find. Caller holds mu.
func (b *Budget) forget(millis int64) {
	if millis-b.swept < 1000 {
		return
	}
	b.swept = millis
	for name, w := range b.writers {
		if w.drain(b.limits, millis); w.used == 0 && w.pending == 0 {
			delete(b.writers, name)
		}
	}
}

// vital reports whether the request that ctx belongs to says that a node, or a part of
// the cluster itself, is alive.
func vital(ctx context.Context) bool {
	info, ok := request.RequestInfoFrom(ctx)
	if !ok {
		return false
	}
	switch {
	case info.APIGroup == coordinationv1.GroupName && info.Resource == "leases":
		// Anyone may be let write Leases of a namespace, of any size.
		return info.Namespace == corev1.NamespaceNodeLease || info.Namespace == metav1.NamespaceSystem
	case info.APIGroup == corev1.GroupName && info.Resource == "nodes" && info.Subresource == "status":
		return true
	}
	return false
}
