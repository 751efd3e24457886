package server

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/server/healthz"
	"k8s.io/component-base/tracing"

	"github.com/clusterd/clusterd/apis/server/admission"
	"github.com/clusterd/clusterd/apis/server/admission/tolerations"
	"github.com/clusterd/clusterd/apis/server/components"
	"github.com/clusterd/clusterd/apis/server/fairness"
)

// Config is what a Server is made from.
type Config struct {
	// Storage makes the storage of each resource. Required.
	Storage generic.StorageDecorator

	// Authenticator authenticates requests from outside the process, usually
	// auth.ClientCert. Nil: no client outside is recognised.
	Authenticator authenticator.Request

	// Now is the time by which service account tokens are signed and judged; nil: this machine's.
	Now func() time.Time

	// Access configures further authenticators, authorizers and auditing.
	Access Access

	// Authorizer authorizes requests. Nil: members of system:masters may do
	// everything, and all others what the authorizers of Access.Authorization allow.
	Authorizer authorizer.Authorizer

	// Admission says which admission plugins there are.
	Admission admission.Set

	// Issuer is the issuer of service account tokens: a URL, which may be reachable
	// only in the cluster. Default https://kubernetes.default.svc.
	Issuer string

	// Audiences are the audiences accepted in service account tokens. Default:
	// Issuer.
	Audiences []string

	// Past is the history of what Storage keeps, for requests that look back
	// and for the history of objects. Nil: such requests are refused.
	Past Past

	// Keys reports which prefixes of Storage are empty, so that custom kinds without
	// an object cost little. Nil: they cost what others do.
	Keys Keys

	// NodeTransport reaches the agent of a node for logs, exec, attach,
	// port-forward and nodes/proxy: a transport and the agent's base URL.
	// Address, TLS and credentials are its business; the user that the call is for
	// is in ctx, none if it is for this server itself. For streams the transport
	// has to be an *http.Transport or wrap one (its DialContext and
	// TLSClientConfig are used). Nil: those requests answer 503.
	NodeTransport func(ctx context.Context, nodeName string) (http.RoundTripper, *url.URL, error)

	// ExternalAddress is the host:port that discovery names. Default
	// 127.0.0.1:6443.
	ExternalAddress string

	// ServiceCIDR is where cluster IPs of Services are taken from, like
	// "10.96.0.0/12", or two ranges of different IP families with a comma between:
	// the first one's is that of Services that ask for none. Empty: Services get
	// none.
	ServiceCIDR string

	// NodePorts are the ports of nodes that Services are given. Default
	// alloc.DefaultPorts.
	NodePorts utilnet.PortRange

	// TolerationSeconds is how long pods stay bound to a node that is not
	// ready or unreachable, unless they say otherwise, in seconds. Default 300.
	TolerationSeconds *int64

	// Metrics are this server's own: /metrics shows them beside those that the
	// libraries keep for the whole process. Nil: there are none.
	Metrics prometheus.Gatherer

	// RawHandlers serve paths that are no API resources, by path prefix
	// ending in "/", to members of system:masters only. Their requests have no
	// time limit.
	RawHandlers map[string]http.Handler

	// ReadyChecks have to pass for /readyz, beside the server's own.
	ReadyChecks []healthz.HealthChecker

	// HealthChecks have to pass for /healthz, /livez and /readyz, beside the server's own.
	HealthChecks []healthz.HealthChecker

	// Components are what ComponentStatus tells of; none: its list is empty.
	Components []components.Component

	// Tracer makes spans of requests, and of the server's own. Nil: there are none.
	Tracer tracing.TracerProvider

	// RequestTimeout ends requests that are no watch, log or stream. Default
	// one minute.
	RequestTimeout time.Duration

	// Front is how the server proves to aggregated APIs who it is.
	Front Front

	// Seats is how many requests are worked on at once, shared by priority
	// levels; see package fairness. Default fairness.Seats.
	Seats int

	// Streams is how many watches and streams (logs, exec, port-forward, proxy) one
	// user may have open at this server, nodes and administrators ten times as many.
	// Default DefaultStreams.
	Streams int

	// DrainTimeout is how long Run waits for watches to end when it is
	// stopped. Default five seconds.
	DrainTimeout time.Duration
}

func (c Config) withDefaults() (Config, error) {
	if c.Storage == nil {
		return c, fmt.Errorf("API server config: Storage is required")
	}
	if c.ExternalAddress == "" {
		c.ExternalAddress = "127.0.0.1:6443"
	}
	if c.Issuer == "" {
		c.Issuer = "https://kubernetes.default.svc"
	}
	if len(c.Audiences) == 0 {
		c.Audiences = []string{c.Issuer}
	}
	if c.TolerationSeconds == nil {
		seconds := tolerations.DefaultSeconds
		c.TolerationSeconds = &seconds
	}
	if *c.TolerationSeconds < 0 {
		return c, fmt.Errorf("API server config: TolerationSeconds %d is negative", *c.TolerationSeconds)
	}
	if c.RequestTimeout == 0 {
		c.RequestTimeout = time.Minute
	}
	if c.Seats == 0 {
		c.Seats = fairness.Seats
	}
	if c.Streams == 0 {
		c.Streams = DefaultStreams
	}
	if c.Streams < 0 {
		return c, fmt.Errorf("API server config: Streams %d is negative", c.Streams)
	}
	if c.DrainTimeout == 0 {
		c.DrainTimeout = 5 * time.Second
	}
	for path := range c.RawHandlers {
		if len(path) < 3 || path[0] != '/' || path[len(path)-1] != '/' {
			return c, fmt.Errorf("API server config: RawHandlers path %q must begin and end with a slash", path)
		}
	}
	return c, nil
}
