package extend

import (
	"context"
	"time"

	crdinformers "k8s.io/apiextensions-apiserver/pkg/client/informers/externalversions"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	serviceinformers "k8s.io/kube-aggregator/pkg/client/informers/externalversions"
)

// Informers are the caches of the store that the servers of the chain share.
type Informers struct {
	Ours        informers.SharedInformerFactory
	Definitions crdinformers.SharedInformerFactory
	Services    serviceinformers.SharedInformerFactory
}

// Start begins all informers, which end with ctx, and returns when each has
// been filled, or false if ctx ends before.
func (i Informers) Start(ctx context.Context) bool {
	i.Ours.Start(ctx.Done())
	i.Definitions.Start(ctx.Done())
	i.Services.Start(ctx.Done())
	return i.waitSynced(ctx)
}

func (i Informers) waitSynced(ctx context.Context) bool {
	// A wait that ends at once asks every informer without waiting for it.
	past, cancel := context.WithCancel(ctx)
	cancel()
	return soon(ctx, func() bool {
		for _, synced := range i.Ours.WaitForCacheSync(past.Done()) {
			if !synced {
				return false
			}
		}
		for _, synced := range i.Definitions.WaitForCacheSync(past.Done()) {
			if !synced {
				return false
			}
		}
		for _, synced := range i.Services.WaitForCacheSync(past.Done()) {
			if !synced {
				return false
			}
		}
		return true
	})
}

// soon polls often: it is used for what takes milliseconds.
func soon(ctx context.Context, done func() bool) bool {
	err := wait.PollUntilContextCancel(ctx, 2*time.Millisecond, true, func(context.Context) (bool, error) { return done(), nil })
	return err == nil
}
