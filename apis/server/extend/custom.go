package extend

import (
	"fmt"
	"net/http"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	crdserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	genericapiserver "k8s.io/apiserver/pkg/server"
	serverstorage "k8s.io/apiserver/pkg/server/storage"
	apistorage "k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/util/webhook"
	aggregatorv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
)

// Options are what both servers of this package need.
type Options struct {
	// Generic is the configuration of the server of our kinds. It is copied.
	Generic *genericapiserver.RecommendedConfig
	Storage generic.StorageDecorator
	// Prefix is the folder of the storage that holds a resource.
	Prefix func(group, resource string) string
	// Services finds the Services of webhooks and of the APIs of others.
	Services webhook.ServiceResolver
	// Webhooks says how webhooks are called.
	Webhooks webhook.AuthenticationInfoResolverWrapper
	// CertFile and KeyFile identify the front to the APIs of others; empty:
	// nothing does.
	CertFile, KeyFile string
	// Own are the group versions of our kinds, the foremost first.
	Own []schema.GroupVersion

	// Documents are the OpenAPI documents of the servers of the chain.
	Documents *Documents

	// Seeded is closed when APIServices may be registered: until then a new cluster's
	// are created.
	Seeded <-chan struct{}

	// stores keep the definitions and the APIServices.
	stores []apistorage.Interface
	// seeds are the APIServices of our own groups, once NewFront has returned.
	seeds seeds
}

// generic is a copy of the configuration for one more server of the chain. Only
// the front has filters: a delegate is asked behind them.
func (o *Options) generic() *genericapiserver.RecommendedConfig {
	c := *o.Generic
	c.PostStartHooks = map[string]genericapiserver.PostStartHookConfigEntry{}
	return &c
}

// Delegate makes c that of a server which is only asked by another one: it filters
// nothing, and the health checks of all are the other one's, so that their paths are
// not put up a second time for nobody to ask.
func Delegate(c *genericapiserver.Config) {
	c.BuildHandlerChainFunc = func(handler http.Handler, _ *genericapiserver.Config) http.Handler { return handler }
	c.HealthzChecks, c.LivezChecks, c.ReadyzChecks = nil, nil, nil
}

// NewCustom makes the server of CustomResourceDefinitions and of the objects
// they define. What it does not know goes to next.
func NewCustom(o *Options, next genericapiserver.DelegationTarget) (*crdserver.CustomResourceDefinitions, error) {
	definitions, err := o.definitionStorage()
	if err != nil {
		return nil, err
	}
	c := o.generic()
	Delegate(&c.Config)
	c.RESTOptionsGetter = definitions
	c.MergedResourceConfig = enabled(apiextensionsv1.SchemeGroupVersion)
	c.SkipOpenAPIInstallation = true // or it would build the documents of all custom kinds at start
	config := crdserver.Config{
		GenericConfig: c,
		ExtraConfig: crdserver.ExtraConfig{
			CRDRESTOptionsGetter: o.objectStorage(),
			// One: a new kind is established at once, not after five seconds
			// in which other servers may learn of it. They watch the store
			// and know within milliseconds.
			MasterCount:         1,
			ServiceResolver:     o.Services,
			AuthResolverWrapper: o.Webhooks,
		},
	}
	server, err := config.Complete().New(next)
	if err != nil {
		return nil, fmt.Errorf("configure the server of custom kinds: %w", err)
	}
	o.Documents.Install(server.GenericAPIServer, c.OpenAPIConfig, c.OpenAPIV3Config, server.Informers.Apiextensions().V1().CustomResourceDefinitions().Lister())
	return server, nil
}

func enabled(version schema.GroupVersion) *serverstorage.ResourceConfig {
	c := serverstorage.NewResourceConfig()
	c.EnableVersions(version)
	return c
}

// Versions are the group versions of this package's own kinds.
var Versions = []schema.GroupVersion{apiextensionsv1.SchemeGroupVersion, aggregatorv1.SchemeGroupVersion}
