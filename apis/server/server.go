// Package server is the API server: the library k8s.io/apiserver over the
// kinds of package apis and over any storage. It knows no store, no network
// and no node; all three come in through Config. See DESIGN.md.
package server

import (
	"context"
	"fmt"
	"net/http"

	"golang.org/x/sync/errgroup"
	"k8s.io/apiserver/pkg/authentication/user"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/apis"
	"github.com/clusterd/clusterd/apis/server/inproc"
)

// Server is an API server that somebody else listens for: it has a Handler,
// and clients inside this process.
type Server struct {
	config   Config
	generic  *genericapiserver.GenericAPIServer
	prepared preparedServer
	system   *systemNamespaces
	// door lets clients inside this process in.
	door *inproc.Door
}

// preparedServer is the library's server when all handlers are in place.
type preparedServer interface {
	RunWithContext(ctx context.Context) error
}

// New builds the server. It starts nothing and does not touch the storage.
func New(config Config) (*Server, error) {
	config, err := config.withDefaults()
	if err != nil {
		return nil, err
	}
	s := &Server{config: config}
	// The door is open before there is a handler: the library wants a client
	// for its construction. Nobody goes through until New has returned.
	s.door = inproc.NewDoor(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		s.generic.Handler.ServeHTTP(w, req)
	}))
	s.system = newSystemNamespaces(s.LoopbackConfig)

	stores, err := newStores(apis.Kinds(), apis.Scheme, config.Storage)
	if err != nil {
		return nil, err
	}
	if config.ServiceCIDR != "" {
		if err := stores.allocate(config.ServiceCIDR); err != nil {
			return nil, err
		}
	}
	if s.generic, err = newGeneric(config, stores, s); err != nil {
		return nil, err
	}
	if err := installGroups(s.generic, config, stores, s.generic.Authorizer); err != nil {
		return nil, err
	}
	s.generic.Handler.NonGoRestfulMux.HandleFunc(customKindsPath, noCustomKinds)
	if stores.destroy != nil {
		s.generic.RegisterDestroyFunc(stores.destroy)
	}
	for path, handler := range config.RawHandlers {
		s.generic.Handler.NonGoRestfulMux.HandlePrefix(path, handler)
	}
	prepared := s.generic.PrepareRun()
	s.prepared = prepared
	return s, nil
}

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
		Transport: s.door.As(who),
		QPS:       -1,
		UserAgent: rest.DefaultKubernetesUserAgent(),
		ContentConfig: rest.ContentConfig{
			ContentType:        "application/vnd.kubernetes.protobuf",
			AcceptContentTypes: "application/vnd.kubernetes.protobuf,application/json",
		},
	}
}

// Run starts what a server does beside answering requests, makes the system's
// namespaces, and blocks until ctx ends and requests and watches are drained.
// Requests from this process are not waited for but cancelled: whoever made
// them has stopped, and a write without a quorum would be waited for in vain.
func (s *Server) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	stop := context.AfterFunc(ctx, s.door.Close)
	defer stop()
	group.Go(func() error {
		if err := s.prepared.RunWithContext(ctx); err != nil {
			return fmt.Errorf("run the API server: %w", err)
		}
		return nil
	})
	group.Go(func() error { return s.system.run(ctx) })
	err := group.Wait()
	s.door.Close()
	return err
}
