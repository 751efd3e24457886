package admission

import (
	"context"
	"sync"

	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/openapi"
	"k8s.io/client-go/tools/cache"
)

// lateSchemas is a client that asks for OpenAPI only once there is a policy
// that changes objects. The library's plugin asks every five seconds from the
// start on, and the first question builds the documents of all groups: 50 MB
// and most of the processor time of a start, for nothing where there are no such
// a policy.
type lateSchemas struct {
	kubernetes.Interface
	needed  chan struct{}
	stopped <-chan struct{}
}

func newLateSchemas(client kubernetes.Interface, policies cache.SharedIndexInformer, stopped <-chan struct{}) (*lateSchemas, error) {
	l := &lateSchemas{client, make(chan struct{}), stopped}
	need := sync.OnceFunc(func() { close(l.needed) })
	_, err := policies.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: func(any) { need() }})
	return l, err
}

// Discovery implements kubernetes.Interface.
func (l *lateSchemas) Discovery() discovery.DiscoveryInterfaces {
	return lateDiscovery{l.Interface.Discovery(), l}
}

type lateDiscovery struct {
	discovery.DiscoveryInterfaces
	late *lateSchemas
}

// OpenAPIV3 implements discovery.OpenAPIV3SchemaInterface.
func (d lateDiscovery) OpenAPIV3() openapi.Client {
	return lateOpenAPI{d.DiscoveryInterfaces.OpenAPIV3(), d.late}
}

type lateOpenAPI struct {
	openapi.Client
	late *lateSchemas
}

// Paths waits for the first policy.
func (o lateOpenAPI) Paths() (map[string]openapi.GroupVersion, error) {
	select {
	case <-o.late.needed:
		return o.Client.Paths()
	case <-o.late.stopped:
		return nil, context.Canceled
	}
}
