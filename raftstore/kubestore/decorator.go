package kubestore

import (
	"context"
	"fmt"
	"sync"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/cacher"
	"k8s.io/apiserver/pkg/storage/feature"
	"k8s.io/apiserver/pkg/storage/metrics"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/apiserver/pkg/storage/value"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
)

// Config says how the resources of the API server are stored.
type Config struct {
	Store Store
	// Cache puts the watch cache before every resource that is watched by many:
	// lists and watches are then answered from decoded objects, and watches get
	// bookmarks. Without it each list and each watch decodes for itself.
	Cache bool
	// Prefix comes before every key; "" means DefaultPrefix.
	Prefix string
	// Transformer seals the values of a resource at rest; nil, or a nil result,
	// stores them as they are.
	Transformer func(schema.GroupResource) value.Transformer
	// Origin says who makes the request that a context belongs to, in a few
	// words that the store's history keeps. Nil: no writer is named. Called
	// concurrently.
	Origin func(context.Context) string
	// Reserve is asked before each write. Nil: all may begin.
	Reserve ReserveFunc

	clock clock.WithTicker // of the watch cache; nil is watchClock
}

// uncached are the resources that are written much and watched little: a cache
// of them would cost memory and give nothing back.
var uncached = map[schema.GroupResource]bool{
	{Resource: "events"}:                         true,
	{Group: "events.k8s.io", Resource: "events"}: true,
}

// NewDecorator returns what generic.RESTOptions.Decorator wants: it is called
// once per resource and gives that resource its storage. The destroy function
// that comes with a storage stops its cache and may be called more than once.
func NewDecorator(cfg Config) generic.StorageDecorator {
	announceFeatures()
	metrics.Register()
	if cfg.clock == nil {
		cfg.clock = watchClock{}
	}
	return func(
		config *storagebackend.ConfigForResource,
		resourcePrefix string,
		keyFunc func(obj runtime.Object) (string, error),
		newFunc func() runtime.Object,
		newListFunc func() runtime.Object,
		attrs storage.AttrFunc,
		triggers storage.IndexerFuncs,
		indexers *cache.Indexers,
	) (storage.Interface, factory.DestroyFunc, error) {
		raw, err := New(Options{
			Store:           cfg.Store,
			Prefix:          cfg.Prefix,
			ResourcePrefix:  resourcePrefix,
			GroupResource:   config.GroupResource,
			Codec:           config.Codec,
			Transformer:     cfg.transformer(config),
			Origin:          cfg.Origin,
			Reserve:         cfg.Reserve,
			NewFunc:         newFunc,
			TolerateCorrupt: utilfeature.DefaultFeatureGate.Enabled(features.AllowUnsafeMalformedObjectDeletion),
		})
		if err != nil {
			return nil, nil, err
		}
		if !cfg.Cache || uncached[config.GroupResource] {
			return raw, func() {}, nil
		}
		window := config.EventsHistoryWindow
		if window == 0 {
			window = storagebackend.DefaultEventsHistoryWindow
		}
		c, err := cacher.NewCacherFromConfig(cacher.Config{
			Storage:             raw,
			Versioner:           raw.Versioner(),
			GroupResource:       config.GroupResource,
			EventsHistoryWindow: window,
			ResourcePrefix:      resourcePrefix,
			KeyFunc:             keyFunc,
			GetAttrsFunc:        attrs,
			IndexerFuncs:        triggers,
			Indexers:            indexers,
			NewFunc:             newFunc,
			NewListFunc:         newListFunc,
			Codec:               config.Codec,
			Clock:               cfg.clock,
		})
		if err != nil {
			return nil, nil, fmt.Errorf("watch cache of %s: %w", config.GroupResource, err)
		}
		delegator := cacher.NewCacheDelegator(c, raw)
		destroy := sync.OnceFunc(func() {
			delegator.Stop()
			c.Stop()
		})
		return &resuming{delegator, raw}, destroy, nil
	}
}

// transformer seals the values of one resource: the API server's own choice
// first, then ours.
func (cfg *Config) transformer(config *storagebackend.ConfigForResource) value.Transformer {
	if config.Transformer != nil || cfg.Transformer == nil {
		return config.Transformer
	}
	return cfg.Transformer(config.GroupResource)
}

// supported answers for our store what the library otherwise asks an etcd
// client; without it the watch cache would serve no consistent reads and no
// watch lists.
type supported struct{ feature.FeatureSupportChecker }

// Supports implements feature.FeatureSupportChecker.
func (c supported) Supports(f storage.Feature) bool {
	return f == storage.RequestWatchProgress || c.FeatureSupportChecker.Supports(f)
}

// announceFeatures replaces the library's process-wide answer, once. The
// process must not serve a resource from etcd at the same time.
var announceFeatures = sync.OnceFunc(func() {
	feature.DefaultFeatureSupportChecker = supported{feature.DefaultFeatureSupportChecker}
})
