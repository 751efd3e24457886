package watch

import (
	"cmp"
	"crypto/sha256"
	"crypto/x509"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/clusterd/clusterd/apis/gateway"
	"github.com/clusterd/clusterd/ingress/route"
)

// compileGateways makes listeners of what Gateways and their routes mean, and the
// ports that they need. faults say what of them cannot work. Pure.
func compileGateways(o objects, v *gateway.View) (listeners []route.Listener, binds []route.Bind, faults []string) {
	c := compiler{objects: o, backends: map[backendKey]*route.Backend{}}
	at := map[*gateway.Listener]int{}
	secure := map[route.Place]bool{}
	for _, g := range v.Gateways {
		for _, l := range g.Listeners {
			if !l.Serves() {
				continue
			}
			one := route.Listener{Place: place(g.Service, l.Port), Host: l.Host(), TLS: l.Protocol == gatewayv1.HTTPSProtocolType}
			for _, name := range l.Certificates {
				pair, err := o.pair(name.Namespace, name.Name)
				if err != nil {
					faults = append(faults, fmt.Sprintf("Gateway %s/%s: %v", g.Namespace, g.Name, err))
					continue
				}
				one.Certificates = append(one.Certificates, pair)
			}
			one.Clients = o.clients(l.Clients)
			secure[one.Place] = one.TLS
			at[l] = len(listeners)
			listeners = append(listeners, one)
		}
	}
	for _, r := range v.Routes {
		// By what its Gateways show backends: to most it is nothing.
		made := map[types.NamespacedName][]route.GatewayRule{}
		for _, p := range r.Parents {
			c.shown = p.Of.Shown
			shown := ptr.Deref(c.shown, types.NamespacedName{})
			rules, ok := made[shown]
			if !ok {
				var err error
				if rules, err = c.route(r); err != nil { // refused before; one route keeps no other from being served
					faults = append(faults, fmt.Sprintf("%s %s/%s: %v", r.Kind, r.Namespace, r.Name, err))
					break
				}
				made[shown] = rules
			}
			for _, a := range p.Attached {
				i, ok := at[a.Listener]
				if !ok {
					continue
				}
				for _, rule := range rules {
					rule.Hosts = a.Hosts
					listeners[i].Rules = append(listeners[i].Rules, rule)
				}
			}
		}
	}
	return listeners, c.binds(v.Services(), secure), faults
}

// verified is what a policy asks of a certificate.
func (c *compiler) verified(p *gateway.Policy) *route.TLS {
	v := &p.Spec.Validation
	out := &route.TLS{ServerName: string(v.Hostname), Roots: x509.NewCertPool()}
	hash := sha256.New()
	for _, name := range p.Authorities {
		certs, _ := gateway.Authorities(c.configMap(name.Namespace, name.Name)) // none: no certificate is valid
		for _, cert := range certs {
			out.Roots.AddCert(cert)
			hash.Write(cert.Raw)
		}
	}
	for _, n := range v.SubjectAltNames {
		switch n.Type {
		case gatewayv1.HostnameSubjectAltNameType:
			out.Hosts = append(out.Hosts, string(n.Hostname))
		case gatewayv1.URISubjectAltNameType:
			out.URIs = append(out.URIs, string(n.URI))
		}
	}
	fmt.Fprintf(hash, "%q %q %q", out.ServerName, out.Hosts, out.URIs)
	if c.shown != nil {
		if pair, err := c.pair(c.shown.Namespace, c.shown.Name); err == nil { // else the Gateway's status says why
			out.Certificate = pair
			for _, der := range pair.Certificate {
				fmt.Fprintf(hash, " %x", der)
			}
		}
	}
	out.Key = string(hash.Sum(nil))
	return out
}

// clients has the authorities that there are: gateway.Evaluate has named them.
func (o objects) clients(c *gateway.Clients) *route.Clients {
	if c == nil {
		return nil
	}
	out := &route.Clients{Roots: x509.NewCertPool(), Any: c.Any}
	for _, name := range c.Authorities {
		certs, _ := gateway.Authorities(o.configMap(name.Namespace, name.Name)) // none: they admit no client
		for _, cert := range certs {
			out.Roots.AddCert(cert)
		}
	}
	return out
}

func place(service string, port int32) route.Place {
	if service == gateway.SharedService {
		service = ""
	}
	return route.Place{Service: service, Port: uint16(port)}
}

// binds are where the Services in front of the proxies say that these are for each
// port: at its target port.
func (c *compiler) binds(all map[string]gateway.Service, secure map[route.Place]bool) (out []route.Bind) {
	for _, name := range slices.Sorted(maps.Keys(all)) {
		s := c.service(gateway.ServiceNamespace, name)
		if s == nil {
			continue
		}
		for _, port := range all[name].Ports {
			at := place(name, port)
			for _, p := range s.Spec.Ports {
				if local := p.TargetPort.IntValue(); p.Port == port && local > 0 && local < 1<<16 {
					out = append(out, route.Bind{Place: at, Local: uint16(local), TLS: secure[at]})
				}
			}
		}
	}
	return out
}

// route makes rules of a route, without their hosts.
func (c *compiler) route(r *gateway.Route) (out []route.GatewayRule, err error) {
	add := func(when []route.Condition, a *route.Action) {
		out = append(out, route.GatewayRule{When: when, Rule: &route.Rule{
			Kind: r.Kind, Owner: route.Owner{Namespace: r.Namespace, Name: r.Name}, Since: r.CreationTimestamp.Time, Do: a,
		}})
	}
	if r.GRPC != nil {
		for i := range r.GRPC.Spec.Rules {
			when, a, err := c.grpcRule(r, &r.GRPC.Spec.Rules[i])
			if err != nil {
				return nil, err
			}
			add(when, a)
		}
		return out, nil
	}
	for i := range r.HTTP.Spec.Rules {
		when, a, err := c.httpRule(r, &r.HTTP.Spec.Rules[i])
		if err != nil {
			return nil, err
		}
		add(when, a)
	}
	return out, nil
}

func (c *compiler) httpRule(r *gateway.Route, rule *gatewayv1.HTTPRouteRule) (when []route.Condition, _ *route.Action, err error) {
	for i := range rule.Matches {
		one, err := condition(&rule.Matches[i])
		if err != nil {
			return nil, nil, err
		}
		when = append(when, one)
	}
	if len(when) == 0 {
		when = []route.Condition{{}}
	}
	a := &route.Action{}
	for i := range rule.Filters {
		f := &rule.Filters[i]
		changes(&a.Headers, f.RequestHeaderModifier, f.ResponseHeaderModifier)
		if d := f.RequestRedirect; d != nil {
			a.Redirect = &route.Redirect{
				Scheme: ptr.Deref(d.Scheme, ""), Host: string(ptr.Deref(d.Hostname, "")), Port: uint16(ptr.Deref(d.Port, 0)),
				Path: change(d.Path), Code: ptr.Deref(d.StatusCode, 302),
			}
		}
		if w := f.URLRewrite; w != nil {
			a.Rewrite = route.Rewrite{Host: string(ptr.Deref(w.Hostname, "")), Path: change(w.Path)}
		}
		if f.CORS != nil {
			a.CORS = corsOf(f.CORS)
		}
		if err := c.mirror(r, a, f.RequestMirror); err != nil {
			return nil, nil, err
		}
	}
	if t := rule.Retry; t != nil {
		a.Retry = &route.Retry{Attempts: ptr.Deref(t.Attempts, 1)}
		for _, code := range t.Codes {
			a.Retry.Codes = append(a.Retry.Codes, int(code))
		}
		if a.Retry.Backoff, err = gateway.Duration(t.Backoff); err != nil {
			return nil, nil, err
		}
	}
	if t := rule.Timeouts; t != nil {
		a.NoResponseTimeout = true
		if a.Timeout, err = gateway.Duration(t.Request); err != nil {
			return nil, nil, err
		}
		if a.Try, err = gateway.Duration(t.BackendRequest); err != nil {
			return nil, nil, err
		}
	}
	for i := range rule.BackendRefs {
		ref := &rule.BackendRefs[i]
		s := c.share(r, ref.BackendRef)
		for j := range ref.Filters {
			changes(&s.Headers, ref.Filters[j].RequestHeaderModifier, ref.Filters[j].ResponseHeaderModifier)
		}
		a.Shares = append(a.Shares, s)
	}
	return when, a, nil
}

func (c *compiler) grpcRule(r *gateway.Route, rule *gatewayv1.GRPCRouteRule) (when []route.Condition, _ *route.Action, _ error) {
	for i := range rule.Matches {
		m := &rule.Matches[i]
		one, err := called(m.Method)
		if err != nil {
			return nil, nil, err
		}
		for _, h := range m.Headers {
			v, err := value(string(h.Name), h.Value, ptr.Deref(h.Type, "") == gatewayv1.GRPCHeaderMatchRegularExpression)
			if err != nil {
				return nil, nil, err
			}
			one.Headers = append(one.Headers, v)
		}
		when = append(when, one)
	}
	if len(when) == 0 {
		when = []route.Condition{{}}
	}
	a := &route.Action{NoResponseTimeout: true}
	for i := range rule.Filters {
		f := &rule.Filters[i]
		changes(&a.Headers, f.RequestHeaderModifier, f.ResponseHeaderModifier)
		if err := c.mirror(r, a, f.RequestMirror); err != nil {
			return nil, nil, err
		}
	}
	for i := range rule.BackendRefs {
		ref := &rule.BackendRefs[i]
		s := c.share(r, ref.BackendRef)
		for j := range ref.Filters {
			changes(&s.Headers, ref.Filters[j].RequestHeaderModifier, ref.Filters[j].ResponseHeaderModifier)
		}
		a.Shares = append(a.Shares, s)
	}
	return when, a, nil
}

// mirror adds a filter's to those of a rule. One whose backend cannot be used gets
// nothing: the route's status says why.
func (c *compiler) mirror(r *gateway.Route, a *route.Action, f *gatewayv1.HTTPRequestMirrorFilter) error {
	if f == nil {
		return nil
	}
	of, in, err := gateway.Fraction(f)
	if err != nil {
		return err
	}
	if s := c.share(r, gateway.MirrorRef(f)); s.Broken == "" && of > 0 {
		a.Mirrors = append(a.Mirrors, route.Mirror{Backend: s.Backend, Of: of, In: in})
	}
	return nil
}

func corsOf(f *gatewayv1.HTTPCORSFilter) *route.CORS {
	out := &route.CORS{Credentials: ptr.Deref(f.AllowCredentials, false), MaxAge: int(cmp.Or(f.MaxAge, 5))}
	for _, o := range f.AllowOrigins {
		out.Origins = append(out.Origins, string(o))
	}
	for _, m := range f.AllowMethods {
		out.Methods = append(out.Methods, string(m))
	}
	for _, h := range f.AllowHeaders {
		out.Headers = append(out.Headers, string(h))
	}
	for _, h := range f.ExposeHeaders {
		out.Expose = append(out.Expose, string(h))
	}
	return out
}

// share is the part of the requests that one backendRef has.
func (c *compiler) share(r *gateway.Route, ref gatewayv1.BackendRef) route.Share {
	b := r.Backend(ref)
	s := route.Share{Weight: int(max(b.Weight, 0)), Broken: b.Fault.Message}
	if s.Broken != "" {
		return s
	}
	port := fmt.Sprint(b.Port)
	if p := b.Policy; p != nil && p.Refused.Message != "" {
		s.Broken = fmt.Sprintf("BackendTLSPolicy %s/%s of Service %s is not accepted: %s", p.Namespace, p.Name, b.Service, p.Refused.Message)
		return s
	}
	key := backendKey{namespace: b.Namespace, service: b.Service, port: port + "/" + r.Kind}
	if b.Policy != nil {
		key.shown = ptr.Deref(c.shown, types.NamespacedName{})
	}
	if c.backends[key] == nil {
		one := c.serviceBackend(backendKey{namespace: b.Namespace, service: b.Service, port: port}, networkingv1.ServiceBackendPort{Number: b.Port})
		if r.GRPC != nil && one.Protocol == route.HTTP {
			one.Protocol = route.H2C
		}
		if b.Policy != nil {
			one.Protocol, one.TLS = route.HTTPS, c.verified(b.Policy)
		}
		c.backends[key] = one
	}
	s.Backend, s.Broken = c.backends[key], c.backends[key].Fault
	return s
}

func condition(m *gatewayv1.HTTPRouteMatch) (out route.Condition, err error) {
	if m.Path != nil {
		text := ptr.Deref(m.Path.Value, "/")
		switch ptr.Deref(m.Path.Type, gatewayv1.PathMatchPathPrefix) {
		case gatewayv1.PathMatchExact:
			out.Path, out.Match = text, route.Exact
		case gatewayv1.PathMatchRegularExpression:
			out.Match = route.Exact
			if out.Pattern, err = gateway.Pattern(text); err != nil {
				return out, err
			}
		default:
			out.Path = text
		}
	}
	out.Method = string(ptr.Deref(m.Method, ""))
	seen := map[string]bool{}
	for _, h := range m.Headers {
		v, err := value(string(h.Name), h.Value, ptr.Deref(h.Type, "") == gatewayv1.HeaderMatchRegularExpression)
		if err != nil {
			return out, err
		}
		if name := strings.ToLower(v.Name); !seen[name] { // of equal names the first counts
			seen[name] = true
			out.Headers = append(out.Headers, v)
		}
	}
	asked := map[string]bool{}
	for _, q := range m.QueryParams {
		v, err := value(string(q.Name), q.Value, ptr.Deref(q.Type, "") == gatewayv1.QueryParamMatchRegularExpression)
		if err != nil {
			return out, err
		}
		if !asked[v.Name] {
			asked[v.Name] = true
			out.Query = append(out.Query, v)
		}
	}
	return out, nil
}

// called is the condition for calls of a gRPC method, whose path is
// /SERVICE/METHOD.
func called(m *gatewayv1.GRPCMethodMatch) (out route.Condition, err error) {
	if m == nil {
		return out, nil
	}
	service, method := ptr.Deref(m.Service, ""), ptr.Deref(m.Method, "")
	if ptr.Deref(m.Type, gatewayv1.GRPCMethodMatchExact) == gatewayv1.GRPCMethodMatchRegularExpression {
		// Each part is compiled by itself, so that neither can end the other.
		for _, part := range []string{service, method} {
			if _, err := gateway.Pattern(part); err != nil {
				return out, err
			}
		}
		out.Match = route.Exact
		out.Pattern, err = regexp.Compile("^/(?:" + cmp.Or(service, "[^/]+") + ")/(?:" + cmp.Or(method, "[^/]+") + ")$")
		return out, err
	}
	switch {
	case service != "" && method != "":
		out.Path, out.Match = "/"+service+"/"+method, route.Exact
	case service != "":
		out.Path = "/" + service
	case method != "":
		out.Pattern, err = regexp.Compile("^/[^/]+/" + regexp.QuoteMeta(method) + "$")
	}
	return out, err
}

func value(name, text string, pattern bool) (out route.Value, err error) {
	out.Name = name
	if !pattern {
		out.Exact = text
		return out, nil
	}
	out.Pattern, err = gateway.Pattern(text)
	return out, err
}

func changes(c *route.Changes, request, response *gatewayv1.HTTPHeaderFilter) {
	edit(&c.Request, request)
	edit(&c.Response, response)
}

func edit(e *route.Edit, f *gatewayv1.HTTPHeaderFilter) {
	if f == nil {
		return
	}
	for _, h := range f.Set {
		e.Set = append(e.Set, route.Field{Name: string(h.Name), Value: h.Value})
	}
	for _, h := range f.Add {
		e.Add = append(e.Add, route.Field{Name: string(h.Name), Value: h.Value})
	}
	e.Remove = append(e.Remove, f.Remove...)
}

func change(m *gatewayv1.HTTPPathModifier) *route.Path {
	switch {
	case m == nil:
		return nil
	case m.ReplacePrefixMatch != nil:
		return &route.Path{Value: *m.ReplacePrefixMatch, Prefix: true}
	}
	return &route.Path{Value: ptr.Deref(m.ReplaceFullPath, "/")}
}

// certificate is why a Secret cannot be shown.
func (o objects) certificate(namespace, name string) error {
	_, err := o.pair(namespace, name)
	return err
}
