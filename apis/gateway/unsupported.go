package gateway

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"
	"k8s.io/utils/ptr"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// maxPattern is how many bytes a regular expression may have. Go's take time in
// proportion to what they are compared with, whatever they say.
const maxPattern = 1024

// Pattern compiles a regular expression that the whole of a value has to match.
func Pattern(s string) (*regexp.Regexp, error) {
	if len(s) > maxPattern {
		return nil, fmt.Errorf("the regular expression has %d bytes; %d is the most", len(s), maxPattern)
	}
	if _, err := regexp.Compile(s); err != nil {
		return nil, errors.New("the regular expression cannot be read as RE2 does: " + err.Error())
	}
	return regexp.Compile("^(?:" + s + ")$")
}

// unsupported is why the route cannot be served as it says. What is not served
// is refused with the whole route: to leave a filter out could let in whom it
// keeps out.
func (r *Route) unsupported() Fault {
	if r.GRPC != nil {
		for i := range r.GRPC.Spec.Rules {
			if err := grpcRule(&r.GRPC.Spec.Rules[i]); err != nil {
				return refused(i, err)
			}
		}
		return Fault{}
	}
	for i := range r.HTTP.Spec.Rules {
		if err := httpRule(&r.HTTP.Spec.Rules[i]); err != nil {
			return refused(i, err)
		}
	}
	return Fault{}
}

var errFilters = errors.New("filters: RequestRedirect and URLRewrite do not go together")

func refused(rule int, err error) Fault {
	reason := gatewayv1.RouteReasonUnsupportedValue
	if errors.Is(err, errFilters) {
		reason = gatewayv1.RouteReasonIncompatibleFilters
	}
	return fault(reason, "spec.rules[%d].%v", rule, err)
}

func httpRule(r *gatewayv1.HTTPRouteRule) error {
	if err := retry(r.Retry); err != nil {
		return fmt.Errorf("retry.%w", err)
	}
	if r.SessionPersistence != nil {
		return errors.New("sessionPersistence: is not served; give the Service sessionAffinity: ClientIP")
	}
	prefixes := true
	for i := range r.Matches {
		m := &r.Matches[i]
		if err := httpMatch(m); err != nil {
			return fmt.Errorf("matches[%d].%w", i, err)
		}
		prefixes = prefixes && (m.Path == nil || ptr.Deref(m.Path.Type, gatewayv1.PathMatchPathPrefix) == gatewayv1.PathMatchPathPrefix)
	}
	redirects, rewrites := false, false
	for i := range r.Filters {
		f := &r.Filters[i]
		if err := httpFilter(f, prefixes); err != nil {
			return fmt.Errorf("filters[%d].%w", i, err)
		}
		redirects = redirects || f.RequestRedirect != nil
		rewrites = rewrites || f.URLRewrite != nil
	}
	if redirects && rewrites {
		return errFilters
	}
	for i := range r.BackendRefs {
		for j := range r.BackendRefs[i].Filters {
			f := &r.BackendRefs[i].Filters[j]
			err := headersOnly(string(f.Type))
			if err == nil {
				err = httpFilter(f, prefixes)
			}
			if err != nil {
				return fmt.Errorf("backendRefs[%d].filters[%d].%w", i, j, err)
			}
		}
	}
	if t := r.Timeouts; t != nil {
		if _, err := Duration(t.Request); err != nil {
			return fmt.Errorf("timeouts.request: %w", err)
		}
		if _, err := Duration(t.BackendRequest); err != nil {
			return fmt.Errorf("timeouts.backendRequest: %w", err)
		}
	}
	return nil
}

// Duration reads one of a route's; nil is 0, which is: none.
func Duration(d *gatewayv1.Duration) (time.Duration, error) {
	if d == nil {
		return 0, nil
	}
	out, err := time.ParseDuration(string(*d))
	if err == nil && out < 0 {
		err = fmt.Errorf("%q is less than nothing", *d)
	}
	return out, err
}

func headersOnly(kind string) error {
	if kind != string(gatewayv1.HTTPRouteFilterRequestHeaderModifier) && kind != string(gatewayv1.HTTPRouteFilterResponseHeaderModifier) {
		return fmt.Errorf("type: %s is not served for one backend; RequestHeaderModifier and ResponseHeaderModifier are", kind)
	}
	return nil
}

func httpMatch(m *gatewayv1.HTTPRouteMatch) error {
	if m.Path != nil {
		value := ptr.Deref(m.Path.Value, "/")
		switch t := ptr.Deref(m.Path.Type, gatewayv1.PathMatchPathPrefix); t {
		case gatewayv1.PathMatchExact, gatewayv1.PathMatchPathPrefix:
			if !strings.HasPrefix(value, "/") {
				return fmt.Errorf("path.value: %q does not begin with /", value)
			}
		case gatewayv1.PathMatchRegularExpression:
			if _, err := Pattern(value); err != nil {
				return fmt.Errorf("path.value: %w", err)
			}
		default:
			return fmt.Errorf("path.type: %q is not served; Exact, PathPrefix and RegularExpression are", t)
		}
	}
	for i, h := range m.Headers {
		if err := valueMatch(string(ptr.Deref(h.Type, gatewayv1.HeaderMatchExact)), h.Value); err != nil {
			return fmt.Errorf("headers[%d].%w", i, err)
		}
	}
	for i, q := range m.QueryParams {
		if err := valueMatch(string(ptr.Deref(q.Type, gatewayv1.QueryParamMatchExact)), q.Value); err != nil {
			return fmt.Errorf("queryParams[%d].%w", i, err)
		}
	}
	if m.Method != nil && *m.Method == gatewayv1.HTTPMethodConnect {
		return errors.New("method: CONNECT is not served")
	}
	return nil
}

func valueMatch(kind, value string) error {
	switch kind {
	case "Exact":
		return nil
	case "RegularExpression":
		if _, err := Pattern(value); err != nil {
			return fmt.Errorf("value: %w", err)
		}
		return nil
	}
	return fmt.Errorf("type: %q is not served; Exact and RegularExpression are", kind)
}

func httpFilter(f *gatewayv1.HTTPRouteFilter, prefixes bool) error {
	switch {
	case f.Type == gatewayv1.HTTPRouteFilterRequestHeaderModifier && f.RequestHeaderModifier != nil:
		return headers("requestHeaderModifier", f.RequestHeaderModifier)
	case f.Type == gatewayv1.HTTPRouteFilterResponseHeaderModifier && f.ResponseHeaderModifier != nil:
		return headers("responseHeaderModifier", f.ResponseHeaderModifier)
	case f.Type == gatewayv1.HTTPRouteFilterRequestRedirect && f.RequestRedirect != nil:
		r := f.RequestRedirect
		if s := ptr.Deref(r.Scheme, "http"); s != "http" && s != "https" {
			return fmt.Errorf("requestRedirect.scheme: %q is not served; http and https are", s)
		}
		if c := ptr.Deref(r.StatusCode, 302); !slices.Contains([]int{301, 302, 303, 307, 308}, c) {
			return fmt.Errorf("requestRedirect.statusCode: %d is not served; 301, 302, 303, 307 and 308 are", c)
		}
		return modifier("requestRedirect.path", r.Path, prefixes)
	case f.Type == gatewayv1.HTTPRouteFilterURLRewrite && f.URLRewrite != nil:
		return modifier("urlRewrite.path", f.URLRewrite.Path, prefixes)
	case f.Type == gatewayv1.HTTPRouteFilterRequestMirror && f.RequestMirror != nil:
		_, _, err := Fraction(f.RequestMirror)
		return err
	case f.Type == gatewayv1.HTTPRouteFilterCORS && f.CORS != nil:
		return cors(f.CORS)
	}
	return fmt.Errorf("type: %s is not served; RequestHeaderModifier, ResponseHeaderModifier, RequestRedirect, URLRewrite, RequestMirror and CORS are", f.Type)
}

// maxAttempts is how often a request is sent again at most, whatever its route says.
const maxAttempts = 10

func retry(r *gatewayv1.HTTPRouteRetry) error {
	if r == nil {
		return nil
	}
	for i, c := range r.Codes {
		if c < 400 || c > 599 {
			return fmt.Errorf("codes[%d]: %d is no status of an error; 400 to 599 are", i, c)
		}
	}
	if n := ptr.Deref(r.Attempts, 1); n < 1 || n > maxAttempts {
		return fmt.Errorf("attempts: %d is not served; 1 to %d are", n, maxAttempts)
	}
	if _, err := Duration(r.Backoff); err != nil {
		return fmt.Errorf("backoff: %w", err)
	}
	return nil
}

// Fraction is how many of how many requests a mirror gets.
func Fraction(m *gatewayv1.HTTPRequestMirrorFilter) (of, in int, err error) {
	of, in = 100, 100
	switch {
	case m.Percent != nil && m.Fraction != nil:
		return 0, 0, errors.New("requestMirror: percent and fraction do not go together")
	case m.Percent != nil:
		of = int(*m.Percent)
	case m.Fraction != nil:
		of, in = int(m.Fraction.Numerator), int(ptr.Deref(m.Fraction.Denominator, 100))
	}
	if in < 1 || of < 0 || of > in {
		return 0, 0, fmt.Errorf("requestMirror: %d of %d requests cannot be mirrored", of, in)
	}
	return of, in, nil
}

func cors(c *gatewayv1.HTTPCORSFilter) error {
	for i, o := range c.AllowOrigins {
		if o == "*" && len(c.AllowOrigins) == 1 {
			continue
		}
		scheme, host, ok := strings.Cut(string(o), "://")
		if !ok || scheme != "http" && scheme != "https" || host == "" || strings.ContainsAny(host, "/?# ") || strings.Count(host, "*") > 1 {
			return fmt.Errorf("cors.allowOrigins[%d]: %q is not served; http://HOST[:PORT] and https://HOST[:PORT] are, with one * in HOST at most, or * alone", i, o)
		}
	}
	for i, m := range c.AllowMethods {
		if !httpguts.ValidHeaderFieldName(string(m)) { // both are tokens
			return fmt.Errorf("cors.allowMethods[%d]: %q is no method", i, m)
		}
	}
	for at, list := range map[string][]gatewayv1.HTTPHeaderName{"allowHeaders": c.AllowHeaders, "exposeHeaders": c.ExposeHeaders} {
		for i, n := range list {
			if !httpguts.ValidHeaderFieldName(string(n)) {
				return fmt.Errorf("cors.%s[%d]: %q is no name of a header", at, i, n)
			}
		}
	}
	return nil
}

func modifier(at string, m *gatewayv1.HTTPPathModifier, prefixes bool) error {
	switch {
	case m == nil, m.Type == gatewayv1.FullPathHTTPPathModifier && m.ReplaceFullPath != nil:
		return nil
	case m.Type == gatewayv1.PrefixMatchHTTPPathModifier && m.ReplacePrefixMatch != nil:
		if !prefixes {
			return fmt.Errorf("%s: ReplacePrefixMatch needs matches of type PathPrefix", at)
		}
		return nil
	}
	return fmt.Errorf("%s.type: %q is not served; ReplaceFullPath and ReplacePrefixMatch are", at, m.Type)
}

// framing are headers that say how a message is sent; they are the proxy's.
var framing = []string{"connection", "content-length", "host", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}

func headers(at string, f *gatewayv1.HTTPHeaderFilter) error {
	name := func(n string) error {
		if !httpguts.ValidHeaderFieldName(n) {
			return fmt.Errorf("%q is no name of a header", n)
		}
		if slices.Contains(framing, strings.ToLower(n)) {
			return fmt.Errorf("header %s is the proxy's own (for Host there is urlRewrite.hostname)", n)
		}
		return nil
	}
	for _, list := range [][]gatewayv1.HTTPHeader{f.Set, f.Add} {
		for _, h := range list {
			if err := name(string(h.Name)); err != nil {
				return fmt.Errorf("%s: %w", at, err)
			}
			if !httpguts.ValidHeaderFieldValue(h.Value) {
				return fmt.Errorf("%s: %q is no value of a header", at, h.Value)
			}
		}
	}
	for _, n := range f.Remove {
		if err := name(n); err != nil {
			return fmt.Errorf("%s: %w", at, err)
		}
	}
	return nil
}

func grpcRule(r *gatewayv1.GRPCRouteRule) error {
	if r.SessionPersistence != nil {
		return errors.New("sessionPersistence: is not served; give the Service sessionAffinity: ClientIP")
	}
	for i := range r.Matches {
		m := &r.Matches[i]
		if m.Method != nil {
			kind := string(ptr.Deref(m.Method.Type, gatewayv1.GRPCMethodMatchExact))
			for _, value := range []*string{m.Method.Service, m.Method.Method} {
				if err := valueMatch(kind, ptr.Deref(value, "")); err != nil {
					return fmt.Errorf("matches[%d].method.%w", i, err)
				}
			}
		}
		for j, h := range m.Headers {
			if err := valueMatch(string(ptr.Deref(h.Type, gatewayv1.GRPCHeaderMatchExact)), h.Value); err != nil {
				return fmt.Errorf("matches[%d].headers[%d].%w", i, j, err)
			}
		}
	}
	for i := range r.Filters {
		if err := grpcFilter(&r.Filters[i]); err != nil {
			return fmt.Errorf("filters[%d].%w", i, err)
		}
	}
	for i := range r.BackendRefs {
		for j := range r.BackendRefs[i].Filters {
			f := &r.BackendRefs[i].Filters[j]
			err := headersOnly(string(f.Type))
			if err == nil {
				err = grpcFilter(f)
			}
			if err != nil {
				return fmt.Errorf("backendRefs[%d].filters[%d].%w", i, j, err)
			}
		}
	}
	return nil
}

func grpcFilter(f *gatewayv1.GRPCRouteFilter) error {
	switch {
	case f.Type == gatewayv1.GRPCRouteFilterRequestHeaderModifier && f.RequestHeaderModifier != nil:
		return headers("requestHeaderModifier", f.RequestHeaderModifier)
	case f.Type == gatewayv1.GRPCRouteFilterResponseHeaderModifier && f.ResponseHeaderModifier != nil:
		return headers("responseHeaderModifier", f.ResponseHeaderModifier)
	case f.Type == gatewayv1.GRPCRouteFilterRequestMirror && f.RequestMirror != nil:
		_, _, err := Fraction(f.RequestMirror)
		return err
	}
	return fmt.Errorf("type: %s is not served; RequestHeaderModifier, ResponseHeaderModifier and RequestMirror are", f.Type)
}
