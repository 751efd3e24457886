// Package loop is the harness every controller runs in: informer events become
// keys, keys go through a rate-limited queue, and each key is handed to one
// Reconcile call at a time. It owns what all controllers share (back-off,
// panics, metrics, events, the guard against a stale cache) and takes no
// decision about any object.
package loop

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Loop is one named activity of the leader. Run blocks until ctx is cancelled
// (then it returns nil) and returns only when all it started has ended.
type Loop struct {
	Name string
	Run  func(ctx context.Context) error
}

// Env is what every controller is given. All fields are required.
type Env struct {
	Client    kubernetes.Interface
	Informers informers.SharedInformerFactory
	Events    *Events
	Clock     clock.WithTicker
	// Hold is called before each Reconcile and may wait; nil: it does not.
	Hold func(context.Context)
}

// Key names one object of the kind a controller is about.
type Key = types.NamespacedName

// KeyOf returns the key of obj.
func KeyOf(obj metav1.Object) Key {
	return Key{Namespace: obj.GetNamespace(), Name: obj.GetName()}
}

// Reconcile brings one object closer to what its spec asks for. It is never
// called twice at once for the same key; different keys run concurrently. A
// returned error means: try again later, with back-off. It must treat what it
// reads from informers as read-only.
type Reconcile func(ctx context.Context, key Key) error

// Bounds of the per-key back-off after errors.
const (
	firstBackoff = 5 * time.Millisecond
	maxBackoff   = 30 * time.Second
)

// Controller turns events into Reconcile calls. Use New, then Watch for each
// informer, then Run once.
type Controller struct {
	name      string
	workers   int
	reconcile Reconcile
	clock     clock.WithTicker
	hold      func(context.Context)
	watches   []func() (cache.ResourceEventHandlerRegistration, error)
	queue     workqueue.TypedRateLimitingInterface[Key]
}

// New returns a controller with the given number of workers. It starts nothing.
func New(name string, env Env, workers int, reconcile Reconcile) *Controller {
	return &Controller{name: name, workers: workers, reconcile: reconcile, clock: env.Clock, hold: env.Hold}
}

// Loop returns the controller as an entry of the list of loops.
func (c *Controller) Loop() Loop { return Loop{Name: c.name, Run: c.Run} }

// Watch calls f for every change that informer reports, in order, from one
// goroutine: old is nil for a new object, obj is nil for a deleted one. It must
// be called before Run. f must be quick and must not change its arguments.
func Watch[T any](c *Controller, informer cache.SharedIndexInformer, f func(old, obj *T)) {
	c.watches = append(c.watches, func() (cache.ResourceEventHandlerRegistration, error) {
		return Handle(informer, f)
	})
}

// Handle is Watch for a loop that is no Controller.
func Handle[T any](informer cache.SharedIndexInformer, f func(old, obj *T)) (cache.ResourceEventHandlerRegistration, error) {
	return informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) {
			if o, ok := obj.(*T); ok {
				f(nil, o)
			}
		},
		UpdateFunc: func(old, obj any) {
			o, ok1 := old.(*T)
			n, ok2 := obj.(*T)
			if ok1 && ok2 {
				f(o, n)
			}
		},
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			if o, ok := obj.(*T); ok {
				f(o, nil)
			}
		},
	})
}

// Latest returns obj, or old if obj is nil: what a handler knows about an object
// whether it changed or went.
func Latest[T any](old, obj *T) *T {
	if obj != nil {
		return obj
	}
	return old
}

// Enqueue asks for a reconcile of key soon. It may be called from any
// goroutine once Run has begun (informer handlers and Reconcile run only then).
func (c *Controller) Enqueue(key Key) { c.queue.Add(key) }

// EnqueueAfter asks for a reconcile of key after d.
func (c *Controller) EnqueueAfter(key Key, d time.Duration) { c.queue.AddAfter(key, d) }

// Run registers the handlers, waits until the caches hold what the server
// held at the start of this leadership, and works until ctx is cancelled.
func (c *Controller) Run(ctx context.Context) error { return c.RunReady(ctx, func() {}) }

// RunReady is Run; it calls ready once the caches are filled and Enqueue may be
// called from outside.
func (c *Controller) RunReady(ctx context.Context, ready func()) error {
	logger := klog.FromContext(ctx).WithValues("loop", c.name)
	ctx = klog.NewContext(ctx, logger)

	c.queue = workqueue.NewTypedRateLimitingQueueWithConfig(
		workqueue.NewTypedItemExponentialFailureRateLimiter[Key](firstBackoff, maxBackoff),
		workqueue.TypedRateLimitingQueueConfig[Key]{Name: c.name, Clock: c.clock})
	defer c.queue.ShutDown()

	var synced []cache.InformerSynced
	for _, watch := range c.watches {
		registration, err := watch()
		if err != nil && ctx.Err() != nil {
			return nil // the informers have stopped already
		}
		if err != nil {
			return fmt.Errorf("loop %s: add event handler: %w", c.name, err)
		}
		synced = append(synced, registration.HasSynced)
	}
	if !cache.WaitForCacheSync(ctx.Done(), synced...) {
		return nil // cancelled before the caches were filled
	}
	ready()
	logger.V(2).Info("loop started", "workers", c.workers)

	group := errgroup.Group{}
	for range c.workers {
		group.Go(func() error {
			for c.work(ctx) {
			}
			return nil
		})
	}
	<-ctx.Done()
	c.queue.ShutDown()
	return group.Wait()
}

func (c *Controller) work(ctx context.Context) bool {
	key, shutdown := c.queue.Get()
	if shutdown {
		return false
	}
	defer c.queue.Done(key)
	if c.hold != nil {
		c.hold(ctx)
	}
	if ctx.Err() != nil {
		return false
	}

	start := c.clock.Now()
	err := c.safely(ctx, key)
	observe(c.name, c.clock.Since(start), err)
	if err == nil {
		c.queue.Forget(key)
		return true
	}
	c.queue.AddRateLimited(key)
	logger := klog.FromContext(ctx)
	switch {
	case ctx.Err() != nil:
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err):
		logger.V(4).Info("reconcile met a newer object, will retry", "key", key, "err", err)
	default:
		logger.Info("reconcile failed, will retry", "key", key, "retries", c.queue.NumRequeues(key), "err", err)
	}
	return true
}

// errPanic marks a reconcile that panicked.
var errPanic = errors.New("panic in reconcile")

func (c *Controller) safely(ctx context.Context, key Key) (err error) {
	defer func() {
		if r := recover(); r != nil {
			countPanic(c.name)
			klog.FromContext(ctx).Error(nil, "panic in reconcile", "key", key, "panic", r, "stack", string(debug.Stack()))
			err = fmt.Errorf("%w of %v: %v", errPanic, key, r)
		}
	}()
	return c.reconcile(ctx, key)
}
