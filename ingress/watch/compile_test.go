package watch

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/gateway"
	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/ingress/kinds"
	"github.com/clusterd/clusterd/ingress/route"
	"github.com/clusterd/clusterd/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func class(name, controller string) *networkingv1.IngressClass {
	return &networkingv1.IngressClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: networkingv1.IngressClassSpec{Controller: controller}}
}

func ingress(name string, change func(*networkingv1.Ingress)) *networkingv1.Ingress {
	i := &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}, Spec: networkingv1.IngressSpec{IngressClassName: ptr.To("ours")}}
	change(i)
	return i
}

// backend is "service:port", or nil for "".
func backend(s string) *networkingv1.IngressBackend {
	if s == "" {
		return nil
	}
	service, port, _ := strings.Cut(s, ":")
	b := &networkingv1.IngressBackend{Service: &networkingv1.IngressServiceBackend{Name: service, Port: networkingv1.ServiceBackendPort{Name: port}}}
	if port == "80" {
		b.Service.Port = networkingv1.ServiceBackendPort{Number: 80}
	}
	return b
}

func rule(host string, paths ...networkingv1.HTTPIngressPath) networkingv1.IngressRule {
	r := networkingv1.IngressRule{Host: host}
	if len(paths) > 0 {
		r.HTTP = &networkingv1.HTTPIngressRuleValue{Paths: paths}
	}
	return r
}

func path(path string, kind networkingv1.PathType, to string) networkingv1.HTTPIngressPath {
	return networkingv1.HTTPIngressPath{Path: path, PathType: &kind, Backend: *backend(to)}
}

// world has Services web (ports http 80, grpc), named and external, endpoints of
// web, and a certificate for a.example.
func world(t *testing.T, all ...*networkingv1.Ingress) objects {
	service := func(change func(*corev1.ServiceSpec)) *corev1.Service {
		s := &corev1.Service{}
		change(&s.Spec)
		return s
	}
	services := map[string]*corev1.Service{
		"shop/web": service(func(s *corev1.ServiceSpec) {
			s.Ports = []corev1.ServicePort{{Name: "http", Port: 80}, {Name: "grpc", Port: 81, AppProtocol: ptr.To("kubernetes.io/h2c")}, {Name: "udp", Port: 82, Protocol: corev1.ProtocolUDP}}
		}),
		"shop/sticky": service(func(s *corev1.ServiceSpec) {
			s.Ports = []corev1.ServicePort{{Port: 80, AppProtocol: ptr.To("https")}}
			s.SessionAffinity = corev1.ServiceAffinityClientIP
		}),
		"shop/external": service(func(s *corev1.ServiceSpec) { s.Type, s.ExternalName = corev1.ServiceTypeExternalName, "a.invalid" }),
	}
	endpoint := func(addr string, ready, serving, terminating bool) discoveryv1.Endpoint {
		return discoveryv1.Endpoint{Addresses: []string{addr}, Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating}}
	}
	web := &discoveryv1.EndpointSlice{
		Ports: []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To(int32(8080))}, {Name: ptr.To("grpc"), Port: ptr.To(int32(9090))}},
		Endpoints: []discoveryv1.Endpoint{
			endpoint("10.0.0.2", true, true, false), endpoint("10.0.0.1", true, true, false), endpoint("10.0.0.1", true, true, false),
			endpoint("10.0.0.3", false, false, false), endpoint("10.0.0.4", false, true, true), endpoint("127.0.0.1", true, true, false), endpoint("169.254.1.1", true, true, false),
		},
	}
	ending := &discoveryv1.EndpointSlice{Ports: []discoveryv1.EndpointPort{{Port: ptr.To(int32(8443))}}, Endpoints: []discoveryv1.Endpoint{endpoint("10.0.0.5", false, true, true), endpoint("10.0.0.6", false, false, true)}}
	pair, _ := certificate(t, "a.example")
	return objects{
		ingresses: all,
		classes:   []*networkingv1.IngressClass{class("ours", names.IngressController), class("theirs", "example.com/other")},
		service:   func(ns, name string) *corev1.Service { return services[ns+"/"+name] },
		slices: func(ns, name string) []*discoveryv1.EndpointSlice {
			return map[string][]*discoveryv1.EndpointSlice{"shop/web": {web}, "shop/sticky": {ending}}[ns+"/"+name]
		},
		pair: func(ns, name string) (*tls.Certificate, error) {
			if ns+"/"+name != "shop/a" {
				return nil, fmt.Errorf("there is no Secret %q of type kubernetes.io/tls", name)
			}
			return pair, nil
		},
	}
}

// certificate makes one for a host, also as the data of a Secret.
func certificate(t *testing.T, host string) (*tls.Certificate, map[string][]byte) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{host}}, &x509.Certificate{SerialNumber: big.NewInt(1)}, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	data := map[string][]byte{
		corev1.TLSCertKey:       pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		corev1.TLSPrivateKeyKey: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}),
	}
	pair, err := tls.X509KeyPair(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey])
	if err != nil {
		t.Fatal(err)
	}
	return &pair, data
}

// text is a rule in one line.
func text(r route.Rule) string {
	s := fmt.Sprintf("%s%s %s %s%v", r.Host, r.Path, map[route.Match]string{route.Exact: "exact", route.Prefix: "prefix"}[r.Match], r.Backend.Protocol, r.Backend.Endpoints)
	for word, on := range map[string]bool{" default": r.Default, " redirect": r.Redirect, " sticky": r.Backend.Sticky} {
		if on {
			s += word
		}
	}
	if r.Backend.Fault != "" {
		s += " " + r.Backend.Fault
	}
	return s
}

func TestCompile(t *testing.T) {
	const exact, prefix, specific = networkingv1.PathTypeExact, networkingv1.PathTypePrefix, networkingv1.PathTypeImplementationSpecific
	tests := []struct {
		name   string
		change func(*networkingv1.Ingress)
		rules  []string
		certs  []string
		faults []string
	}{
		{"paths", func(i *networkingv1.Ingress) {
			i.Spec.Rules = []networkingv1.IngressRule{rule("A.example", path("/a", exact, "web:80"), path("/b", prefix, "web:http"), path("/c", specific, "web:grpc"))}
		}, []string{"a.example/a exact http[10.0.0.1:8080 10.0.0.2:8080]", "a.example/b prefix http[10.0.0.1:8080 10.0.0.2:8080]", "a.example/c prefix h2c[10.0.0.1:9090 10.0.0.2:9090]"}, nil, nil},
		{"ends and still serves", func(i *networkingv1.Ingress) {
			i.Spec.Rules = []networkingv1.IngressRule{rule("", path("/", prefix, "sticky:80"))}
		}, []string{"/ prefix https[10.0.0.5:8443] sticky"}, nil, nil},
		{"no rules, a default", func(i *networkingv1.Ingress) { i.Spec.DefaultBackend = backend("web:80") },
			[]string{" prefix http[10.0.0.1:8080 10.0.0.2:8080] default"}, nil, nil},
		{"a default beside rules, and a host without paths", func(i *networkingv1.Ingress) {
			i.Spec.DefaultBackend = backend("sticky:80")
			i.Spec.Rules = []networkingv1.IngressRule{rule("a.example", path("/x", prefix, "web:80")), rule("b.example")}
		}, []string{"a.example prefix https[10.0.0.5:8443] default sticky", "a.example/x prefix http[10.0.0.1:8080 10.0.0.2:8080]", "b.example prefix https[10.0.0.5:8443] default sticky", "b.example prefix https[10.0.0.5:8443] sticky"}, nil, nil},
		{"the older annotation", func(i *networkingv1.Ingress) {
			i.Spec.IngressClassName, i.Annotations = nil, map[string]string{"kubernetes.io/ingress.class": "ours"}
			i.Spec.DefaultBackend = backend("web:80")
		}, []string{" prefix http[10.0.0.1:8080 10.0.0.2:8080] default"}, nil, nil},
		{"another controller's", func(i *networkingv1.Ingress) {
			i.Spec.IngressClassName, i.Spec.DefaultBackend = ptr.To("theirs"), backend("web:80")
		}, nil, nil, nil},
		{"no class", func(i *networkingv1.Ingress) { i.Spec.IngressClassName, i.Spec.DefaultBackend = nil, backend("web:80") }, nil, nil, nil},
		{"TLS", func(i *networkingv1.Ingress) {
			i.Spec.TLS = []networkingv1.IngressTLS{{Hosts: []string{"a.example", "*.b.example"}, SecretName: "a"}}
			i.Spec.Rules = []networkingv1.IngressRule{rule("a.example", path("/", prefix, "sticky:80")), rule("x.b.example", path("/", prefix, "sticky:80")), rule("c.example", path("/", prefix, "sticky:80"))}
		}, []string{"a.example/ prefix https[10.0.0.5:8443] redirect sticky", "c.example/ prefix https[10.0.0.5:8443] sticky", "x.b.example/ prefix https[10.0.0.5:8443] redirect sticky"},
			[]string{"*.b.example", "a.example"}, []string{`the certificate in Secret "a" is not for host "*.b.example", which it is shown for`}},
		{"TLS for all, no redirect", func(i *networkingv1.Ingress) {
			i.Annotations = map[string]string{names.SSLRedirect: "false"}
			i.Spec.TLS = []networkingv1.IngressTLS{{SecretName: "a"}}
			i.Spec.Rules = []networkingv1.IngressRule{rule("a.example", path("/", prefix, "sticky:80"))}
		}, []string{"a.example/ prefix https[10.0.0.5:8443] sticky"}, []string{""}, nil},
		{"faults", func(i *networkingv1.Ingress) {
			i.Spec.TLS = []networkingv1.IngressTLS{{Hosts: []string{"b.example"}, SecretName: "none"}}
			resource := path("/r", prefix, "x:80")
			resource.Backend = networkingv1.IngressBackend{Resource: &corev1.TypedLocalObjectReference{Kind: "Bucket", Name: "b"}}
			i.Spec.Rules = []networkingv1.IngressRule{rule("a.example", path("/a", prefix, "none:80"), path("/b", prefix, "web:other"), path("/c", prefix, "external:80"), path("/d", prefix, "web:udp"), resource)}
		}, []string{
			"a.example/a prefix http[] Service shop/none does not exist",
			"a.example/b prefix http[] Service shop/web has no port other",
			"a.example/c prefix http[] Service shop/external is of type ExternalName, which is not served",
			"a.example/d prefix http[] port udp of Service shop/web is of protocol UDP, not TCP",
			"a.example/r prefix [] Ingress shop/i names a backend that is no Service, which is not served",
		}, nil, []string{
			"Service shop/external is of type ExternalName, which is not served", "Service shop/none does not exist", "Service shop/web has no port other",
			"a backend that is a resource, not a Service, is not served", "port udp of Service shop/web is of protocol UDP, not TCP",
			`there is no Secret "none" of type kubernetes.io/tls; clients are shown a certificate that no host has`,
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			rules, certs, faults := compile(world(t, ingress("i", tt.change)))
			var got, shown []string
			for _, r := range rules {
				got = append(got, strings.ReplaceAll(text(r), " sticky redirect", " redirect sticky"))
			}
			for i, g := range got {
				got[i] = strings.ReplaceAll(g, " sticky default", " default sticky")
			}
			slices.Sort(got)
			for _, c := range certs {
				shown = append(shown, c.Host)
			}
			slices.Sort(shown)
			for i, f := range faults {
				faults[i] = strings.TrimPrefix(f, "Ingress shop/i: ")
			}
			if diff := cmp.Diff([][]string{tt.rules, tt.certs, tt.faults}, [][]string{got, shown, faults}); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestTheOldestHasTheCertificate: a later Ingress cannot take a host's.
func TestTheOldestHasTheCertificate(t *testing.T) {
	withTLS := func(name string, age int64) *networkingv1.Ingress {
		return ingress(name, func(i *networkingv1.Ingress) {
			i.CreationTimestamp = metav1.NewTime(time.Unix(age, 0))
			i.Spec.TLS = []networkingv1.IngressTLS{{Hosts: []string{"a.example"}, SecretName: name}}
		})
	}
	o := world(t, withTLS("young", 2), withTLS("old", 1))
	pairs := map[string]*tls.Certificate{"young": {}, "old": {}}
	o.pair = func(_, name string) (*tls.Certificate, error) { return pairs[name], nil }
	_, certs, _ := compile(o)
	table, _ := route.Build(nil, certs)
	if table.Certificate("a.example") != pairs["old"] {
		t.Error("the younger one's is shown")
	}
}

// TestRun: tables follow the objects, and a Secret of another type is not read.
func TestRun(t *testing.T) {
	_, data := certificate(t, "a.example")
	client := fake.NewClientset(class("ours", names.IngressController),
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "a"}, Type: corev1.SecretTypeTLS, Data: data},
		ingress("i", func(i *networkingv1.Ingress) {
			i.Spec.TLS = []networkingv1.IngressTLS{{Hosts: []string{"a.example"}, SecretName: "a"}}
			i.Spec.Rules = []networkingv1.IngressRule{rule("a.example", path("/", networkingv1.PathTypePrefix, "web:80"))}
		}))
	ctx, stop := context.WithCancel(t.Context())
	tables, ended := make(chan *route.Table, 100), make(chan error, 1)
	custom := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), listKinds)
	of := func(resource string) schema.GroupVersionResource {
		return schema.GroupVersionResource{Group: gateway.Group, Version: "v1", Resource: resource}
	}
	for _, u := range customObjects(t) {
		if _, err := custom.Resource(of(strings.ToLower(u.GetKind())+map[bool]string{true: "es", false: "s"}[u.GetKind() == "GatewayClass"])).Namespace(u.GetNamespace()).Create(ctx, u, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	go func() {
		ended <- Run(ctx, Config{Client: client, Kinds: kinds.New(custom, client.Discovery()), Set: func(t *route.Table) { tables <- t }})
	}()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	await := func(what string, ok func(*route.Table) error) {
		t.Helper()
		err := errors.New("no table")
		for timeout := time.After(time.Minute); err != nil; {
			select {
			case table := <-tables:
				err = ok(table)
			case <-timeout:
				t.Fatalf("%s: %v", what, err)
			}
		}
	}
	await("no Service", func(table *route.Table) error {
		if r := table.Find("a.example", "/"); r == nil || r.Backend.Fault != "Service shop/web does not exist" || table.Certificate("a.example") == nil {
			return fmt.Errorf("rule %+v, certificate %v", r, table.Certificate("a.example"))
		}
		return nil
	})
	if _, err := client.CoreV1().Services("shop").Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := client.DiscoveryV1().EndpointSlices("shop").Create(ctx, &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		Ports:      []discoveryv1.EndpointPort{{Port: ptr.To(int32(8080))}}, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	await("an endpoint", func(table *route.Table) error {
		if r := table.Find("a.example", "/"); r == nil || len(r.Backend.Endpoints) != 1 {
			return fmt.Errorf("rule %+v", r)
		}
		return nil
	})
	client.Resources = []*metav1.APIResourceList{{GroupVersion: "gateway.networking.k8s.io/v1", APIResources: []metav1.APIResource{
		{Name: "gatewayclasses"}, {Name: "gateways"}, {Name: "httproutes"},
	}}}
	await("the kinds of Gateways are served, and one route that cannot be read hinders no other", func(table *route.Table) error {
		h := table.Lookup(&route.Request{Place: route.Place{Port: 80}, Host: "g.example", Path: "/"})
		if h.Rule == nil || len(h.Rule.Do.Shares[0].Backend.Endpoints) != 1 {
			return fmt.Errorf("%+v", h)
		}
		return nil
	})
	if err := custom.Resource(of("gateways")).Namespace("shop").Delete(ctx, "g", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := client.NetworkingV1().Ingresses("shop").Delete(ctx, "i", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	await("no Ingress", func(table *route.Table) error {
		if table.Len() != 0 || table.Certificate("a.example") != nil {
			return fmt.Errorf("%d rules", table.Len())
		}
		return nil
	})
}
