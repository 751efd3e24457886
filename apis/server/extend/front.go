package extend

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	crdinformers "k8s.io/apiextensions-apiserver/pkg/client/informers/externalversions/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/healthz"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	"k8s.io/kube-aggregator/pkg/apiserver"
	"k8s.io/kube-aggregator/pkg/client/clientset_generated/clientset"
	listers "k8s.io/kube-aggregator/pkg/client/listers/apiregistration/v1"
	"k8s.io/kube-aggregator/pkg/controllers/autoregister"
	aggregatoropenapi "k8s.io/kube-aggregator/pkg/generated/openapi"
)

// Priorities of groups in discovery: kubectl takes a short name for that of
// the first group which has it. Ours go before those of others.
const (
	firstPriority  = 18000
	customPriority = 1000
	ownVersion     = 15
	customVersion  = 100
)

// seedsKnown bounds how long it is waited until the cache has what SeedServices created.
const seedsKnown = 5 * time.Second

// NewFront makes the server that takes all requests. next serves our kinds;
// definitions are the custom kinds, whose groups it makes known.
func NewFront(o *Options, next genericapiserver.DelegationTarget, definitions crdinformers.CustomResourceDefinitionInformer) (*Front, error) {
	services, err := o.serviceStorage()
	if err != nil {
		return nil, err
	}
	c := o.generic()
	c.RESTOptionsGetter = services
	c.MergedResourceConfig = enabled(apiregistrationv1.SchemeGroupVersion)
	c.SkipOpenAPIInstallation = true // it serves the merged documents instead
	// Into these goes a document of its own kinds alone, which it builds at start.
	alone := *c.OpenAPIConfig
	alone.GetDefinitions = aggregatoropenapi.GetOpenAPIDefinitions
	c.OpenAPIConfig = &alone
	// The front names its own group itself: registered, it would be listed twice.
	own := slices.DeleteFunc(slices.Clone(o.Own), func(v schema.GroupVersion) bool { return v.Group == apiregistrationv1.GroupName })
	registered := &registered{want: names(own)}
	c.AddReadyzChecks(healthz.NamedCheck("api-services", registered.check))
	config := apiserver.Config{
		GenericConfig: c,
		ExtraConfig: apiserver.ExtraConfig{
			ProxyClientCertFile:       o.CertFile,
			ProxyClientKeyFile:        o.KeyFile,
			ServiceResolver:           o.Services,
			RejectForwardingRedirects: true,
		},
	}
	var front *apiserver.APIAggregator
	front, err = config.Complete().NewWithDelegate(&documented{next, func() bool {
		return front != nil && slices.Contains(front.GenericAPIServer.Handler.NonGoRestfulMux.ListedPaths(), openAPIv2)
	}})
	if err != nil {
		return nil, fmt.Errorf("configure the server of other's APIs: %w", err)
	}
	client, err := clientset.NewForConfig(c.LoopbackClientConfig)
	if err != nil {
		return nil, fmt.Errorf("client for APIServices: %w", err)
	}
	informer := front.APIRegistrationInformers.Apiregistration().V1().APIServices()
	registered.lister = informer.Lister()
	auto := autoregister.NewAutoRegisterController(informer, client.ApiregistrationV1())
	for i, version := range own {
		want := apiService(version, int32(firstPriority-10*i), ownVersion)
		auto.AddAPIServiceToSyncOnStart(want)
		o.seeds.wants = append(o.seeds.wants, auto.GetAPIServiceToSync(want.Name))
	}
	custom := newRegistration(definitions, auto, o.Own)
	front.GenericAPIServer.AddPostStartHookOrDie("api-services", func(hook genericapiserver.PostStartHookContext) error {
		go custom.run(hook)
		go func() {
			select {
			case <-o.Seeded:
			case <-hook.Done():
				return
			}
			if o.seeds.complete.Load() {
				// They are on their way into the cache.
				_ = wait.PollUntilContextTimeout(hook, 2*time.Millisecond, seedsKnown, true, func(context.Context) (bool, error) {
					return registered.check(nil) == nil, nil
				})
			}
			// What is not there by then is taken for gone.
			if soon(hook, custom.ready) {
				auto.Run(5, hook.Done())
			}
		}()
		return nil
	})
	return &Front{front}, nil
}

// Front is the server that takes all requests.
type Front struct{ *apiserver.APIAggregator }

// Prepared is a Front that can run.
type Prepared interface {
	Run(ctx context.Context) error
}

// Prepare puts the last handlers in place.
func (f *Front) Prepare() (Prepared, error) {
	prepared, err := f.PrepareRun()
	if err != nil {
		return nil, fmt.Errorf("prepare the API server: %w", err)
	}
	return prepared, nil
}

// apiService says that the servers behind the front serve version.
func apiService(version schema.GroupVersion, group, priority int32) *apiregistrationv1.APIService {
	return &apiregistrationv1.APIService{
		ObjectMeta: metav1.ObjectMeta{Name: ServiceName(version)},
		Spec: apiregistrationv1.APIServiceSpec{
			Group: version.Group, Version: version.Version, GroupPriorityMinimum: group, VersionPriority: priority,
		},
	}
}

// ServiceName is the name of the APIService of a group version.
func ServiceName(version schema.GroupVersion) string { return version.Version + "." + version.Group }

func names(versions []schema.GroupVersion) []string {
	all := make([]string, len(versions))
	for i, v := range versions {
		all[i] = ServiceName(v)
	}
	return all
}

// registered tells whether discovery knows our own groups.
type registered struct {
	want   []string
	lister listers.APIServiceLister
	done   atomic.Bool
}

var errNotRegistered = errors.New("not every group of the API is registered yet")

func (r *registered) check(*http.Request) error {
	if r.done.Load() {
		return nil
	}
	for _, name := range r.want {
		if _, err := r.lister.Get(name); err != nil {
			return fmt.Errorf("%s: %w", name, errNotRegistered)
		}
	}
	r.done.Store(true)
	return nil
}
