// Package watches holds what several parts of a node follow of the cluster: the
// Services, EndpointSlices and Nodes. Each is watched once, and not by each part
// again: a change of a node goes to every other node, so that what a node asks for
// twice costs a server of a thousand nodes a thousand messages.
package watches

import (
	"context"
	"fmt"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	discoveryinformers "k8s.io/client-go/informers/discovery/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/clusterd/clusterd/apis/names"
)

// ByService is the index of EndpointSlices by NAMESPACE/NAME of their Service.
const ByService = "service"

// ServiceOf is the function of the index ByService.
func ServiceOf(obj any) ([]string, error) {
	s := obj.(*discoveryv1.EndpointSlice)
	return []string{s.Namespace + "/" + s.Labels[discoveryv1.LabelServiceName]}, nil
}

// Watches are one node's. Handlers and indexes can be added at any time.
type Watches struct {
	// Services are indexed by cache.NamespaceIndex, Slices by ByService.
	Services, Slices, Nodes cache.SharedIndexInformer

	client kubernetes.Interface
}

// New starts nothing.
func New(client kubernetes.Interface) (*Watches, error) {
	w := &Watches{
		Services: coreinformers.NewServiceInformer(client, metav1.NamespaceAll, 0, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc}),
		Slices:   discoveryinformers.NewEndpointSliceInformer(client, metav1.NamespaceAll, 0, cache.Indexers{ByService: ServiceOf}),
		Nodes:    coreinformers.NewNodeInformer(client, 0, cache.Indexers{}),
		client:   client,
	}
	for _, i := range w.all() {
		if err := i.SetTransform(trim); err != nil {
			return nil, fmt.Errorf("watches: %w", err)
		}
	}
	return w, nil
}

func (w *Watches) all() []cache.SharedIndexInformer {
	return []cache.SharedIndexInformer{w.Services, w.Slices, w.Nodes}
}

// Run watches until ctx ends.
func (w *Watches) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	for _, i := range w.all() {
		wg.Go(func() { i.RunWithContext(ctx) })
	}
	wg.Wait()
	return nil
}

// trim leaves out what no part of a node looks at: of each object there is one on
// every node.
func trim(obj any) (any, error) {
	switch o := obj.(type) {
	case *discoveryv1.EndpointSlice:
		o.ManagedFields, o.Annotations, o.OwnerReferences = nil, nil, nil
		for i := range o.Endpoints {
			o.Endpoints[i].TargetRef, o.Endpoints[i].DeprecatedTopology = nil, nil
		}
	case *v1.Service:
		o.ManagedFields, o.Annotations = nil, nil
	case *v1.Node:
		var kept map[string]string
		for _, name := range []string{names.WireGuard, names.AnnounceNetworks} {
			if value, ok := o.Annotations[name]; ok {
				if kept == nil {
					kept = map[string]string{}
				}
				kept[name] = value
			}
		}
		o.ManagedFields, o.Annotations = nil, kept
		o.Status = v1.NodeStatus{
			Addresses:  o.Status.Addresses,
			Conditions: slices.DeleteFunc(o.Status.Conditions, func(c v1.NodeCondition) bool { return c.Type != v1.NodeReady }),
		}
	}
	return obj, nil
}
