package sched

import (
	"context"
	"reflect"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/cache"

	"github.com/clusterd/clusterd/sched/loop"
)

// sharedInformers are the informers of all loops; each kind has one.
type sharedInformers struct {
	informers.SharedInformerFactory
	started chan struct{} // closed when those that the loops asked for run
}

func newSharedInformers(client kubernetes.Interface) *sharedInformers {
	return &sharedInformers{SharedInformerFactory: newInformers(client), started: make(chan struct{})}
}

// loop runs the informers, once.
func (s *sharedInformers) loop() Loop {
	return loop.Loop{Name: "informers", Run: func(ctx context.Context) error {
		s.StartWithContext(ctx)
		close(s.started)
		<-ctx.Done()
		s.Shutdown()
		return nil
	}}
}

// of returns the informer of a kind if some loop has one, else nil. It waits until
// they run or ctx ends.
func (s *sharedInformers) of(ctx context.Context, resource schema.GroupVersionResource, kind string) cache.SharedIndexInformer {
	select {
	case <-ctx.Done():
		return nil
	case <-s.started:
	}
	obj, err := clientscheme.Scheme.New(resource.GroupVersion().WithKind(kind))
	if err != nil {
		return nil // a custom kind
	}
	// The factory names its informers by their types to those who wait for them only.
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if _, ok := s.WaitForCacheSyncWithContext(ended).Synced[reflect.TypeOf(obj)]; !ok {
		return nil
	}
	informer, err := s.ForResource(resource)
	if err != nil {
		return nil
	}
	return informer.Informer()
}

// newInformers returns informers whose first list is the newest state, not
// what some server's cache happens to hold: a new leader must see all that its
// predecessor wrote, or it would write it again.
func newInformers(client kubernetes.Interface) informers.SharedInformerFactory {
	return informers.NewSharedInformerFactoryWithOptions(client, 0,
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			if o.ResourceVersion == "0" {
				o.ResourceVersion = ""
			}
		}),
		informers.WithTransform(withoutManagedFields))
}

// withoutManagedFields keeps the caches small: no decision looks at who wrote
// a field, and the server keeps the records of an update that carries none.
func withoutManagedFields(obj any) (any, error) {
	if o, ok := obj.(metav1.Object); ok && o.GetManagedFields() != nil {
		o.SetManagedFields(nil)
	}
	return obj, nil
}
