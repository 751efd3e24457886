// Package kubeletapi serves a node's calls (metrics, stats, logs, exec) at the
// port at which tools look for the kubelet's, 10250, to clients that show a token of
// the cluster and has the right. Members of the cluster reach the same calls
// over the node's one port, and do not come here.
//
// Who asks is found by a TokenReview, what the user may by a
// SubjectAccessReview: the API server answers both, as it does for the kubelet
// (https://kubernetes.io/docs/reference/access-authn-authz/kubelet-authn-authz/).
// Client certificates are not accepted: their revocation would not be known here.
package kubeletapi

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/authenticatorfactory"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/client-go/kubernetes"
)

// How long an answer of the API server counts. Revoking a token or a right
// takes effect here after that.
const (
	tokenTTL = 10 * time.Second
	allowTTL = 10 * time.Second
	denyTTL  = 5 * time.Second
	// reviewTimeout bounds one question to the API server.
	reviewTimeout = 10 * time.Second
)

// listenAgain is how long a port that is taken is left before the next try.
const listenAgain = 30 * time.Second

// Config of a Server.
type Config struct {
	NodeName string         // required
	Addr     netip.AddrPort // to listen at; required
	// Client asks the API server as the node; required.
	Client kubernetes.Interface
	// Certificate is the node's at the moment; required.
	Certificate func() *tls.Certificate
	// Handler answers those who may; required.
	Handler http.Handler
	Logger  *slog.Logger // required
}

// Server is the port.
type Server struct {
	cfg  Config
	who  authenticator.Request
	what authorizer.Authorizer
}

// New checks the configuration. It starts nothing.
func New(cfg Config) (*Server, error) {
	if cfg.NodeName == "" || !cfg.Addr.IsValid() || cfg.Client == nil || cfg.Certificate == nil || cfg.Handler == nil || cfg.Logger == nil {
		return nil, errors.New("kubeletapi: NodeName, Addr, Client, Certificate, Handler and Logger are required")
	}
	who, _, err := authenticatorfactory.DelegatingAuthenticatorConfig{
		TokenAccessReviewClient: cfg.Client.AuthenticationV1(), TokenAccessReviewTimeout: reviewTimeout,
		WebhookRetryBackoff: retry(), CacheTTL: tokenTTL,
	}.New()
	if err != nil {
		return nil, fmt.Errorf("kubeletapi: %w", err)
	}
	what, err := delegate(cfg.Client)
	if err != nil {
		return nil, err
	}
	return &Server{cfg: cfg, who: who, what: what}, nil
}

func retry() *wait.Backoff {
	return &wait.Backoff{Duration: 200 * time.Millisecond, Factor: 1.5, Jitter: 0.2, Steps: 3}
}

// delegate asks the API server what a user may.
func delegate(client kubernetes.Interface) (authorizer.Authorizer, error) {
	what, err := authorizerfactory.DelegatingAuthorizerConfig{
		SubjectAccessReviewClient: client.AuthorizationV1(),
		AllowCacheTTL:             allowTTL, DenyCacheTTL: denyTTL, WebhookRetryBackoff: retry(),
	}.New()
	if err != nil {
		return nil, fmt.Errorf("kubeletapi: %w", err)
	}
	return what, nil
}

// Run serves until ctx ends. While another program has the port it says so in
// the log, and tries again: the node does not depend on this.
func (s *Server) Run(ctx context.Context) error {
	return listen(ctx, s.cfg.Addr, s.cfg.Logger, "the kubelet's port cannot be served: end what listens there, or give another --kubelet-port (0: none)", func(ln net.Listener) error {
		srv := &http.Server{
			Handler: s, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 90 * time.Second, MaxHeaderBytes: 64 << 10,
			ErrorLog: slog.NewLogLogger(s.cfg.Logger.Handler(), slog.LevelDebug),
			TLSConfig: &tls.Config{
				MinVersion:     tls.VersionTLS13,
				GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return s.cfg.Certificate(), nil },
			},
		}
		return until(ctx, srv, func() error { return srv.ServeTLS(ln, "", "") })
	})
}

// ServeHTTP answers a request whose user is known and may ask it.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	who, ok, err := s.who.AuthenticateRequest(r)
	if err != nil {
		s.cfg.Logger.Debug("a request at the kubelet's port was not authenticated", "path", r.URL.Path, "from", r.RemoteAddr, "err", err)
	}
	if !ok || err != nil {
		w.Header().Set("WWW-Authenticate", "Bearer")
		http.Error(w, "Unauthorized: send a token of the cluster as Authorization: Bearer TOKEN", http.StatusUnauthorized)
		return
	}
	if permit(w, r, s.what, attributes(s.cfg.NodeName, who.User, r), s.cfg.NodeName) {
		// What answers the request must not see, and pass on, the token.
		r.Header.Del("Authorization")
		s.cfg.Handler.ServeHTTP(w, r)
	}
}

// permit reports whether the user has one of the rights asked for, and answers the
// request if not.
func permit(w http.ResponseWriter, r *http.Request, what authorizer.Authorizer, asked []authorizer.AttributesRecord, node string) bool {
	who := asked[0].User.GetName()
	for _, a := range asked {
		decision, _, err := what.Authorize(r.Context(), a)
		if err != nil {
			http.Error(w, fmt.Sprintf("the API server could not be asked what user %q may do: %v", who, err), http.StatusServiceUnavailable)
			return false
		}
		if decision == authorizer.DecisionAllow {
			return true
		}
	}
	var names []string
	for _, a := range asked {
		name := a.GetResource() + "/" + a.GetSubresource()
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	http.Error(w, fmt.Sprintf("Forbidden: user %q may not %s %s of node %s", who, asked[0].GetVerb(), strings.Join(names, " or "), node), http.StatusForbidden)
	return false
}

// attributes are the rights one of which a request needs: that of its path, then
// nodes/proxy for those whose own was introduced later.
func attributes(node string, who user.Info, r *http.Request) []authorizer.AttributesRecord {
	verb := map[string]string{
		http.MethodGet: "get", http.MethodHead: "get", http.MethodPost: "create", http.MethodPut: "update", http.MethodPatch: "patch", http.MethodDelete: "delete",
	}[r.Method]
	of := func(subresource string) authorizer.AttributesRecord {
		return authorizer.AttributesRecord{
			User: who, Verb: verb, APIVersion: "v1", Resource: "nodes", Subresource: subresource, Name: node, ResourceRequest: true, Path: r.URL.Path,
		}
	}
	switch first, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/"); first {
	case "exec", "attach", "portForward", "run":
		verb = "create" // also as GET, by which WebSockets come: who may look is not meant to act
	case "stats", "metrics", "checkpoint", "spec":
		return []authorizer.AttributesRecord{of(first)}
	case "logs":
		return []authorizer.AttributesRecord{of("log")}
	case "healthz", "configz", "pods":
		return []authorizer.AttributesRecord{of(first), of("proxy")}
	}
	return []authorizer.AttributesRecord{of("proxy")}
}
