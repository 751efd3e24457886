// Package kinds keeps caches of the kinds of Gateways. They are custom kinds,
// which a server may serve or not, and begin and cease to serve: a kind that is
// not served has no objects.
package kinds

import (
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/tools/cache"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/clusterd/clusterd/apis/gateway"
)

// Kinds are the caches. Use New, then Run once; the other methods may be called
// from any goroutine.
type Kinds struct {
	client dynamic.Interface
	served discovery.ServerResourcesInterfaceWithContext
	// again is how often a server that does not serve all kinds is asked for
	// them, and one that does not answer at all.
	again, retry time.Duration

	mu     sync.Mutex // guards both
	caches map[string]cache.SharedIndexInformer
	known  bool
}

// New returns empty caches.
func New(client dynamic.Interface, served discovery.ServerResourcesInterfaceWithContext) *Kinds {
	return &Kinds{client: client, served: served, again: 10 * time.Second, retry: time.Second, caches: map[string]cache.SharedIndexInformer{}}
}

// Run keeps the caches until ctx ends. It calls changed after each change, and
// when Known begins to say so; changed must not block.
func (k *Kinds) Run(ctx context.Context, changed func()) error {
	work, ctx := errgroup.WithContext(ctx)
	work.Go(func() error {
		for n := 0; ; n++ {
			wait := k.again
			if n < 30 { // they may be about to be installed
				wait = k.retry
			}
			lists, err := k.ask(ctx)
			if err != nil {
				wait = k.retry
			} else if err := k.begin(ctx, work, lists, changed); err != nil {
				return err
			}
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(wait):
			}
			if k.complete() {
				return nil
			}
		}
	})
	return work.Wait()
}

// begin starts the caches of kinds that are served and have none.
func (k *Kinds) begin(ctx context.Context, work *errgroup.Group, lists []*metav1.APIResourceList, changed func()) error {
	var filled []<-chan struct{}
	for _, resource := range gateway.Resources {
		gvr, served := gateway.Version(resource, lists)
		if !served || k.cache(resource) != nil {
			continue
		}
		i := dynamicinformer.NewFilteredDynamicInformer(k.client, gvr, metav1.NamespaceAll, 0, cache.Indexers{}, nil).Informer()
		if err := i.SetTransform(gateway.Typed); err != nil {
			return fmt.Errorf("cache of %s: %w", resource, err)
		}
		h, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: func(any) { changed() }, UpdateFunc: func(_, _ any) { changed() }, DeleteFunc: func(any) { changed() },
		})
		if err != nil {
			return fmt.Errorf("cache of %s: %w", resource, err)
		}
		filled = append(filled, h.HasSyncedChecker().Done())
		k.mu.Lock()
		k.caches[resource] = i
		k.mu.Unlock()
		work.Go(func() error {
			i.RunWithContext(ctx)
			return nil
		})
	}
	for _, f := range filled {
		select {
		case <-f:
		case <-ctx.Done():
			return nil
		}
	}
	k.mu.Lock()
	k.known = true
	k.mu.Unlock()
	changed()
	return nil
}

// ask returns what is served of the group.
func (k *Kinds) ask(ctx context.Context) (out []*metav1.APIResourceList, _ error) {
	for _, v := range gateway.Versions {
		list, err := k.served.ServerResourcesForGroupVersionWithContext(ctx, gateway.Group+"/"+v)
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			return nil, err
		default:
			out = append(out, list)
		}
	}
	return out, nil
}

func (k *Kinds) cache(resource string) cache.SharedIndexInformer {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.caches[resource]
}

func (k *Kinds) complete() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.caches) == len(gateway.Resources)
}

// Known reports whether the caches hold what the server held when it was first
// asked.
func (k *Kinds) Known() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.known
}

// Served reports whether there may be Gateways, and the caches hold all of them and
// of their classes.
func (k *Kinds) Served() bool {
	for _, resource := range []string{gateway.Classes, gateway.Gateways} {
		if c := k.cache(resource); c == nil || !c.HasSynced() {
			return false
		}
	}
	return true
}

// Fill puts the objects into o. They must not be changed.
func (k *Kinds) Fill(o *gateway.Objects) {
	list := func(resource string) []any {
		if c := k.cache(resource); c != nil {
			return c.GetStore().List()
		}
		return nil
	}
	o.Classes = gateway.List[gatewayv1.GatewayClass](list(gateway.Classes))
	o.Gateways = gateway.List[gatewayv1.Gateway](list(gateway.Gateways))
	o.HTTPRoutes = gateway.List[gatewayv1.HTTPRoute](list(gateway.HTTPRoutes))
	o.GRPCRoutes = gateway.List[gatewayv1.GRPCRoute](list(gateway.GRPCRoutes))
	o.Policies = gateway.List[gatewayv1.BackendTLSPolicy](list(gateway.Policies))
	o.Grants = gateway.List[gatewayv1.ReferenceGrant](list(gateway.Grants))
}
