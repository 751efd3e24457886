package sched

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"

	"github.com/clusterd/clusterd/sched/schedtest"
)

// client is the fake clientset; it serves one kind that the collector can
// watch, so that its loop gets going.
type client struct{ *fake.Clientset }

func (c client) Discovery() discovery.DiscoveryInterfaces {
	return kinds{c.Clientset.Discovery()}
}

type kinds struct{ discovery.DiscoveryInterfaces }

func (kinds) ServerPreferredResourcesWithContext(context.Context) ([]*metav1.APIResourceList, error) {
	return []*metav1.APIResourceList{{GroupVersion: "v1", APIResources: []metav1.APIResource{
		{Name: "configmaps", Kind: "ConfigMap", Namespaced: true, Verbs: metav1.Verbs{"list", "watch", "delete"}},
	}}}, nil
}

func config(c *schedtest.Cluster) Config {
	scheme := metadatafake.NewTestScheme()
	_ = metav1.AddMetaToScheme(scheme)
	return Config{
		Client:   client{c.Client},
		Metadata: metadatafake.NewSimpleMetadataClient(scheme),
		RootCA:   []byte("PEM"),
	}
}
