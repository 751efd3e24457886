package image

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"golang.org/x/net/http/httpproxy"

	"github.com/clusterd/clusterd/agent/image/registry"
)

// authsFor are the credentials to try at a place, one after the other: the caller's
// own are for the registry itself and for no mirror of it. Where the caller has none,
// the node's count; where it has none either, there are none.
func authsFor(at registry.Endpoint, own Auth) []Auth {
	switch {
	case at.Namespace == "" && own != (Auth{}):
		return []Auth{own}
	case len(at.Auths) > 0:
		return at.Auths
	}
	return []Auth{{}}
}

// refused says whether other credentials might do. Registries say of what one may not
// see that it is not there.
func refused(err error) bool {
	r := pullError("", err).Reason
	return r == ReasonUnauthorized || r == ReasonNotFound
}

// elsewhere says whether another place might give the image: not if this node has no
// room for it, and not if the caller has given up.
func elsewhere(ctx context.Context, err error) bool {
	return ctx.Err() == nil && !errors.Is(err, syscall.ENOSPC)
}

// referenceAt is what an image is called at a place.
func referenceAt(ref name.Reference, at registry.Endpoint) (string, error) {
	full := at.Host + "/" + at.Repository + ":" + ref.Identifier()
	if _, digest := ref.(name.Digest); digest {
		full = at.Host + "/" + at.Repository + "@" + ref.Identifier()
	}
	_, err := name.ParseReference(full, name.WeakValidation)
	return full, err
}

// hostTransports gives each host the connections that the settings say: a certificate
// of this node's, and authorities beside the system's, are for their host alone, also
// where a registry sends the client on. It is new for each pull: connections to a
// registry are not worth keeping between pulls.
type hostTransports struct {
	settings *registry.Settings
	timeout  time.Duration // for headers
	proxy    *httpproxy.Config

	mu sync.Mutex // guards by
	by map[*tls.Config]*http.Transport
}

// RoundTrip implements http.RoundTripper.
func (h *hostTransports) RoundTrip(r *http.Request) (*http.Response, error) {
	return h.of(r.URL.Host).RoundTrip(r)
}

func (h *hostTransports) of(host string) *http.Transport {
	c := h.settings.TLS(host)
	h.mu.Lock()
	defer h.mu.Unlock()
	if t := h.by[c]; t != nil {
		return t
	}
	t := &http.Transport{
		DialContext:           (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}).DialContext,
		TLSClientConfig:       c.Clone(),
		ForceAttemptHTTP2:     true,
		MaxIdleConnsPerHost:   parallelDownloads,
		IdleConnTimeout:       30 * time.Second,
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: h.timeout,
	}
	if h.proxy != nil {
		through := h.proxy.ProxyFunc()
		t.Proxy = func(r *http.Request) (*url.URL, error) { return through(r.URL) }
	}
	if h.by == nil {
		h.by = map[*tls.Config]*http.Transport{}
	}
	h.by[c] = t
	return t
}

// CloseIdleConnections closes what is not in use.
func (h *hostTransports) CloseIdleConnections() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, t := range h.by {
		t.CloseIdleConnections()
	}
}

// namespaced says to a mirror which registry's image is meant, as mirrors of several
// registries expect it.
type namespaced struct {
	http.RoundTripper
	at registry.Endpoint
}

func (n namespaced) RoundTrip(r *http.Request) (*http.Response, error) {
	if n.at.Namespace == "" || r.URL.Host != n.at.Host || !strings.HasPrefix(r.URL.Path, "/v2/") {
		return n.RoundTripper.RoundTrip(r)
	}
	r = r.Clone(r.Context())
	q := r.URL.Query()
	q.Set("ns", n.at.Namespace)
	r.URL.RawQuery = q.Encode()
	return n.RoundTripper.RoundTrip(r)
}

// errScheme marks refusals of plain HTTP where the library tries it by itself.
var errScheme = errors.New("not spoken to this way")

// schemeGuard refuses requests without TLS, but to what is named for them, which is
// asked without it whatever the library tries. The library falls back to plain HTTP for every private address,
// which would let anybody between take TLS away.
//
// Credentials go without TLS to the endpoint itself alone, if it is one that is named:
// no registry with TLS sends them on to one without, nor one without to another.
type schemeGuard struct {
	next     http.RoundTripper
	settings *registry.Settings
	at       registry.Endpoint

	mu           sync.Mutex // guards all below
	first, cause error      // why the endpoint was not reached, the way it is to be
}

// maxRedirects is as net/http has it; the library's own check knows no bound.
const maxRedirects = 10

// redirects is how many have led to a request.
func redirects(r *http.Request) (n int) {
	for ; r.Response != nil && r.Response.Request != nil && n <= maxRedirects; n++ {
		r = r.Response.Request
	}
	return n
}

// RoundTrip implements http.RoundTripper.
func (g *schemeGuard) RoundTrip(r *http.Request) (*http.Response, error) {
	own := r.URL.Host == g.at.Host
	plain := r.URL.Scheme != "https"
	if own && !plain && g.at.PlainHTTP { // the library tries TLS first
		r = r.Clone(r.Context())
		r.URL.Scheme, plain = "http", true
	}
	switch {
	case redirects(r) > maxRedirects:
		return nil, fmt.Errorf("the registry sends on more than %d times", maxRedirects)
	case own && plain && !g.at.PlainHTTP:
		return nil, fmt.Errorf("%w, %w", ErrNoTLS, errScheme)
	case !own && plain && !(g.at.PlainHTTP && g.settings.PlainHTTP(r.URL.Host)):
		return nil, fmt.Errorf("%w: it sends on to %s://%s, and neither it nor that may be spoken to without", ErrNoTLS, r.URL.Scheme, r.URL.Host)
	case !own && plain && (r.Header.Get("Authorization") != "" || r.Method != http.MethodGet && r.Method != http.MethodHead):
		return nil, fmt.Errorf("%w: credentials are not sent on to %s://%s", ErrNoTLS, r.URL.Scheme, r.URL.Host)
	}
	resp, err := g.next.RoundTrip(r)
	if err != nil && own && r.URL.Path == "/v2/" {
		g.mu.Lock()
		if g.first == nil {
			g.first, g.cause = &url.Error{Op: "Get", URL: r.URL.Redacted(), Err: err}, err
		}
		g.mu.Unlock()
	}
	return resp, err
}

// explain turns the library's error about both schemes into that of the right one, and
// says what may help.
func (g *schemeGuard) explain(err error) error {
	g.mu.Lock()
	first, cause := g.first, g.cause
	g.mu.Unlock()
	if first != nil && (errors.Is(err, errScheme) || g.at.PlainHTTP && errors.Is(err, cause)) {
		err = first
	}
	var record tls.RecordHeaderError
	switch {
	case errors.Is(err, http.ErrSchemeMismatch), errors.As(err, &record) && string(record.RecordHeader[:]) == "HTTP/":
		return fmt.Errorf("%w: if its network may be trusted, say plainHTTP: true of %q in the file of --registries-config", ErrNoTLS, g.name())
	case errors.As(err, new(x509.UnknownAuthorityError)):
		return fmt.Errorf("%w: if it has an authority of its own, name that as caFile of %q in the file of --registries-config", err, g.name())
	}
	return err
}

// name is how the settings call the endpoint.
func (g *schemeGuard) name() string {
	if g.at.Host == name.DefaultRegistry {
		return dockerHub
	}
	return g.at.Host
}

// mirrorError is an error of a mirror.
type mirrorError struct {
	host string
	err  error
}

func (e *mirrorError) Error() string { return fmt.Sprintf("mirror %s: %v", e.host, e.err) }
func (e *mirrorError) Unwrap() error { return e.err }

// afterMirrors is the error of the last place, after those of mirrors.
type afterMirrors struct {
	last   error
	before []error
}

func (e *afterMirrors) Error() string { return e.last.Error() + e.mirrors() }
func (e *afterMirrors) Unwrap() error { return e.last }

// mirrors is the text about those before.
func (e *afterMirrors) mirrors() string {
	var b strings.Builder
	for _, err := range e.before {
		said := pullError("", err)
		if said.Says != "" {
			err = fmt.Errorf("mirror %s says: %s", said.Mirror, said.Says)
		}
		fmt.Fprintf(&b, "; before it, %v", err)
	}
	return b.String()
}
