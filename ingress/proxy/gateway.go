package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/clusterd/clusterd/ingress/route"
)

var (
	// errLate ends a request that took longer than its route lets it.
	errLate = errors.New("the request took longer than its route lets it")
	// errSlow ends what one endpoint took longer for than its route lets it.
	errSlow = errors.New("the endpoint took longer than the route lets it")
)

// request is what rules are found by.
func (p *Proxy) request(t *route.Table, r *http.Request, c *call) *route.Request {
	out := &route.Request{Host: c.host, Path: r.URL.Path, Method: r.Method, Header: r.Header, Query: r.URL.RawQuery}
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	c.place = t.PlaceOfPort(localPort(local), r.TLS != nil)
	out.Place = c.place
	if r.TLS != nil {
		out.ServerName = serverName(r.TLS.ServerName)
		out.Verified = len(r.TLS.VerifiedChains) > 0
	}
	return out
}

func localPort(a net.Addr) uint16 {
	if tcp, ok := a.(*net.TCPAddr); ok {
		return tcp.AddrPort().Port()
	}
	return 0
}

func serverName(s string) string { return strings.ToLower(strings.TrimSuffix(s, ".")) }

// do answers by a Gateway's rule.
func (p *Proxy) do(w http.ResponseWriter, r *http.Request, c *call) {
	a := c.rule.Do
	if a.CORS != nil {
		if isPreflight(r) {
			preflight(w.Header(), a.CORS, r.Header)
			w.WriteHeader(http.StatusNoContent)
			return
		}
		c.origin = r.Header.Get("Origin")
	}
	if a.Redirect != nil {
		if a.Redirect.Host == "" && c.host == "" {
			p.refuse(w, c, http.StatusBadRequest, "the request names no host, so it cannot be sent on")
			return
		}
		c.allowOrigin(w.Header())
		change(w.Header(), a.Headers.Response)
		w.Header().Set("Location", location(a.Redirect, r, c))
		w.WriteHeader(a.Redirect.Code)
		return
	}
	total := a.Total()
	if total == 0 {
		p.refuse(w, c, p.broken(c), fmt.Sprintf("the rule of %s %s has no backend with a weight", c.rule.Kind, c.rule.Owner))
		return
	}
	c.share = a.Draw(rand.IntN(total))
	if c.share.Broken != "" {
		p.refuse(w, c, p.broken(c), c.share.Broken)
		return
	}
	c.backend = c.share.Backend
	if a.Timeout > 0 {
		ctx, cancel := context.WithCancelCause(r.Context())
		c.timer = time.AfterFunc(a.Timeout, func() { cancel(errLate) })
		defer cancel(nil)
		defer c.timer.Stop()
		r = r.WithContext(ctx)
	}
	p.send(w, r, c)
}

// broken is the status for a rule that names nothing that could answer: clients
// of gRPC take 503 for what the API asks for, Unavailable.
func (p *Proxy) broken(c *call) int {
	if c.rule.Kind == "GRPCRoute" {
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

// edit makes the request what its route's rule says that backends are to get.
func (c *call) edit(out *http.Request) {
	a := c.rule.Do
	if a.Rewrite.Host != "" {
		out.Host = a.Rewrite.Host
	}
	if a.Rewrite.Path != nil {
		out.URL.Path, out.URL.RawPath = repath(a.Rewrite.Path, out.URL, c.prefix)
	}
	change(out.Header, a.Headers.Request)
}

// allowOrigin puts into an answer what the rule says of pages of other origins.
func (c *call) allowOrigin(h http.Header) {
	if c.rule != nil && c.rule.Do != nil && c.rule.Do.CORS != nil {
		shareWith(h, c.rule.Do.CORS, c.origin)
	}
}

// answered makes the answer what the route says that the client is to get.
func answered(resp *http.Response) error {
	c := callOf(resp.Request.Context())
	if c == nil || c.share == nil {
		return nil
	}
	if resp.StatusCode == http.StatusSwitchingProtocols && c.timer != nil {
		c.timer.Stop() // an upgraded connection lasts as long as it likes
	}
	c.allowOrigin(resp.Header)
	change(resp.Header, c.share.Headers.Response)
	change(resp.Header, c.rule.Do.Headers.Response)
	return nil
}

func change(h http.Header, e route.Edit) {
	for _, f := range e.Set {
		h.Set(f.Name, f.Value)
	}
	for _, f := range e.Add {
		h.Add(f.Name, f.Value)
	}
	for _, name := range e.Remove {
		h.Del(name)
	}
}

// repath is the changed path, decoded and as it was sent. The latter is "" where
// it is that which follows from the former.
func repath(p *route.Path, u *url.URL, prefix string) (path, raw string) {
	if !p.Prefix {
		return p.Value, ""
	}
	rest := strings.TrimPrefix(u.Path, prefix)
	path = joined(p.Value, rest)
	// What of the path was sent in an unusual form stays so, if that is not part of
	// what is replaced.
	if u.RawPath != "" {
		if rest, ok := strings.CutPrefix(u.RawPath, (&url.URL{Path: prefix}).EscapedPath()); ok {
			raw = joined((&url.URL{Path: p.Value}).EscapedPath(), rest)
		}
	}
	return path, raw
}

func joined(prefix, rest string) string {
	rest = strings.TrimPrefix(rest, "/")
	switch prefix = strings.TrimRight(prefix, "/"); {
	case rest == "" && prefix != "":
		return prefix
	}
	return prefix + "/" + rest
}

// location is where a redirect leads.
func location(d *route.Redirect, r *http.Request, c *call) string {
	scheme := d.Scheme
	if scheme == "" {
		scheme = "http"
		if r.TLS != nil {
			scheme = "https"
		}
	}
	usual := uint16(80)
	if scheme == "https" {
		usual = 443
	}
	port := d.Port
	switch {
	case port != 0:
	case d.Scheme != "":
		port = usual
	default:
		port = c.place.Port
	}
	host := d.Host
	if host == "" {
		host = bracketed(c.host)
	}
	if port != usual {
		host = fmt.Sprintf("%s:%d", host, port)
	}
	to := url.URL{Scheme: scheme, Host: host, Path: r.URL.Path, RawPath: r.URL.RawPath, RawQuery: r.URL.RawQuery}
	if d.Path != nil {
		to.Path, to.RawPath = repath(d.Path, r.URL, c.prefix)
	}
	return to.String()
}

// try sends the request to one endpoint, within the time that the route gives
// it.
func (c *call) try(out *http.Request, transport http.RoundTripper) (*http.Response, error) {
	if c.rule.Do == nil || c.rule.Do.Try == 0 {
		return transport.RoundTrip(out)
	}
	ctx, cancel := context.WithCancelCause(out.Context())
	timer := time.AfterFunc(c.rule.Do.Try, func() { cancel(errSlow) })
	resp, err := transport.RoundTrip(out.WithContext(ctx))
	if err != nil {
		if errors.Is(context.Cause(ctx), errSlow) {
			err = fmt.Errorf("%w: %w", errSlow, err)
		}
		timer.Stop()
		cancel(nil)
		return nil, err
	}
	if resp.StatusCode == http.StatusSwitchingProtocols {
		timer.Stop()
		return resp, nil
	}
	resp.Body = &timedBody{ReadCloser: resp.Body, end: sync.OnceFunc(func() { timer.Stop(); cancel(nil) })}
	return resp, nil
}

// timedBody ends the clock when it is closed.
type timedBody struct {
	io.ReadCloser
	end func()
}

// Close implements io.Closer.
func (b *timedBody) Close() error {
	defer b.end()
	return b.ReadCloser.Close()
}
