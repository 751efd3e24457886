// Package server is the API server: the library k8s.io/apiserver over the
// kinds of package apis and over any storage. It knows no store, no network
// and no node; all three come in through Config. See DESIGN.md.
package server

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/apis"
	"github.com/clusterd/clusterd/apis/server/alloc"
	"github.com/clusterd/clusterd/apis/server/extend"
	"github.com/clusterd/clusterd/apis/server/fairness"
	"github.com/clusterd/clusterd/apis/server/inproc"
)

// Server is an API server whose caller listens: it has a Handler,
// and clients inside this process.
type Server struct {
	config   Config
	generic  *genericapiserver.GenericAPIServer
	prepared extend.Prepared
	system   *systemNamespaces
	// authorization is who may do what.
	authorization *authorization
	// authenticator says who asks.
	authenticator authenticator.Request
	// tokens says whose a bearer token is, and looks at nothing else.
	tokens authenticator.Request
	// foreign knows the tokens that others issue.
	foreign *foreignTokens
	// accounts is about the tokens of service accounts.
	accounts *serviceAccounts
	// fairness says whose request is next.
	fairness *fairness.Fairness
	// transport lets clients inside this process in.
	transport *inproc.HandlerTransport
	// readable is nil when every kind can be read; opened is closed then.
	readable func() error
	opened   chan struct{}
	// stores are those of our own kinds; seeded is closed when the loops that keep
	// default objects may start, and seedServices creates those of the front.
	stores       *stores
	seeded       chan struct{}
	seedServices func(context.Context) error
	// informers are what the library keeps of the store for its own use.
	informers extend.Informers
	// services and webhooks find and call what users registered; mapper finds
	// the kinds of parameters of policies.
	services webhook.ServiceResolver
	webhooks webhook.AuthenticationInfoResolverWrapper
	mapper   meta.ResettableRESTMapper
	// quiet answers for custom kinds without an object; nil: the library does.
	quiet *extend.Quiet
	// documents are the OpenAPI documents of all servers of the chain.
	documents extend.Documents
}

// New builds the server. It starts nothing and does not touch the storage.
func New(config Config) (*Server, error) {
	config, err := config.withDefaults()
	if err != nil {
		return nil, err
	}
	s := &Server{config: config, opened: make(chan struct{}), seeded: make(chan struct{})}
	// The transport is there before the handler is: the library wants a client
	// for its construction. No request goes through until New has returned.
	s.transport = inproc.NewHandlerTransport(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		s.generic.Handler.ServeHTTP(w, req)
	}))
	s.system = newSystemNamespaces(s.LoopbackConfig)

	stores, err := newStores(apis.Kinds(), apis.Scheme, config.Storage)
	if err != nil {
		return nil, err
	}
	if config.ServiceCIDR != "" {
		if err := stores.allocate(config.ServiceCIDR, cmp.Or(config.NodePorts, alloc.DefaultPorts)); err != nil {
			return nil, err
		}
	}
	if s.accounts, err = newServiceAccounts(config, stores); err != nil {
		return nil, err
	}
	if s.foreign, err = newForeignTokens(config); err != nil {
		return nil, err
	}
	s.authenticator, s.tokens = newAuthentication(config, s.accounts, s.foreign)
	if s.authorization, err = newAuthorization(config, stores, s); err != nil {
		return nil, err
	}
	if err := s.build(stores); err != nil {
		return nil, err
	}
	return s, nil
}

// build makes the chain of servers; see package extend.
func (s *Server) build(stores *stores) error {
	base, err := newGeneric(s.config, stores, s)
	if err != nil {
		return err
	}
	options := &extend.Options{
		Generic:   base,
		Storage:   s.config.Storage,
		Prefix:    StoragePrefix,
		Services:  s.services,
		Webhooks:  s.webhooks,
		CertFile:  s.config.Front.CertFile,
		KeyFile:   s.config.Front.KeyFile,
		Documents: &s.documents,
		Seeded:    s.seeded,
	}
	s.stores, s.seedServices = stores, options.SeedServices
	s.readable = func() error {
		if err := stores.ready(); err != nil {
			return err
		}
		return options.Ready()
	}

	end := genericapiserver.NewEmptyDelegateWithCustomHandler(http.HandlerFunc(noSuchPath))
	custom, err := extend.NewCustom(options, end)
	if err != nil {
		return err
	}
	if s.config.Keys != nil {
		if s.quiet, err = extend.NewQuiet(s.config.Keys, StoragePrefix, custom.Informers.Apiextensions().V1().CustomResourceDefinitions()); err != nil {
			return err
		}
	}
	own := *base
	own.PostStartHooks = map[string]genericapiserver.PostStartHookConfigEntry{}
	extend.Delegate(&own.Config)
	own.SkipOpenAPIInstallation = true
	kinds, err := own.Complete().New("clusterd", custom.GenericAPIServer)
	if err != nil {
		return fmt.Errorf("configure the API server library: %w", err)
	}
	served, err := installGroups(kinds, s.config, stores, s)
	if err != nil {
		return err
	}
	s.documents.Install(kinds, own.OpenAPIConfig, own.OpenAPIV3Config, nil)
	options.Own = append(served, extend.Versions...)
	for path, handler := range s.config.RawHandlers {
		kinds.Handler.NonGoRestfulMux.HandlePrefix(path, handler)
	}
	s.accounts.publish(kinds, s.config.ExternalAddress)
	kinds.RegisterDestroyFunc(s.accounts.destroy)
	if stores.destroy != nil {
		kinds.RegisterDestroyFunc(stores.destroy)
	}
	front, err := extend.NewFront(options, kinds, custom.Informers.Apiextensions().V1().CustomResourceDefinitions())
	if err != nil {
		return err
	}
	s.generic = front.GenericAPIServer
	if s.config.Metrics != nil {
		serveMetrics(s.generic.Handler.NonGoRestfulMux, s.config.Metrics)
	}
	s.informers = extend.Informers{Ours: base.SharedInformerFactory, Definitions: custom.Informers, Services: front.APIRegistrationInformers}
	s.prepared, err = front.Prepare()
	// The definitions of all types, from which the library has built what it needs
	// to merge fields. A document asks for them again when it is built.
	base.OpenAPIV3Config.Definitions = nil
	return err
}

// ofOthers tells whether an API is served by somebody else's server, behind this one.
func (s *Server) ofOthers(version schema.GroupVersion) bool {
	if s.informers.Services == nil {
		return false // New has not returned
	}
	known, err := s.informers.Services.Apiregistration().V1().APIServices().Lister().Get(extend.ServiceName(version))
	return err == nil && known.Spec.Service != nil
}

// quietly is next, but for what Quiet answers. It is made before Quiet is.
func (s *Server) quietly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if s.quiet == nil || !s.quiet.Answer(w, req) {
			next.ServeHTTP(w, req)
		}
	})
}

// mapperReset is how long a kind may be unknown to policies.
const mapperReset = 30 * time.Second

// Handler is the whole server: authentication, authorization, admission and
// all resources. Serve it over HTTP/2 with TLS, with client certificates in
// http.Request.TLS. It answers 503 to unknown paths until Run runs.
func (s *Server) Handler() http.Handler { return s.generic.Handler }

// LoopbackConfig is the configuration of a client inside this process that may
// do anything.
func (s *Server) LoopbackConfig() *rest.Config {
	return s.ClientConfigFor(user.APIServerUser, user.SystemPrivilegedGroup)
}

// ClientConfigFor is the configuration of a client inside this process with
// the given identity. Its requests take the same way through the server as any
// other, but for the network. It has no rate limit.
func (s *Server) ClientConfigFor(name string, groups ...string) *rest.Config {
	who := &user.DefaultInfo{Name: name, Groups: groups}
	return &rest.Config{
		Host:      "https://in-process",
		Transport: s.transport.As(who),
		QPS:       -1,
		UserAgent: rest.DefaultKubernetesUserAgent(),
		ContentConfig: rest.ContentConfig{
			ContentType:        "application/vnd.kubernetes.protobuf",
			AcceptContentTypes: "application/vnd.kubernetes.protobuf,application/json",
		},
	}
}

// libraryConfig is the configuration of the clients that the library makes for
// itself. Their requests wait until the storage can be read: refused, they
// would come again only after a second, and what they read is needed to be
// ready.
func (s *Server) libraryConfig() *rest.Config {
	config := s.LoopbackConfig()
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(req *http.Request) (*http.Response, error) {
			select {
			case <-s.opened:
				return next.RoundTrip(req)
			case <-req.Context().Done():
				return nil, req.Context().Err()
			}
		})
	})
	return config
}

type roundTripper func(*http.Request) (*http.Response, error)

// RoundTrip implements http.RoundTripper.
func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// warm lets the library's clients in once every kind can be read, and returns
// when they know what is stored. What the library starts then finds what it
// would otherwise look for ten times a second. It reports false if ctx ended.
func (s *Server) warm(ctx context.Context) bool {
	if !until(ctx, func() bool { return s.readable() == nil }) {
		return false
	}
	close(s.opened)
	return s.informers.Start(ctx)
}

// until polls often: it is used for what takes milliseconds.
func until(ctx context.Context, done func() bool) bool {
	err := wait.PollUntilContextCancel(ctx, 2*time.Millisecond, true, func(context.Context) (bool, error) { return done(), nil })
	return err == nil
}

// Run starts what a server does beside answering requests, makes the system's
// namespaces, and blocks until ctx ends and requests and watches are drained.
// Requests from this process are not waited for but cancelled: the part that made
// them has stopped, and a write without a quorum would not return.
func (s *Server) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	stop := context.AfterFunc(ctx, s.transport.Close)
	defer stop()
	if err := s.foreign.start(ctx); err != nil {
		return err
	}
	group.Go(func() error {
		if !s.warm(ctx) {
			return nil
		}
		if err := s.prepared.Run(ctx); err != nil {
			return fmt.Errorf("run the API server: %w", err)
		}
		return nil
	})
	group.Go(func() error { s.seed(ctx, s.stores); return nil })
	group.Go(func() error { return s.whenSeeded(s.system.run)(ctx) })
	group.Go(func() error { return s.authorization.run(ctx, s.whenSeeded) })
	group.Go(func() error { s.foreign.run(ctx); return nil })
	group.Go(func() error { return s.whenSeeded(s.fairness.Run)(ctx) })
	group.Go(func() error { return (&trust{s.config.Front, s.LoopbackConfig}).run(ctx) })
	group.Go(func() error {
		// The mapper does not notice by itself that kinds came or went.
		wait.Until(s.mapper.Reset, mapperReset, ctx.Done())
		return nil
	})
	err := group.Wait()
	s.transport.Close()
	return err
}
