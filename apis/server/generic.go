package server

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"strings"
	"sync"

	crdserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	crdopenapi "k8s.io/apiextensions-apiserver/pkg/generated/openapi"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	genericadmission "k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/endpoints/discovery/aggregated"
	"k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	apiopenapi "k8s.io/apiserver/pkg/endpoints/openapi"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericapiserver "k8s.io/apiserver/pkg/server"
	genericfilters "k8s.io/apiserver/pkg/server/filters"
	"k8s.io/apiserver/pkg/server/healthz"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/restmapper"
	"k8s.io/component-base/tracing"
	aggregatorscheme "k8s.io/kube-aggregator/pkg/apiserver/scheme"
	aggregatoropenapi "k8s.io/kube-aggregator/pkg/generated/openapi"
	"k8s.io/kube-openapi/pkg/common"

	"github.com/clusterd/clusterd/apis"
	"github.com/clusterd/clusterd/apis/openapi"
	"github.com/clusterd/clusterd/apis/server/admission"
	"github.com/clusterd/clusterd/apis/server/extend"
	"github.com/clusterd/clusterd/apis/server/fairness"
)

// longRunning are the subresources whose requests have no time limit.
var longRunning = sets.NewString("attach", "exec", "proxy", "log", "portforward")

// newGeneric configures the library: our answers to who, may you and is it
// sane, who is next, and none of its etcd.
func newGeneric(config Config, stores *stores, s *Server) (*genericapiserver.RecommendedConfig, error) {
	c := genericapiserver.NewRecommendedConfig(apis.Codecs)
	c.EffectiveVersion = newEffectiveVersion()
	c.ExternalAddress = config.ExternalAddress
	c.LoopbackClientConfig = s.libraryConfig()
	if config.Tracer != nil {
		c.TracerProvider = config.Tracer
		c.LoopbackClientConfig.Wrap(tracing.WrapperFor(config.Tracer))
	}
	client, err := kubernetes.NewForConfig(c.LoopbackClientConfig)
	if err != nil {
		return nil, fmt.Errorf("client for the API server library: %w", err)
	}
	c.SharedInformerFactory = informers.NewSharedInformerFactory(client, 0)
	c.AggregatedDiscoveryGroupManager = aggregated.NewResourceManager("apis")
	c.RESTOptionsGetter = stores
	c.EnableMetrics = config.Metrics == nil // else serveMetrics does it
	c.RequestTimeout = config.RequestTimeout
	c.ShutdownWatchTerminationGracePeriod = config.DrainTimeout
	// The library insists on a listener. It gets one without clients: our caller listens.
	c.SecureServing = &genericapiserver.SecureServingInfo{Listener: newNoopListener()}

	c.Authorization.Authorizer, c.RuleResolver = s.authorization.chain, s.authorization.rules
	c.Authentication.Authenticator = s.authenticator
	c.Authentication.APIAudiences = config.Audiences
	if err := applyAudit(config.Access, &c.Config); err != nil {
		return nil, err
	}
	// Last: these begin to work when they are made.
	if c.AdmissionControl, err = s.newAdmission(c, client, stores); err != nil {
		return nil, err
	}
	if s.fairness, err = fairness.New(client, c.SharedInformerFactory, config.Seats); err != nil {
		return nil, err
	}
	c.FlowControl = newBodies(s.fairness.Control, c.MaxRequestBodyBytes, config.RequestTimeout)

	namer := apiopenapi.NewDefinitionNamer(apis.Scheme, crdserver.Scheme, aggregatorscheme.Scheme)
	c.OpenAPIConfig = genericapiserver.DefaultOpenAPIConfig(definitions, namer)
	c.OpenAPIConfig.Info.Title = "Kubernetes"
	c.OpenAPIV3Config = genericapiserver.DefaultOpenAPIV3Config(definitions, namer)
	c.OpenAPIV3Config.Info.Title = "Kubernetes"

	basic := genericfilters.BasicLongRunningRequestCheck(sets.NewString("watch", "proxy"), longRunning)
	c.LongRunningFunc = func(req *http.Request, info *request.RequestInfo) bool {
		return basic(req, info) || isRaw(config.RawHandlers, req.URL.Path)
	}

	open := newStreams(config.Streams)
	c.BuildHandlerChainFunc = func(api http.Handler, c *genericapiserver.Config) http.Handler {
		api = withChecks(s.documents.Before(s.quietly(api)), stores, s.ofOthers, c.MaxRequestBodyBytes)
		inner := withAgent(withPast(api, config.Past, c.Authorization.Authorizer))
		// Not counted is what is raw: administrators ask by it how their servers are.
		inner = answeringRefused(open.bounded(inner, basic))
		return withBodies(genericapiserver.DefaultBuildHandlerChain(inner, c))
	}
	c.AddReadyzChecks(
		healthz.NamedCheck("storage", func(*http.Request) error { return stores.ready() }),
		healthz.NamedCheck("system-namespaces", func(*http.Request) error { return s.system.check() }),
		healthz.NamedCheck("default-roles", func(*http.Request) error { return s.authorization.check() }),
	)
	c.AddReadyzChecks(config.ReadyChecks...)
	c.AddHealthChecks(config.HealthChecks...)

	return c, nil
}

// newAdmission makes the admission chain, and before it what finds webhooks and
// the APIs of others.
func (s *Server) newAdmission(c *genericapiserver.RecommendedConfig, client kubernetes.Interface, stores *stores) (genericadmission.Interface, error) {
	dynamicClient, err := dynamic.NewForConfig(c.LoopbackClientConfig)
	if err != nil {
		return nil, fmt.Errorf("client of any kind: %w", err)
	}
	s.services = extend.NewServiceResolver(c.SharedInformerFactory)
	s.webhooks = webhook.NewDefaultAuthenticationInfoResolverWrapper(nil, nil, c.LoopbackClientConfig, c.TracerProvider)
	s.mapper = restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(client.Discovery()))
	return admission.Chain(stores, admission.Options{
		Quota: func(config io.Reader) (func() (genericadmission.Interface, error), error) {
			return newQuota(c, client, stores, config)
		},
		Set:               s.config.Admission,
		TolerationSeconds: *s.config.TolerationSeconds,
		Extensions: &admission.Extensions{
			Client: client, Dynamic: dynamicClient, Informers: c.SharedInformerFactory, Mapper: s.mapper,
			Authorizer: c.Authorization.Authorizer, Version: c.EffectiveVersion,
			Services: s.services, Webhooks: s.webhooks, Stopped: c.DrainedNotify(),
		},
	})
}

// definitions are the OpenAPI definitions of all types that the servers of the
// chain speak of.
func definitions(ref common.ReferenceCallback) map[string]common.OpenAPIDefinition {
	all := crdopenapi.GetOpenAPIDefinitions(ref)
	maps.Copy(all, aggregatoropenapi.GetOpenAPIDefinitions(ref))
	maps.Copy(all, openapi.GetOpenAPIDefinitions(ref))
	return all
}

// noSuchPath answers where nothing is served with what clients understand, a
// Status; the library would list its paths.
func noSuchPath(w http.ResponseWriter, req *http.Request) {
	if !filters.NoMuxAndDiscoveryIncompleteKey(req.Context()) {
		// The custom kinds are not all read yet.
		err := apierrors.NewServiceUnavailable("the server is starting: it does not know all kinds yet")
		err.ErrStatus.Details = &metav1.StatusDetails{RetryAfterSeconds: 1}
		responsewriters.ErrorNegotiated(err, apis.Codecs, schema.GroupVersion{Version: "v1"}, w, req)
		return
	}
	err := apierrors.NewGenericServerResponse(http.StatusNotFound, req.Method, schema.GroupResource{}, "", "", 0, true)
	responsewriters.ErrorNegotiated(err, apis.Codecs, schema.GroupVersion{Version: "v1"}, w, req)
}

func isRaw(handlers map[string]http.Handler, path string) bool {
	for prefix := range handlers {
		if strings.HasPrefix(path, prefix) {
			return true
		}
	}
	return false
}

// noopListener is a listener that accepts no connection.
type noopListener struct {
	closed chan struct{}
	once   sync.Once
}

func newNoopListener() *noopListener { return &noopListener{closed: make(chan struct{})} }

var errListenerClosed = errors.New("listener closed")

// Accept blocks until Close.
func (l *noopListener) Accept() (net.Conn, error) {
	<-l.closed
	return nil, errListenerClosed
}

// Close ends Accept.
func (l *noopListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

// Addr is no address that can be dialled. The library logs it.
func (l *noopListener) Addr() net.Addr { return noAddr{} }

type noAddr struct{}

func (noAddr) Network() string { return "none" }
func (noAddr) String() string  { return "the caller's listeners" }
