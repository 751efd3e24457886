package extend

import (
	"net/url"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/util/proxy"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/informers"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
)

// services finds where a Service can be reached from this process.
type services struct {
	services corelisters.ServiceLister
	slices   discoverylisters.EndpointSliceLister
}

var _ webhook.ServiceResolver = &services{}

// NewServiceResolver finds the ends of Services for webhooks and for the APIs
// of others: one of the ready endpoints. Pods are reachable from every node,
// while a Service's own address is only where its rules have been set. It uses
// two informers of the factory.
func NewServiceResolver(factory informers.SharedInformerFactory) webhook.ServiceResolver {
	return &services{
		services: factory.Core().V1().Services().Lister(),
		slices:   factory.Discovery().V1().EndpointSlices().Lister(),
	}
}

// ResolveEndpoint implements webhook.ServiceResolver.
func (s *services) ResolveEndpoint(namespace, name string, port int32) (*url.URL, error) {
	service, err := s.services.Services(namespace).Get(name)
	if err != nil {
		return nil, err
	}
	if service.Spec.Type == corev1.ServiceTypeExternalName {
		return proxy.ResolveCluster(s.services, namespace, name, port)
	}
	return proxy.ResolveEndpoint(s.services, s, namespace, name, port)
}

// GetEndpointSlices implements proxy.EndpointSliceGetter.
func (s *services) GetEndpointSlices(namespace, name string) ([]*discoveryv1.EndpointSlice, error) {
	return s.slices.EndpointSlices(namespace).List(labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: name}))
}
