package extend

import (
	"context"
	"slices"
	"sync/atomic"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	crdinformers "k8s.io/apiextensions-apiserver/pkg/client/informers/externalversions/apiextensions/v1"
	listers "k8s.io/apiextensions-apiserver/pkg/client/listers/apiextensions/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/kube-aggregator/pkg/controllers/autoregister"
)

// registration keeps an APIService for each group version that some
// CustomResourceDefinition serves, so that discovery and OpenAPI show it.
type registration struct {
	lister  listers.CustomResourceDefinitionLister
	handler cache.ResourceEventHandlerRegistration
	target  autoregister.AutoAPIServiceRegistration
	own     []schema.GroupVersion // registered by others, permanently
	queue   workqueue.TypedInterface[schema.GroupVersion]
	first   atomic.Bool // every version known at the start was looked at
}

func newRegistration(definitions crdinformers.CustomResourceDefinitionInformer, target autoregister.AutoAPIServiceRegistration, own []schema.GroupVersion) *registration {
	r := &registration{
		lister: definitions.Lister(),
		target: target,
		own:    own,
		queue:  workqueue.NewTyped[schema.GroupVersion](),
	}
	enqueue := func(obj any) {
		if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
			obj = gone.Obj
		}
		definition, ok := obj.(*apiextensionsv1.CustomResourceDefinition)
		if !ok {
			return
		}
		for _, version := range definition.Spec.Versions {
			r.queue.Add(schema.GroupVersion{Group: definition.Spec.Group, Version: version.Name})
		}
	}
	// AddEventHandler fails only for an informer that has been stopped.
	r.handler, _ = definitions.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    enqueue,
		UpdateFunc: func(old, obj any) { enqueue(old); enqueue(obj) },
		DeleteFunc: enqueue,
	})
	return r
}

// ready tells whether all kinds of the start are registered.
func (r *registration) ready() bool { return r.first.Load() }

// run blocks until ctx ends.
func (r *registration) run(ctx context.Context) {
	stop := context.AfterFunc(ctx, r.queue.ShutDown)
	defer stop()
	if !soon(ctx, r.handler.HasSynced) {
		return
	}
	for r.queue.Len() > 0 {
		r.next(ctx)
	}
	r.first.Store(true)
	for r.next(ctx) {
	}
}

func (r *registration) next(ctx context.Context) bool {
	version, stop := r.queue.Get()
	if stop {
		return false
	}
	defer r.queue.Done(version)
	if slices.Contains(r.own, version) {
		return true
	}
	definitions, err := r.lister.List(labels.Everything())
	if err != nil { // a lister reads memory
		klog.FromContext(ctx).Error(err, "Custom kinds cannot be listed")
		return true
	}
	if serves(definitions, version) {
		r.target.AddAPIServiceToSync(apiService(version, customPriority, customVersion))
	} else {
		r.target.RemoveAPIServiceToSync(ServiceName(version))
	}
	return true
}

// serves tells whether one of definitions has a served version of that name.
func serves(definitions []*apiextensionsv1.CustomResourceDefinition, version schema.GroupVersion) bool {
	for _, definition := range definitions {
		if definition.Spec.Group != version.Group {
			continue
		}
		for _, v := range definition.Spec.Versions {
			if v.Name == version.Version && v.Served {
				return true
			}
		}
	}
	return false
}
