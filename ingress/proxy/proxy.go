// Package proxy sends HTTP requests to the backends of a route.Table. The
// standard library's ReverseProxy carries them (HTTP/1.1 and HTTP/2, upgrades,
// trailers); this package chooses the backend and the endpoint, tries another
// one when none was reached, and says why when there is none. Neither
// clients nor backends are trusted.
package proxy

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/clusterd/clusterd/ingress/route"
)

// Config of a Proxy; all of it is optional.
type Config struct {
	// ResponseTimeout is how long a backend may take to begin its answer once it
	// has the request; default one minute. It does not hold for h2c, whose answers
	// may begin with the first message.
	ResponseTimeout time.Duration
	// BodyTimeout is for how long a client may send nothing of a request's body
	// while it is waited for; default one minute, negative: any time. Streams of gRPC
	// to backends that speak HTTP/2 may rest.
	BodyTimeout time.Duration
	// DialTimeout is how long an endpoint may take to accept a connection;
	// default two seconds.
	DialTimeout time.Duration
	// Drain is how long connections are still taken after the end was announced:
	// those who send them notice meanwhile. Default: no time.
	Drain time.Duration
	// Listen opens a port that a Gateway has beside those that Serve is given;
	// default: on all addresses.
	Listen func(ctx context.Context, port uint16) (net.Listener, error)
	// Access gets a record for each request that was answered; default: none.
	Access *slog.Logger
	// Logger gets what goes wrong beside requests; default slog.Default().
	Logger *slog.Logger

	pingAfter, pingFor time.Duration // default: the constants of these names
}

// Proxy is an http.Handler. It is safe for concurrent use.
type Proxy struct {
	cfg     Config
	table   atomic.Pointer[route.Table]
	balance *balancer
	carry   *httputil.ReverseProxy
	metrics *metrics
	// mirroring is a semaphore: one element for each copy of a request in flight; mirrors
	// are those that are being sent, until mirrorCtx ends.
	mirroring chan struct{}
	mirrors   sync.WaitGroup
	mirrorCtx context.Context
	unmirror  context.CancelFunc
	// changed is signalled (capacity 1) if a table was set since the ports were last compared.
	changed chan struct{}
}

// New puts a Proxy together. It answers every request with 503 until it has a
// table.
func New(cfg Config) *Proxy {
	if cfg.ResponseTimeout == 0 {
		cfg.ResponseTimeout = time.Minute
	}
	if cfg.BodyTimeout == 0 {
		cfg.BodyTimeout = time.Minute
	}
	if cfg.DialTimeout == 0 {
		cfg.DialTimeout = 2 * time.Second
	}
	if cfg.pingAfter == 0 {
		cfg.pingAfter, cfg.pingFor = pingAfter, pingFor
	}
	if cfg.Listen == nil {
		cfg.Listen = func(ctx context.Context, port uint16) (net.Listener, error) {
			return new(net.ListenConfig).Listen(ctx, "tcp", fmt.Sprintf(":%d", port))
		}
	}
	if cfg.Access == nil {
		cfg.Access = slog.New(slog.DiscardHandler)
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	p := &Proxy{cfg: cfg, metrics: newMetrics(), changed: make(chan struct{}, 1), mirroring: make(chan struct{}, mirrors)}
	p.mirrorCtx, p.unmirror = context.WithCancel(context.Background())
	p.balance = newBalancer(cfg, p.metrics)
	p.carry = &httputil.ReverseProxy{
		Rewrite:        p.rewrite,
		Transport:      p.balance,
		FlushInterval:  -1, // streams are passed on as they come
		ModifyResponse: answered,
		ErrorHandler:   p.failed,
		ErrorLog:       slog.NewLogLogger(cfg.Logger.Handler(), slog.LevelDebug),
	}
	return p
}

// Set makes t what the next requests are answered by.
func (p *Proxy) Set(t *route.Table) {
	p.table.Store(t)
	p.metrics.rules.Set(float64(t.Len()))
	select {
	case p.changed <- struct{}{}:
	default:
	}
}

// Table is what was set last; nil: nothing was.
func (p *Proxy) Table() *route.Table { return p.table.Load() }

// Close ends connections to backends that no request is on, and copies of requests
// that are under way. It is called after the last request.
func (p *Proxy) Close() {
	p.unmirror()
	p.mirrors.Wait()
	p.balance.close()
}

// call is what is known of a request under way. The goroutine that serves it
// owns it.
type call struct {
	client   netip.Addr
	host     string
	id       string
	place    route.Place // that the client came to
	rule     *route.Rule
	prefix   string         // of the path, by which a Gateway's rule was found
	share    *route.Share   // of a Gateway's rule
	backend  *route.Backend // nil: none was chosen
	timer    *time.Timer    // ends the request; nil: nothing does
	endpoint *endpoint      // that was tried last
	balance  *balancer      // that counts the call to endpoint; nil: none does
	tries    int
	tried    []netip.AddrPort // endpoints that it was on
	why      string           // an answer of our own, in words
	body     *clientBody      // nil: there is none, or it may take any time
	origin   string           // of the page that asks, where the rule has CORS
	// duplicates are copies for mirrors whose body is on its way.
	duplicates []*duplicate
}

type callKey struct{}

func callOf(ctx context.Context) *call {
	c, _ := ctx.Value(callKey{}).(*call)
	return c
}

// ServeHTTP implements http.Handler.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	c := &call{host: route.Host(r.Host), client: clientOf(r), id: r.Header.Get("X-Request-Id")}
	if c.id == "" || len(c.id) > 128 {
		c.id = strings.ToLower(rand.Text())
	}
	recorded := &recorder{ResponseWriter: w}
	p.metrics.underWay.Inc()
	defer func() {
		p.metrics.underWay.Dec()
		c.release()
		for _, d := range c.duplicates {
			d.finish(false)
		}
		p.tell(r, c, recorded, time.Since(start))
	}()
	p.answer(recorded, r.WithContext(context.WithValue(r.Context(), callKey{}, c)), c)
}

func (p *Proxy) answer(w http.ResponseWriter, r *http.Request, c *call) {
	if r.Method == http.MethodConnect {
		p.refuse(w, c, http.StatusMethodNotAllowed, "CONNECT is not for this proxy")
		return
	}
	if !strings.HasPrefix(r.URL.Path, "/") || hasDots(r.URL.Path) {
		p.refuse(w, c, http.StatusBadRequest, `the path has to begin with "/" and must not have "." or ".." among its elements`)
		return
	}
	table := p.table.Load()
	if table == nil {
		p.refuse(w, c, http.StatusServiceUnavailable, "the rules of this cluster are not known yet")
		return
	}
	hit := table.Lookup(p.request(table, r, c))
	switch hit.Refused {
	case route.TooLong:
		p.refuse(w, c, http.StatusBadRequest, "the path, or a header or parameter that a route looks at, is too long")
		return
	case route.Misdirected:
		p.refuse(w, c, http.StatusMisdirectedRequest, misdirected(c, r))
		return
	}
	rule := hit.Rule
	if rule == nil {
		p.refuse(w, c, http.StatusNotFound, nothing(table, c, r))
		return
	}
	c.rule, c.prefix = rule, hit.Prefix
	if rule.Do != nil {
		p.do(w, r, c)
		return
	}
	if rule.Redirect && r.TLS == nil {
		if c.host == "" {
			p.refuse(w, c, http.StatusBadRequest, "the request names no host, so it cannot be sent on to https")
			return
		}
		// 308 keeps the method.
		http.Redirect(w, r, "https://"+bracketed(c.host)+r.URL.RequestURI(), http.StatusPermanentRedirect)
		return
	}
	c.backend = rule.Backend
	p.send(w, r, c)
}

// misdirected says why a request has to come over another connection.
func misdirected(c *call, r *http.Request) string {
	if r.TLS == nil || route.Host(c.host) == serverName(r.TLS.ServerName) {
		return "the connection was opened without the certificate that the Gateway asks clients for"
	}
	return fmt.Sprintf("host %.260q is not for a connection that was opened for %.260q", c.host, r.TLS.ServerName)
}

// nothing says that there is no rule for a request.
func nothing(table *route.Table, c *call, r *http.Request) string {
	what := "no Ingress of this cluster has a rule"
	switch ingresses := c.place.Service == "" && (c.place.Port == 80 || c.place.Port == 443); {
	case !ingresses:
		what = fmt.Sprintf("no route at port %d of the Gateway has a rule", c.place.Port)
	case table.Gateway(c.place):
		what = "no route of a Gateway and " + what
	}
	return fmt.Sprintf("%s for host %.260q and path %.260q", what, c.host, r.URL.Path)
}

// send has the request's backend answer.
func (p *Proxy) send(w http.ResponseWriter, r *http.Request, c *call) {
	if len(c.backend.Endpoints) == 0 {
		why := c.backend.Fault
		if why == "" {
			why = c.backend.Name + " has no ready endpoints"
		}
		p.refuse(w, c, http.StatusServiceUnavailable, why)
		return
	}
	if r.ProtoMajor == 1 {
		// A backend may answer before it has the whole body. Without this the server
		// would read what is left of it, behind the back of who sends it on.
		if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
			p.cfg.Logger.Debug("a request's body may be cut off by an early answer", "err", err)
		}
	}
	if r.Body != nil && r.Body != http.NoBody && p.cfg.BodyTimeout > 0 && !rests(r, c.backend) {
		c.body = newClientBody(r.Body, p.cfg.BodyTimeout, http.NewResponseController(w))
		r.Body = c.body
		defer func() {
			_ = c.body.Close() // ReverseProxy leaves that to the server, which waits as long as the client likes
			if c.body.wasIdle() && r.ProtoMajor == 1 && w.Header().Get("Connection") != "close" {
				// The rest of the body may come yet, and must not be taken for a request.
				panic(http.ErrAbortHandler)
			}
		}()
	}
	p.carry.ServeHTTP(w, r)
}

// hasDots: programs differ in what such paths mean, so a rule for one path could
// lead to another one behind the proxy. Browsers never send them.
func hasDots(path string) bool {
	if !strings.Contains(path, "/.") {
		return false
	}
	for e := range strings.SplitSeq(path, "/") {
		if e == "." || e == ".." {
			return true
		}
	}
	return false
}

func bracketed(host string) string {
	if strings.Contains(host, ":") {
		return "[" + host + "]"
	}
	return host
}

func clientOf(r *http.Request) netip.Addr {
	a, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{}
	}
	return a.Addr().Unmap()
}

// rewrite sets what the backend receives about the client. What the client said of
// itself is not passed on: ReverseProxy has removed Forwarded and
// X-Forwarded-For, -Host and -Proto.
func (p *Proxy) rewrite(r *httputil.ProxyRequest) {
	c := callOf(r.In.Context())
	r.Out.URL.RawQuery = r.In.URL.RawQuery // as it is, also where Go would not read it
	r.Out.Host = r.In.Host
	r.SetXForwarded()
	h := r.Out.Header
	if strings.Contains(strings.ToLower(h.Get("Upgrade")), "h2c") {
		// A connection that becomes HTTP/2 behind the proxy carries requests that no
		// rule was asked about.
		for _, name := range []string{"Connection", "Upgrade", "Http2-Settings"} {
			h.Del(name)
		}
	}
	h.Set("X-Forwarded-Port", strconv.Itoa(int(c.place.Port)))
	h.Set("X-Real-Ip", c.client.String())
	h.Set("X-Request-Id", c.id)
	if c.share != nil {
		c.edit(r.Out)
		p.mirror(c, r.Out)
		change(r.Out.Header, c.share.Headers.Request)
	}
}

// failed answers for a backend that did not.
func (p *Proxy) failed(w http.ResponseWriter, r *http.Request, err error) {
	c := callOf(r.Context())
	if errors.Is(context.Cause(r.Context()), errLate) {
		p.refuse(w, c, http.StatusGatewayTimeout, fmt.Sprintf("%s did not answer in the %s that the route gives it", c.backend.Name, c.rule.Do.Timeout))
		return
	}
	if c.body.wasIdle() {
		if r.ProtoMajor == 1 {
			w.Header().Set("Connection", "close")
		}
		p.refuse(w, c, http.StatusRequestTimeout, fmt.Sprintf("nothing of the request's body came for %s", p.cfg.BodyTimeout))
		return
	}
	if r.Context().Err() != nil { // the client is gone and does not read this
		c.why = "the client went away"
		w.WriteHeader(statusClientGone)
		return
	}
	name := c.backend.Name
	var timeout net.Error
	switch {
	case isDial(err):
		p.refuse(w, c, http.StatusServiceUnavailable, fmt.Sprintf("none of the endpoints of %s that were tried (%d) took the connection", name, c.tries))
	case errors.Is(err, errCertificate):
		p.refuse(w, c, http.StatusBadGateway, fmt.Sprintf("the certificate of %s is not what its BackendTLSPolicy asks for", name))
	case errors.Is(err, errSlow):
		p.refuse(w, c, http.StatusGatewayTimeout, fmt.Sprintf("%s did not answer in the %s that the route gives an endpoint", name, c.rule.Do.Try))
	case errors.As(err, &timeout) && timeout.Timeout():
		p.refuse(w, c, http.StatusGatewayTimeout, fmt.Sprintf("%s did not answer in %s", name, p.cfg.ResponseTimeout))
	default:
		p.refuse(w, c, http.StatusBadGateway, fmt.Sprintf("%s ended the connection before its answer, or gave one that is not HTTP", name))
	}
	p.cfg.Logger.Debug("a backend did not answer", "backend", name, "endpoint", c.address(), "err", err)
}

// statusClientGone is nginx's number for a client that did not wait. It is in
// logs and metrics only.
const statusClientGone = 499

// refuse answers in words, as plain text that no browser takes for anything
// else: they repeat what the client sent.
func (p *Proxy) refuse(w http.ResponseWriter, c *call, code int, why string) {
	c.why = why
	h := w.Header()
	c.allowOrigin(h)
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(code)
	fmt.Fprintf(w, "%d %s: %s\n", code, http.StatusText(code), why)
}
