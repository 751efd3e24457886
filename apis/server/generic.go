package server

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	apiopenapi "k8s.io/apiserver/pkg/endpoints/openapi"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericapiserver "k8s.io/apiserver/pkg/server"
	genericfilters "k8s.io/apiserver/pkg/server/filters"
	"k8s.io/apiserver/pkg/server/healthz"

	"github.com/clusterd/clusterd/apis"
	"github.com/clusterd/clusterd/apis/openapi"
	"github.com/clusterd/clusterd/apis/server/admission"
	"github.com/clusterd/clusterd/apis/server/auth"
	"github.com/clusterd/clusterd/apis/server/inproc"
)

// longRunning are the subresources whose requests may take for ever.
var longRunning = sets.NewString("attach", "exec", "proxy", "log", "portforward")

// newGeneric configures the library: our answers to who, may you and is it
// sane, and none of its audit, tracing, etcd, or priority and fairness.
func newGeneric(config Config, stores *stores, s *Server) (*genericapiserver.GenericAPIServer, error) {
	c := genericapiserver.NewRecommendedConfig(apis.Codecs)
	c.EffectiveVersion = newEffectiveVersion()
	c.ExternalAddress = config.ExternalAddress
	c.LoopbackClientConfig = s.LoopbackConfig()
	c.RESTOptionsGetter = stores
	c.RequestTimeout = config.RequestTimeout
	c.ShutdownWatchTerminationGracePeriod = config.DrainTimeout
	// The library insists on listening. It listens to nobody: our caller does.
	c.SecureServing = &genericapiserver.SecureServingInfo{Listener: newDeafListener()}

	c.Authorization.Authorizer = config.Authorizer
	if c.Authorization.Authorizer == nil {
		authorizer := auth.NewAuthorizer(stores)
		c.Authorization.Authorizer = authorizer
		c.RuleResolver = authorizer
	}
	authenticators := auth.Chain(inproc.Authenticator())
	if config.Authenticator != nil {
		authenticators = auth.Chain(inproc.Authenticator(), config.Authenticator)
	}
	c.Authentication.Authenticator = authenticators
	c.AdmissionControl = admission.Chain(stores, admission.Options{TolerationSeconds: *config.TolerationSeconds})

	namer := apiopenapi.NewDefinitionNamer(apis.Scheme)
	c.OpenAPIConfig = genericapiserver.DefaultOpenAPIConfig(openapi.GetOpenAPIDefinitions, namer)
	c.OpenAPIConfig.Info.Title = "Kubernetes"
	c.OpenAPIV3Config = genericapiserver.DefaultOpenAPIV3Config(openapi.GetOpenAPIDefinitions, namer)
	c.OpenAPIV3Config.Info.Title = "Kubernetes"

	basic := genericfilters.BasicLongRunningRequestCheck(sets.NewString("watch", "proxy"), longRunning)
	c.LongRunningFunc = func(req *http.Request, info *request.RequestInfo) bool {
		return basic(req, info) || isRaw(config.RawHandlers, req.URL.Path)
	}

	c.BuildHandlerChainFunc = func(api http.Handler, c *genericapiserver.Config) http.Handler {
		return genericapiserver.DefaultBuildHandlerChain(withAgent(withPast(api, config.Past)), c)
	}
	c.AddReadyzChecks(
		healthz.NamedCheck("storage", func(*http.Request) error { return stores.ready() }),
		healthz.NamedCheck("system-namespaces", func(*http.Request) error { return s.system.check() }),
	)
	c.AddReadyzChecks(config.ReadyChecks...)

	generic, err := c.Complete().New("clusterd", genericapiserver.NewEmptyDelegate())
	if err != nil {
		return nil, fmt.Errorf("configure the API server library: %w", err)
	}
	generic.Handler.NonGoRestfulMux.NotFoundHandler(http.HandlerFunc(noSuchPath))
	return generic, nil
}

// noSuchPath answers where nothing is served with what clients understand, a
// Status; the library would list its paths.
func noSuchPath(w http.ResponseWriter, req *http.Request) {
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

// deafListener is a listener nobody can connect to.
type deafListener struct {
	closed chan struct{}
	once   sync.Once
}

func newDeafListener() *deafListener { return &deafListener{closed: make(chan struct{})} }

var errDeaf = errors.New("listener closed")

// Accept blocks until Close.
func (l *deafListener) Accept() (net.Conn, error) {
	<-l.closed
	return nil, errDeaf
}

// Close ends Accept.
func (l *deafListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

// Addr is no address anybody could dial. The library logs it.
func (l *deafListener) Addr() net.Addr { return nowhere{} }

type nowhere struct{}

func (nowhere) Network() string { return "none" }
func (nowhere) String() string  { return "the caller's listeners" }
