package watch

import (
	order "cmp"
	"encoding/pem"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"

	"github.com/clusterd/clusterd/apis/gateway"
	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/ingress/route"
)

var listKinds = map[schema.GroupVersionResource]string{}

func init() {
	for resource, kind := range map[string]string{"gatewayclasses": "GatewayClass", "gateways": "Gateway", "httproutes": "HTTPRoute", "grpcroutes": "GRPCRoute", "referencegrants": "ReferenceGrant"} {
		listKinds[schema.GroupVersionResource{Group: gateway.Group, Version: "v1", Resource: resource}] = kind + "List"
	}
}

// customObjects are a Gateway, a route of it, and another that no version of the kind
// has ever been like.
func customObjects(t *testing.T) (out []*unstructured.Unstructured) {
	for _, text := range []string{
		"{kind: GatewayClass, metadata: {name: clusterd}, spec: {controllerName: clusterd.local/gateway}}",
		"{kind: Gateway, metadata: {name: g, namespace: shop, annotations: {clusterd.local/shared-address: \"true\"}}, spec: {gatewayClassName: clusterd, listeners: [{name: a, port: 80, protocol: HTTP}]}}",
		"{kind: HTTPRoute, metadata: {name: bad, namespace: shop}, spec: {parentRefs: all, rules: {a: b}}}",
		"{kind: HTTPRoute, metadata: {name: good, namespace: shop}, spec: {parentRefs: [{name: g}], hostnames: [g.example], rules: [{backendRefs: [{name: web, port: 80}]}]}}",
	} {
		u := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(text), &u.Object); err != nil {
			t.Fatal(err)
		}
		u.SetAPIVersion(gateway.Group + "/v1")
		out = append(out, u)
	}
	return out
}

const routes = `
- kind: HTTPRoute
  metadata: {name: web, namespace: shop}
  spec:
    parentRefs: [{name: g}]
    hostnames: [Web.example]
    rules:
    - matches: [{path: {value: /a}}, {path: {type: Exact, value: /exact}, method: POST}]
      backendRefs: [{name: web, port: 80, weight: 3}, {name: sticky, port: 80, weight: 0}, {name: none, port: 80}]
    - matches:
      - {path: {type: RegularExpression, value: "/r/[0-9]+"}, headers: [{name: X-A, value: "1"}, {name: x-a, value: "2"}], queryParams: [{name: q, type: RegularExpression, value: "[a-c]"}]}
      filters:
      - {type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: A, value: b}], add: [{name: C, value: d}], remove: [e]}}
      - {type: URLRewrite, urlRewrite: {hostname: b.example, path: {type: ReplaceFullPath, replaceFullPath: /x}}}
      backendRefs: [{name: web, port: 81, filters: [{type: ResponseHeaderModifier, responseHeaderModifier: {set: [{name: F, value: g}]}}]}]
      timeouts: {request: 1m, backendRequest: 500ms}
    - matches: [{path: {value: /moved}}]
      filters: [{type: RequestRedirect, requestRedirect: {scheme: https, port: 8443, statusCode: 301, path: {type: ReplacePrefixMatch, replacePrefixMatch: /to}}}]
    - matches: [{path: {value: /copied}}]
      filters:
      - {type: RequestMirror, requestMirror: {backendRef: {name: web, port: 81}, percent: 10}}
      - {type: RequestMirror, requestMirror: {backendRef: {name: web, port: 80}, fraction: {numerator: 1, denominator: 3}}}
      - {type: RequestMirror, requestMirror: {backendRef: {name: sticky, port: 80}}}
      - {type: RequestMirror, requestMirror: {backendRef: {name: web, port: 80}, percent: 0}}
      - {type: RequestMirror, requestMirror: {backendRef: {name: none, port: 80}}}
      - {type: CORS, cors: {allowOrigins: ["https://*.example"], allowMethods: [PUT], allowHeaders: [X-A], exposeHeaders: [X-B], allowCredentials: true}}
      retry: {codes: [502, 503], attempts: 3, backoff: 100ms}
- kind: HTTPRoute
  metadata: {name: alone, namespace: shop}
  spec:
    parentRefs: [{name: alone}]
    rules: [{backendRefs: [{name: sticky, port: 80}]}]
- kind: GRPCRoute
  metadata: {name: calls, namespace: shop}
  spec:
    parentRefs: [{name: g, sectionName: b}]
    hostnames: [calls.example]
    rules:
    - matches: [{method: {service: shop.Cart, method: Add}}, {method: {service: shop.Stock}, headers: [{name: v, value: "2"}]}]
      backendRefs: [{name: web, port: 80}]
    - matches: [{method: {method: Check}}, {method: {type: RegularExpression, service: "x|y", method: "z.*"}}]
      backendRefs: [{name: sticky, port: 80}]
`

func view(t *testing.T, o objects) *gateway.View {
	var list []map[string]any
	if err := yaml.Unmarshal([]byte(routes), &list); err != nil {
		t.Fatal(err)
	}
	g := gateway.Objects{Namespace: func(string) labels.Set { return nil }, Service: o.service, ConfigMap: o.configMap, Certificate: o.certificate}
	for _, one := range list {
		obj, err := gateway.Typed(&unstructured.Unstructured{Object: one})
		if err != nil {
			t.Fatal(err)
		}
		switch r := obj.(type) {
		case *gatewayv1.HTTPRoute:
			g.HTTPRoutes = append(g.HTTPRoutes, r)
		case *gatewayv1.GRPCRoute:
			g.GRPCRoutes = append(g.GRPCRoutes, r)
		default:
			t.Fatalf("%T", obj)
		}
	}
	g.Classes = []*gatewayv1.GatewayClass{{ObjectMeta: metav1.ObjectMeta{Name: "clusterd"}, Spec: gatewayv1.GatewayClassSpec{ControllerName: gateway.Controller}}}
	gw := &gatewayv1.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "g"}}
	if err := yaml.Unmarshal([]byte(`{gatewayClassName: clusterd, listeners: [
		{name: a, port: 80, protocol: HTTP, hostname: "*.example"}, {name: b, port: 9000, protocol: HTTP},
		{name: c, port: 443, protocol: HTTPS, hostname: a.example, tls: {certificateRefs: [{name: a}]}}, {name: d, port: 90, protocol: TCP}]}`), &gw.Spec); err != nil {
		t.Fatal(err)
	}
	gw.Annotations = map[string]string{names.SharedAddress: "true"}
	alone := &gatewayv1.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "alone"}}
	if err := yaml.Unmarshal([]byte(`{gatewayClassName: clusterd, listeners: [{name: a, port: 80, protocol: HTTP},
		{name: b, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: a}]}}]}`), &alone.Spec); err != nil {
		t.Fatal(err)
	}
	g.Gateways = []*gatewayv1.Gateway{gw, alone}
	return gateway.Evaluate(g)
}

// shares says where a rule's requests go.
func shares(a *route.Action) string {
	var out []string
	for _, s := range a.Shares {
		if s.Broken != "" {
			out = append(out, fmt.Sprintf("%d of %s", s.Weight, s.Broken))
			continue
		}
		out = append(out, fmt.Sprintf("%d of %s %s%v", s.Weight, s.Backend.Protocol, s.Backend.Name, s.Backend.Endpoints))
	}
	return strings.Join(out, ", ")
}

func TestCompileGateways(t *testing.T) {
	o := world(t)
	services := o.service
	o.service = func(ns, name string) *corev1.Service {
		if ns == gateway.ServiceNamespace && name == gateway.SharedService {
			return &corev1.Service{Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromString("http")}, {Port: 9000, TargetPort: intstr.FromInt32(10000)}}}}
		}
		if ns == gateway.ServiceNamespace && strings.HasPrefix(name, "gateway-shop-alone-") {
			return &corev1.Service{Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(10001)}, {Port: 443, TargetPort: intstr.FromInt32(10002)}}}}
		}
		return services(ns, name)
	}
	listeners, binds, faults := compileGateways(o, view(t, o))
	if len(faults) != 0 || len(listeners) != 5 {
		t.Fatal(faults, len(listeners))
	}
	slices.SortFunc(listeners, func(a, b route.Listener) int { return order.Compare(a.Service, b.Service) })
	alone := listeners[4].Service
	if diff := cmp.Diff([]route.Bind{
		{Local: 10000, Place: route.Place{Port: 9000}},
		{Local: 10001, Place: route.Place{Service: alone, Port: 80}}, {Local: 10002, Place: route.Place{Service: alone, Port: 443}, TLS: true},
	}, binds); diff != "" {
		t.Error(diff)
	}
	if l := listeners[2]; !l.TLS || l.Host != "a.example" || len(l.Certificates) != 1 {
		t.Errorf("%+v", l)
	}
	table := route.Merge(new(route.Table), listeners, binds)
	web := "3 of http shop/web:80[10.0.0.1:8080 10.0.0.2:8080], 0 of https shop/sticky:80[10.0.0.5:8443], 1 of Service shop/none does not exist"
	for _, tt := range []struct {
		port                uint16
		method, url, header string
		want                string
	}{
		{80, "GET", "web.example/a/b", "", web},
		{80, "POST", "web.example/exact", "", web},
		{80, "GET", "web.example/exact", "", ""},
		{9000, "GET", "web.example/a", "", web},
		{443, "GET", "web.example/a", "", ""},
		{80, "GET", "web.example/r/1?q=b", "1", "1 of h2c shop/web:81[10.0.0.1:9090 10.0.0.2:9090]"},
		{80, "GET", "web.example/r/1?q=bb", "1", ""},
		{80, "GET", "web.example/r/1x?q=b", "1", ""},
		{80, "GET", "web.example/r/1?q=b", "2", ""},
		{80, "GET", "web.example/moved/x", "", ""},
		{9000, "POST", "calls.example/shop.Cart/Add", "", "1 of h2c shop/web:80[10.0.0.1:8080 10.0.0.2:8080]"},
		{9000, "POST", "calls.example/shop.Cart/Remove", "", ""},
		{9000, "POST", "calls.example/shop.Stock/Any", "2", "1 of h2c shop/web:80[10.0.0.1:8080 10.0.0.2:8080]"},
		{9000, "POST", "calls.example/shop.Stock/Any", "", ""},
		{9000, "POST", "calls.example/any.Service/Check", "", "1 of https shop/sticky:80[10.0.0.5:8443]"},
		{9000, "POST", "calls.example/any.Service/CheckAll", "", ""},
		{9000, "POST", "calls.example/y/zoo", "", "1 of https shop/sticky:80[10.0.0.5:8443]"},
		{9000, "POST", "calls.example/yy/zoo", "", ""},
		{80, "POST", "calls.example/shop.Cart/Add", "", ""},
	} {
		target, query, _ := strings.Cut(tt.url, "?")
		host, path, _ := strings.Cut(target, "/")
		h := http.Header{}
		if tt.header != "" {
			h.Set("X-A", tt.header)
			h.Set("V", tt.header)
		}
		got := ""
		hit := table.Lookup(&route.Request{Place: route.Place{Port: tt.port}, Host: host, Method: tt.method, Path: "/" + path, Query: query, Header: h})
		if hit.Rule != nil {
			got = shares(hit.Rule.Do)
		}
		if got != tt.want {
			t.Errorf("%d %s %s %s: %q, want %q", tt.port, tt.method, tt.url, tt.header, got, tt.want)
		}
	}
	// Another Gateway has the same hosts and paths at its own address.
	for _, host := range []string{"web.example", "other.test"} {
		hit := table.Lookup(&route.Request{Place: table.PlaceOfPort(10001, false), Host: host, Method: "GET", Path: "/a/b/c"})
		if hit.Rule == nil || shares(hit.Rule.Do) != "1 of https shop/sticky:80[10.0.0.5:8443]" {
			t.Errorf("%s at another Gateway: %+v", host, hit)
		}
	}
	http := slices.Collect(func(yield func(*route.Action) bool) {
		for _, r := range listeners[0].Rules {
			yield(r.Rule.Do)
		}
	})
	a, b := *http[1], *http[2]
	a.Shares[0].Backend = nil
	want := route.Action{
		Rewrite: route.Rewrite{Host: "b.example", Path: &route.Path{Value: "/x"}}, Timeout: 60e9, Try: 500e6, NoResponseTimeout: true,
		Headers: route.Changes{Request: route.Edit{Set: []route.Field{{Name: "A", Value: "b"}}, Add: []route.Field{{Name: "C", Value: "d"}}, Remove: []string{"e"}}},
		Shares:  []route.Share{{Weight: 1, Headers: route.Changes{Response: route.Edit{Set: []route.Field{{Name: "F", Value: "g"}}}}}},
	}
	if diff := cmp.Diff(want, a); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(route.Action{Redirect: &route.Redirect{Scheme: "https", Port: 8443, Code: 301, Path: &route.Path{Value: "/to", Prefix: true}}}, b); diff != "" {
		t.Error(diff)
	}
	c := *http[3]
	var mirrors []string
	for _, m := range c.Mirrors {
		mirrors = append(mirrors, fmt.Sprintf("%d in %d to %s %s", m.Of, m.In, m.Backend.Protocol, m.Backend.Name))
	}
	if got := strings.Join(mirrors, ", "); got != "10 in 100 to h2c shop/web:81, 1 in 3 to http shop/web:80, 100 in 100 to https shop/sticky:80" {
		t.Errorf("mirrors: %s", got)
	}
	c.Mirrors = nil
	want = route.Action{
		CORS:  &route.CORS{Origins: []string{"https://*.example"}, Methods: []string{"PUT"}, Headers: []string{"X-A"}, Expose: []string{"X-B"}, Credentials: true, MaxAge: 5},
		Retry: &route.Retry{Codes: []int{502, 503}, Attempts: 3, Backoff: 100e6},
	}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Error(diff)
	}
}

// TestCertificateForBackends: of one route's Gateways each shows backends its own
// certificate, and one that has none shows none.
func TestCertificateForBackends(t *testing.T) {
	o := world(t)
	o.configMap = func(namespace, name string) *corev1.ConfigMap {
		pair, err := o.pair("shop", "a")
		if err != nil {
			t.Fatal(err)
		}
		return &corev1.ConfigMap{Data: map[string]string{gateway.AuthorityKey: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}))}}
	}
	g := gateway.Objects{
		Namespace: func(string) labels.Set { return nil }, Service: o.service, ConfigMap: o.configMap, Certificate: o.certificate,
		Classes: []*gatewayv1.GatewayClass{{ObjectMeta: metav1.ObjectMeta{Name: "clusterd"}, Spec: gatewayv1.GatewayClassSpec{ControllerName: gateway.Controller}}},
	}
	for name, shown := range map[string]string{"shows": "tls: {backend: {clientCertificateRef: {name: a}}}, ", "plain": "", "broken": "tls: {backend: {clientCertificateRef: {name: none}}}, "} {
		gw := &gatewayv1.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}}
		if err := yaml.Unmarshal([]byte("{gatewayClassName: clusterd, "+shown+"listeners: [{name: a, port: 80, protocol: HTTP}]}"), &gw.Spec); err != nil {
			t.Fatal(err)
		}
		g.Gateways = append(g.Gateways, gw)
	}
	r := &gatewayv1.HTTPRoute{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "r"}}
	p := &gatewayv1.BackendTLSPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "p"}}
	for text, into := range map[string]any{
		"{parentRefs: [{name: shows}, {name: plain}, {name: broken}], rules: [{backendRefs: [{name: sticky, port: 80}]}]}":                                         &r.Spec,
		"{targetRefs: [{group: '', kind: Service, name: sticky}], validation: {hostname: a.example, caCertificateRefs: [{group: '', kind: ConfigMap, name: ca}]}}": &p.Spec,
	} {
		if err := yaml.Unmarshal([]byte(text), into); err != nil {
			t.Fatal(err)
		}
	}
	g.HTTPRoutes, g.Policies = []*gatewayv1.HTTPRoute{r}, []*gatewayv1.BackendTLSPolicy{p}
	listeners, _, faults := compileGateways(o, gateway.Evaluate(g))
	if len(faults) > 0 || len(listeners) != 3 {
		t.Fatal(faults, len(listeners))
	}
	keys := map[string]bool{}
	for _, l := range listeners {
		if len(l.Rules) != 1 || len(l.Rules[0].Rule.Do.Shares) != 1 || l.Rules[0].Rule.Do.Shares[0].Backend == nil {
			t.Fatalf("%s: %+v", l.Service, l.Rules)
		}
		b := l.Rules[0].Rule.Do.Shares[0].Backend
		if shows := strings.HasPrefix(l.Service, "gateway-shop-shows-"); b.TLS == nil || (b.TLS.Certificate != nil) != shows {
			t.Errorf("%s: %+v", l.Service, b.TLS)
		}
		keys[b.TLS.Key] = true
	}
	if len(keys) != 2 {
		t.Errorf("%d kinds of connections to backends, want one for each certificate and one without", len(keys))
	}
}
