// Package scales reads and writes the scale subresource of whatever kind has one.
package scales

import (
	"context"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/scale"
)

// Client reads and writes scales. It is safe for concurrent use.
type Client struct {
	Mapper meta.ResettableRESTMapper
	scales scale.ScalesGetter
}

// New returns a Client that asks the server which kinds there are.
func New(client kubernetes.Interface) *Client {
	found := client.Discovery()
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(found))
	return &Client{
		Mapper: mapper,
		scales: scale.New(client.AutoscalingV2().RESTClient(), mapper, dynamic.LegacyAPIPathResolverFunc, scale.NewDiscoveryScaleKindResolver(found)),
	}
}

// Get returns the scale of an object, and what kind of resource the object is.
func (c *Client) Get(ctx context.Context, namespace, apiVersion, kind, name string) (*autoscalingv1.Scale, schema.GroupResource, error) {
	gvk := schema.FromAPIVersionAndKind(apiVersion, kind)
	mapping, err := c.Mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	if err != nil {
		if meta.IsNoMatchError(err) {
			c.Mapper.Reset() // a kind that is defined later is found next time
		}
		return nil, schema.GroupResource{}, err
	}
	of := mapping.Resource.GroupResource()
	found, err := c.scales.Scales(namespace).Get(ctx, of, name, metav1.GetOptions{})
	return found, of, err
}

// Update writes a scale of a resource that Get has named.
func (c *Client) Update(ctx context.Context, namespace string, of schema.GroupResource, target *autoscalingv1.Scale) error {
	_, err := c.scales.Scales(namespace).Update(ctx, of, target, metav1.UpdateOptions{})
	return err
}
