package gateway

import (
	"encoding/pem"
	"errors"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"
)

// authority is a certificate in PEM.
var authority = func() string {
	s := httptest.NewUnstartedServer(nil)
	s.StartTLS()
	defer s.Close()
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}))
}()

// read makes objects of YAML, the n-th of them n minutes old less than the first.
func read(t testing.TB, text string) Objects {
	t.Helper()
	o := Objects{
		Classes: []*gatewayv1.GatewayClass{{ObjectMeta: metav1.ObjectMeta{Name: Class}, Spec: gatewayv1.GatewayClassSpec{ControllerName: Controller}}},
		Namespace: func(name string) labels.Set {
			return map[string]labels.Set{"shop": {"kind": "shop"}, "infra": {"kind": "infra"}}[name]
		},
		Service: func(namespace, name string) *corev1.Service {
			s := &corev1.Service{Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{
				{Port: 80}, {Port: 53, Protocol: corev1.ProtocolUDP}, {Port: 81, AppProtocol: ptr.To("amqp")}, {Name: "h2c", Port: 82, AppProtocol: ptr.To("kubernetes.io/h2c")},
			}}}
			switch name {
			case "web":
				return s
			case "outside":
				s.Spec.Type = corev1.ServiceTypeExternalName
				return s
			}
			return nil
		},
		ConfigMap: func(namespace, name string) *corev1.ConfigMap {
			switch name {
			case "ca":
				return &corev1.ConfigMap{Data: map[string]string{AuthorityKey: authority}}
			case "empty":
				return &corev1.ConfigMap{}
			}
			return nil
		},
		Certificate: func(namespace, name string) error {
			if name == "cert" {
				return nil
			}
			return errors.New("there is none")
		},
	}
	for i, doc := range strings.Split(text, "\n---\n") {
		var kind struct{ Kind string }
		if err := yaml.Unmarshal([]byte(doc), &kind); err != nil {
			t.Fatal(err)
		}
		into := func(obj metav1.Object) {
			if err := yaml.UnmarshalStrict([]byte(doc), obj); err != nil {
				t.Fatalf("%s: %v", doc, err)
			}
			obj.SetCreationTimestamp(metav1.NewTime(time.Unix(int64(i*60), 0)))
			if obj.GetNamespace() == "" {
				obj.SetNamespace("shop")
			}
		}
		switch kind.Kind {
		case "Gateway":
			o.Gateways = append(o.Gateways, new(gatewayv1.Gateway))
			into(o.Gateways[len(o.Gateways)-1])
		case HTTPRoute:
			o.HTTPRoutes = append(o.HTTPRoutes, new(gatewayv1.HTTPRoute))
			into(o.HTTPRoutes[len(o.HTTPRoutes)-1])
		case GRPCRoute:
			o.GRPCRoutes = append(o.GRPCRoutes, new(gatewayv1.GRPCRoute))
			into(o.GRPCRoutes[len(o.GRPCRoutes)-1])
		case "ReferenceGrant":
			o.Grants = append(o.Grants, new(gatewayv1.ReferenceGrant))
			into(o.Grants[len(o.Grants)-1])
		case "BackendTLSPolicy":
			o.Policies = append(o.Policies, new(gatewayv1.BackendTLSPolicy))
			into(o.Policies[len(o.Policies)-1])
		case "":
		default:
			t.Fatalf("kind %q", kind.Kind)
		}
	}
	return o
}

// said are the conditions in short: Type=Reason, with a ! before those that are
// False.
func said(list []metav1.Condition) string {
	var out []string
	for _, c := range list {
		sign := ""
		if c.Status != metav1.ConditionTrue {
			sign = "!"
		}
		out = append(out, fmt.Sprintf("%s%s=%s", sign, c.Type, c.Reason))
	}
	return strings.Join(out, " ")
}

const fine = "!Conflicted=NoConflicts Accepted=Accepted ResolvedRefs=ResolvedRefs Programmed=Programmed"

// TestListeners: what the conditions of Gateways and their listeners say.
func TestListeners(t *testing.T) {
	address := []gatewayv1.GatewayStatusAddress{{Value: "192.0.2.1"}}
	for _, tt := range []struct {
		name, text string
		addresses  []gatewayv1.GatewayStatusAddress
		want       []string // the Gateway's, then its listeners'
	}{
		{"plain and secure", `
listeners:
- {name: a, port: 80, protocol: HTTP}
- {name: b, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: cert}]}}`, address,
			[]string{"Accepted=Accepted Programmed=Programmed", fine, fine}},
		{"no address yet", `
listeners: [{name: a, port: 80, protocol: HTTP}]`, nil,
			[]string{"Accepted=Accepted !Programmed=AddressNotAssigned", "!Conflicted=NoConflicts Accepted=Accepted ResolvedRefs=ResolvedRefs !Programmed=Pending"}},
		{"one of two is not served", `
listeners: [{name: a, port: 80, protocol: HTTP}, {name: b, port: 90, protocol: TCP}]`, address,
			[]string{"Accepted=ListenersNotValid Programmed=Programmed", fine, "!Conflicted=NoConflicts !Accepted=UnsupportedProtocol ResolvedRefs=ResolvedRefs !Programmed=Invalid"}},
		{"none is served", `
listeners: [{name: b, port: 90, protocol: UDP}]`, address,
			[]string{"!Accepted=ListenersNotValid !Programmed=Invalid", "!Conflicted=NoConflicts !Accepted=UnsupportedProtocol ResolvedRefs=ResolvedRefs !Programmed=Invalid"}},
		{"no certificate", `
listeners: [{name: a, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: none}]}}]`, address,
			[]string{"Accepted=Accepted !Programmed=Invalid", "!Conflicted=NoConflicts Accepted=Accepted !ResolvedRefs=InvalidCertificateRef !Programmed=Invalid"}},
		{"one certificate of two", `
listeners: [{name: a, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: none}, {name: cert}]}}]`, address,
			[]string{"Accepted=Accepted Programmed=Programmed", "!Conflicted=NoConflicts Accepted=Accepted !ResolvedRefs=InvalidCertificateRef Programmed=Programmed"}},
		{"a certificate that is no Secret", `
listeners: [{name: a, port: 443, protocol: HTTPS, tls: {certificateRefs: [{kind: ConfigMap, name: cert}]}}]`, address,
			[]string{"Accepted=Accepted !Programmed=Invalid", "!Conflicted=NoConflicts Accepted=Accepted !ResolvedRefs=InvalidCertificateRef !Programmed=Invalid"}},
		{"another namespace's certificate", `
listeners: [{name: a, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: cert, namespace: closed}]}}]`, address,
			[]string{"Accepted=Accepted !Programmed=Invalid", "!Conflicted=NoConflicts Accepted=Accepted !ResolvedRefs=RefNotPermitted !Programmed=Invalid"}},
		{"another namespace's certificate, granted", `
listeners: [{name: a, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: cert, namespace: open}]}}]`, address,
			[]string{"Accepted=Accepted Programmed=Programmed", fine}},
		{"passthrough", `
listeners: [{name: a, port: 443, protocol: HTTPS, tls: {mode: Passthrough, certificateRefs: [{name: cert}]}}]`, address,
			[]string{"!Accepted=ListenersNotValid !Programmed=Invalid", "!Conflicted=NoConflicts !Accepted=UnsupportedValue ResolvedRefs=ResolvedRefs !Programmed=Invalid"}},
		{"a kind of routes that is not served", `
listeners: [{name: a, port: 80, protocol: HTTP, allowedRoutes: {kinds: [{kind: TCPRoute}, {kind: HTTPRoute}]}}]`, address,
			[]string{"Accepted=Accepted Programmed=Programmed", "!Conflicted=NoConflicts Accepted=Accepted !ResolvedRefs=InvalidRouteKinds Programmed=Programmed"}},
		{"another protocol at 80", `
listeners: [{name: a, port: 80, protocol: HTTPS, tls: {certificateRefs: [{name: cert}]}}]`, address,
			[]string{"Accepted=Accepted Programmed=Programmed", fine}},
		{"protocols conflict", `
listeners: [{name: a, port: 90, protocol: HTTP, hostname: a.example}, {name: b, port: 90, protocol: HTTPS, tls: {certificateRefs: [{name: cert}]}}]`, address,
			[]string{"!Accepted=ListenersNotValid !Programmed=Invalid",
				"Conflicted=ProtocolConflict !Accepted=ProtocolConflict ResolvedRefs=ResolvedRefs !Programmed=Invalid", "Conflicted=ProtocolConflict !Accepted=ProtocolConflict ResolvedRefs=ResolvedRefs !Programmed=Invalid"}},
		{"hostnames conflict", `
listeners: [{name: a, port: 90, protocol: HTTP}, {name: b, port: 90, protocol: HTTP}, {name: c, port: 90, protocol: HTTP, hostname: c.example}]`, address,
			[]string{"Accepted=ListenersNotValid Programmed=Programmed",
				"Conflicted=HostnameConflict !Accepted=HostnameConflict ResolvedRefs=ResolvedRefs !Programmed=Invalid", "Conflicted=HostnameConflict !Accepted=HostnameConflict ResolvedRefs=ResolvedRefs !Programmed=Invalid", fine}},
		{"an address is asked for", `
addresses: [{value: 192.0.2.1}]
listeners: [{name: a, port: 80, protocol: HTTP}]`, address, []string{"Accepted=Accepted Programmed=Programmed", fine}},
		{"any address is asked for", `
addresses: [{type: IPAddress}]
listeners: [{name: a, port: 80, protocol: HTTP}]`, address, []string{"Accepted=Accepted Programmed=Programmed", fine}},
		{"an address that it has not is asked for", `
addresses: [{value: 192.0.2.7}]
listeners: [{name: a, port: 80, protocol: HTTP}]`, address, []string{"Accepted=Accepted !Programmed=AddressNotUsable", fine}},
		{"two addresses are asked for", `
addresses: [{value: 192.0.2.1}, {value: 192.0.2.7}]
listeners: [{name: a, port: 80, protocol: HTTP}]`, address, []string{"Accepted=Accepted !Programmed=AddressNotUsable", fine}},
		{"a hostname is asked for", `
addresses: [{type: Hostname, value: a.example}]
listeners: [{name: a, port: 80, protocol: HTTP}]`, address,
			[]string{"!Accepted=UnsupportedAddress !Programmed=Invalid", "!Conflicted=NoConflicts Accepted=Accepted ResolvedRefs=ResolvedRefs !Programmed=Invalid"}},
		{"clients' certificates", `
tls: {frontend: {default: {validation: {caCertificateRefs: [{group: "", kind: ConfigMap, name: none}]}}, perPort: [
  {port: 443, tls: {validation: {caCertificateRefs: [{group: "", kind: ConfigMap, name: ca}]}}}, {port: 444, tls: {validation: {caCertificateRefs: [{group: "", kind: Secret, name: ca}]}}},
  {port: 445, tls: {validation: {caCertificateRefs: [{group: "", kind: ConfigMap, name: ca, namespace: closed}]}}}, {port: 446, tls: {}},
  {port: 447, tls: {validation: {caCertificateRefs: [{group: "", kind: ConfigMap, name: empty}, {group: "", kind: ConfigMap, name: ca}]}}}]}}
listeners:
- {name: plain, port: 80, protocol: HTTP}
- {name: a, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: cert}]}}
- {name: b, port: 444, protocol: HTTPS, tls: {certificateRefs: [{name: cert}]}}
- {name: c, port: 445, protocol: HTTPS, tls: {certificateRefs: [{name: cert}]}}
- {name: d, port: 446, protocol: HTTPS, tls: {certificateRefs: [{name: cert}]}}
- {name: e, port: 447, protocol: HTTPS, tls: {certificateRefs: [{name: cert}]}}
- {name: f, port: 448, protocol: HTTPS, tls: {certificateRefs: [{name: cert}]}}`, address,
			[]string{"Accepted=ListenersNotValid Programmed=Programmed", fine, fine,
				"!Conflicted=NoConflicts !Accepted=NoValidCACertificate !ResolvedRefs=InvalidCACertificateKind !Programmed=Invalid",
				"!Conflicted=NoConflicts !Accepted=NoValidCACertificate !ResolvedRefs=RefNotPermitted !Programmed=Invalid", fine,
				"!Conflicted=NoConflicts Accepted=Accepted !ResolvedRefs=InvalidCACertificateRef Programmed=Programmed",
				"!Conflicted=NoConflicts !Accepted=NoValidCACertificate !ResolvedRefs=InvalidCACertificateRef !Programmed=Invalid"}},
		{"clients without a valid certificate", `
tls: {frontend: {default: {validation: {mode: AllowInsecureFallback, caCertificateRefs: [{group: "", kind: ConfigMap, name: ca}]}}}}
listeners: [{name: a, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: cert}]}}]`, address,
			[]string{"Accepted=Accepted Programmed=Programmed InsecureFrontendValidationMode=ConfigurationChanged", fine}},
		{"a certificate for backends", `
tls: {backend: {clientCertificateRef: {name: cert}}}
listeners: [{name: a, port: 80, protocol: HTTP}]`, address, []string{"Accepted=Accepted Programmed=Programmed ResolvedRefs=ResolvedRefs", fine}},
		{"one of another namespace that lets it", `
tls: {backend: {clientCertificateRef: {name: cert, namespace: open}}}
listeners: [{name: a, port: 80, protocol: HTTP}]`, address, []string{"Accepted=Accepted Programmed=Programmed ResolvedRefs=ResolvedRefs", fine}},
		{"one of another namespace that does not", `
tls: {backend: {clientCertificateRef: {name: cert, namespace: closed}}}
listeners: [{name: a, port: 80, protocol: HTTP}]`, address, []string{"Accepted=Accepted Programmed=Programmed !ResolvedRefs=RefNotPermitted", fine}},
		{"none for backends where one is named", `
tls: {backend: {clientCertificateRef: {name: none}}}
listeners: [{name: a, port: 80, protocol: HTTP}]`, address, []string{"Accepted=Accepted Programmed=Programmed !ResolvedRefs=InvalidClientCertificateRef", fine}},
		{"something else for backends", `
tls: {backend: {clientCertificateRef: {kind: ConfigMap, name: cert}}}
listeners: [{name: a, port: 80, protocol: HTTP}]`, address, []string{"Accepted=Accepted Programmed=Programmed !ResolvedRefs=InvalidClientCertificateRef", fine}},
	} {
		o := read(t, "kind: Gateway\nmetadata: {name: g}\nspec:\n  gatewayClassName: clusterd\n  "+strings.ReplaceAll(strings.TrimSpace(tt.text), "\n", "\n  ")+`
---
kind: ReferenceGrant
metadata: {name: g, namespace: open}
spec: {from: [{group: gateway.networking.k8s.io, kind: Gateway, namespace: shop}], to: [{group: "", kind: Secret, name: cert}]}`)
		status := Evaluate(o).Gateways[0].Status(tt.addresses, metav1.Now())
		got := []string{said(status.Conditions)}
		for _, l := range status.Listeners {
			got = append(got, said(l.Conditions))
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s: %s", tt.name, diff)
		}
	}
}

// TestSharedClients: where others have listeners at the same port, a Gateway cannot
// say whom it is for.
func TestSharedClients(t *testing.T) {
	g := Evaluate(read(t, `kind: Gateway
metadata: {name: g, annotations: {clusterd.local/shared-address: "true"}}
spec:
  gatewayClassName: clusterd
  tls: {frontend: {default: {validation: {caCertificateRefs: [{group: "", kind: ConfigMap, name: ca}]}}}}
  listeners: [{name: a, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: cert}]}}]`)).Gateways[0]
	if g.Refused.Reason != "UnsupportedValue" || g.Listeners[0].Serves() {
		t.Errorf("%+v", g.Refused)
	}
}

// TestPortsAreShared: of two Gateways the older has the port, and there is a most
// that all have together.
func TestPortsAreShared(t *testing.T) {
	var text strings.Builder
	for i, protocol := range []string{"HTTP", "HTTPS"} {
		fmt.Fprintf(&text, "kind: Gateway\nmetadata: {name: g%d, annotations: {clusterd.local/shared-address: \"true\"}}\nspec: {gatewayClassName: clusterd, listeners: [{name: a, port: 90, protocol: %s, tls: %s}]}\n---\n", i, protocol, []string{"null", "{certificateRefs: [{name: cert}]}"}[i])
	}
	fmt.Fprint(&text, "kind: Gateway\nmetadata: {name: many, annotations: {clusterd.local/shared-address: \"true\"}}\nspec: {gatewayClassName: clusterd, listeners: [")
	for i := range MaxPorts {
		fmt.Fprintf(&text, "{name: l%d, port: %d, protocol: HTTP},", i, 1000+i)
	}
	fmt.Fprint(&text, "{name: z, port: 90, protocol: HTTP, hostname: z.example}]}")
	v := Evaluate(read(t, text.String()))
	if r := v.Gateways[1].Listeners[0].Refused.Reason; r != "PortUnavailable" || !v.Gateways[0].Listeners[0].Serves() {
		t.Errorf("the younger of two Gateways: %q", r)
	}
	many := v.Gateways[2].Listeners
	if r := many[MaxPorts-1].Refused.Reason; r != "PortUnavailable" || !many[MaxPorts-2].Serves() || !many[MaxPorts].Serves() {
		t.Errorf("one port too many: %q", r)
	}
	if got := v.Services(); len(got) != 1 || len(got[SharedService].Ports) != MaxPorts {
		t.Errorf("%v", got)
	}
}

// TestOwnAddresses: a Gateway has a Service of its own, and no port of it is another
// Gateway's, unless both ask to share.
func TestOwnAddresses(t *testing.T) {
	var text strings.Builder
	for _, g := range []string{"{name: a}", "{name: a.b, namespace: x}", "{name: b, namespace: x-a}", "{name: s, annotations: {clusterd.local/shared-address: \"true\"}}",
		"{name: " + strings.Repeat("long.", 50) + "}", "{name: " + strings.Repeat("long.", 49) + "lang}"} {
		fmt.Fprintf(&text, "kind: Gateway\nmetadata: %s\nspec: {gatewayClassName: clusterd, listeners: [{name: a, port: 443, protocol: HTTP}, {name: b, port: 90, protocol: HTTP}]}\n---\n", g)
	}
	v := Evaluate(read(t, text.String()))
	ports := v.Services()
	if len(ports) != len(v.Gateways) {
		t.Errorf("%d Gateways have %d Services", len(v.Gateways), len(ports))
	}
	for _, g := range v.Gateways {
		if bad := validation.IsDNS1035Label(g.Service); len(bad) > 0 {
			t.Error(g.Service, bad)
		}
		want, serves := "[90 443]", true
		if g.Name == "s" {
			want, serves = "[90]", false // 443 is the Ingresses', for HTTPS
		}
		if got := fmt.Sprint(ports[g.Service].Ports); got != want || g.Listeners[0].Serves() != serves || g.Shared() == serves {
			t.Errorf("%s: %s, 443 is served: %t", g.Service, got, g.Listeners[0].Serves())
		}
	}
}

const gateways = `
kind: Gateway
metadata: {name: g, namespace: infra}
spec:
  gatewayClassName: clusterd
  listeners:
  - {name: all, port: 80, protocol: HTTP, hostname: "*.example", allowedRoutes: {namespaces: {from: All}}}
  - {name: some, port: 8080, protocol: HTTP, allowedRoutes: {namespaces: {from: Selector, selector: {matchLabels: {kind: shop}}}, kinds: [{kind: HTTPRoute}]}}
  - {name: same, port: 8081, protocol: HTTP}
---
kind: Gateway
metadata: {name: other, namespace: infra}
spec: {gatewayClassName: istio, listeners: [{name: all, port: 80, protocol: HTTP, allowedRoutes: {namespaces: {from: All}}}]}
---
kind: ReferenceGrant
metadata: {name: g, namespace: open}
spec: {from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: shop}], to: [{group: "", kind: Service}]}
---
`

// TestRoutes: where routes are attached, and what is said of them.
func TestRoutes(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		parent     string // the conditions of the one parent; "": there is none of ours
		attached   string // listeners and hosts
	}{
		{"by hostname and namespace", "kind: HTTPRoute\nspec: {parentRefs: [{name: g, namespace: infra}], hostnames: [a.example, b.test], rules: [{backendRefs: [{name: web, port: 80}]}]}",
			"Accepted=Accepted ResolvedRefs=ResolvedRefs", "all[a.example] some[a.example b.test]"},
		{"by section", "kind: HTTPRoute\nspec: {parentRefs: [{name: g, namespace: infra, sectionName: all}], rules: [{backendRefs: [{name: web, port: 80}]}]}",
			"Accepted=Accepted ResolvedRefs=ResolvedRefs", "all[*.example]"},
		{"by port", "kind: HTTPRoute\nspec: {parentRefs: [{name: g, namespace: infra, port: 8080}]}", "Accepted=Accepted ResolvedRefs=ResolvedRefs", "some[]"},
		{"no such section", "kind: HTTPRoute\nspec: {parentRefs: [{name: g, namespace: infra, sectionName: none}]}", "!Accepted=NoMatchingParent ResolvedRefs=ResolvedRefs", ""},
		{"no such port", "kind: HTTPRoute\nspec: {parentRefs: [{name: g, namespace: infra, port: 1}]}", "!Accepted=NoMatchingParent ResolvedRefs=ResolvedRefs", ""},
		{"another namespace", "kind: HTTPRoute\nspec: {parentRefs: [{name: g, namespace: infra, sectionName: same}]}", "!Accepted=NotAllowedByListeners ResolvedRefs=ResolvedRefs", ""},
		{"another kind", "kind: GRPCRoute\nspec: {parentRefs: [{name: g, namespace: infra, sectionName: some}]}", "!Accepted=NotAllowedByListeners ResolvedRefs=ResolvedRefs", ""},
		{"the same namespace", "kind: HTTPRoute\nmetadata: {namespace: infra}\nspec: {parentRefs: [{name: g, sectionName: same}]}", "Accepted=Accepted ResolvedRefs=ResolvedRefs", "same[]"},
		{"no hostname in common", "kind: HTTPRoute\nspec: {parentRefs: [{name: g, namespace: infra, sectionName: all}], hostnames: [example, a.test]}", "!Accepted=NoMatchingListenerHostname ResolvedRefs=ResolvedRefs", ""},
		{"wildcards", "kind: HTTPRoute\nspec: {parentRefs: [{name: g, namespace: infra, sectionName: all}], hostnames: ['*.a.example', '*.test', a.b.example]}", "Accepted=Accepted ResolvedRefs=ResolvedRefs", "all[*.a.example a.b.example]"},
		{"another controller's", "kind: HTTPRoute\nspec: {parentRefs: [{name: other, namespace: infra}]}", "", ""},
		{"no such Gateway", "kind: HTTPRoute\nspec: {parentRefs: [{name: none}]}", "", ""},
		{"a Service as parent", "kind: HTTPRoute\nspec: {parentRefs: [{kind: Service, group: '', name: g, namespace: infra}]}", "", ""},
		{"no such Service", "kind: HTTPRoute\nspec: {parentRefs: [{name: g, namespace: infra, sectionName: some}], rules: [{backendRefs: [{name: web, port: 80}, {name: none, port: 80}]}]}", "Accepted=Accepted !ResolvedRefs=BackendNotFound", "some[]"},
		{"no such port of it", "kind: GRPCRoute\nspec: {parentRefs: [{name: g, namespace: infra, sectionName: all}], rules: [{backendRefs: [{name: web, port: 53}]}]}", "Accepted=Accepted !ResolvedRefs=BackendNotFound", "all[*.example]"},
		{"not granted", "kind: HTTPRoute\nspec: {parentRefs: [{name: g, namespace: infra, sectionName: some}], rules: [{backendRefs: [{name: web, namespace: closed, port: 80}]}]}", "Accepted=Accepted !ResolvedRefs=RefNotPermitted", "some[]"},
		{"granted", "kind: HTTPRoute\nspec: {parentRefs: [{name: g, namespace: infra, sectionName: some}], rules: [{backendRefs: [{name: web, namespace: open, port: 80}]}]}", "Accepted=Accepted ResolvedRefs=ResolvedRefs", "some[]"},
		{"granted to another kind", "kind: GRPCRoute\nspec: {parentRefs: [{name: g, namespace: infra, sectionName: all}], rules: [{backendRefs: [{name: web, namespace: open, port: 80}]}]}", "Accepted=Accepted !ResolvedRefs=RefNotPermitted", "all[*.example]"},
		{"no Service", "kind: HTTPRoute\nspec: {parentRefs: [{name: g, namespace: infra, sectionName: some}], rules: [{backendRefs: [{kind: Bucket, group: x.example, name: web, port: 80}]}]}", "Accepted=Accepted !ResolvedRefs=InvalidKind", "some[]"},
		{"a protocol that is not spoken", "kind: HTTPRoute\nspec: {parentRefs: [{name: g, namespace: infra, sectionName: some}], rules: [{backendRefs: [{name: web, port: 81}]}]}", "Accepted=Accepted !ResolvedRefs=UnsupportedProtocol", "some[]"},
		{"a name outside", "kind: HTTPRoute\nspec: {parentRefs: [{name: g, namespace: infra, sectionName: some}], rules: [{backendRefs: [{name: outside, port: 80}]}]}", "Accepted=Accepted !ResolvedRefs=UnsupportedValue", "some[]"},
	} {
		if !strings.Contains(tt.text, "metadata:") {
			tt.text = strings.Replace(tt.text, "\n", "\nmetadata: {name: r}\n", 1)
		}
		v := Evaluate(read(t, gateways+tt.text))
		if tt.parent == "" {
			if len(v.Routes) != 0 {
				t.Errorf("%s: is taken for ours", tt.name)
			}
			continue
		}
		if len(v.Routes) != 1 {
			t.Errorf("%s: %d routes", tt.name, len(v.Routes))
			continue
		}
		status := v.Routes[0].ParentStatuses(metav1.Now())
		if len(status) != 1 || status[0].ControllerName != Controller || said(status[0].Conditions) != tt.parent {
			t.Errorf("%s: %s, want %s", tt.name, said(status[0].Conditions), tt.parent)
		}
		var at []string
		for _, a := range v.Routes[0].Parents[0].Attached {
			at = append(at, fmt.Sprint(a.Listener.Name, a.Hosts))
		}
		if got := strings.Join(at, " "); got != tt.attached {
			t.Errorf("%s: attached to %q, want %q", tt.name, got, tt.attached)
		}
		for _, l := range v.Gateways[0].Listeners {
			if want := int32(strings.Count(" "+tt.attached, " "+string(l.Name)+"[")); l.Attached != want {
				t.Errorf("%s: listener %s counts %d", tt.name, l.Name, l.Attached)
			}
		}
	}
}

// TestUnsupported: what is not served is refused with its name, never left out.
func TestUnsupported(t *testing.T) {
	long := strings.Repeat("a", maxPattern+1)
	for rule, want := range map[string]string{
		`HTTPRoute {filters: [{type: RequestMirror, requestMirror: {backendRef: {name: web, port: 80}, fraction: {numerator: 3, denominator: 2}}}]}`: `3 of 2 requests cannot be mirrored`,
		`HTTPRoute {filters: [{type: RequestMirror, requestMirror: {backendRef: {name: web, port: 80}, percent: 1, fraction: {numerator: 3}}}]}`:     `percent and fraction do not go together`,
		`HTTPRoute {backendRefs: [{name: web, port: 80, filters: [{type: RequestMirror, requestMirror: {backendRef: {name: web, port: 80}}}]}]}`:     `RequestMirror is not served for one backend`,
		`HTTPRoute {filters: [{type: CORS, cors: {allowOrigins: ["https://a.example", "ftp://b.example"]}}]}`:                                        `cors.allowOrigins[1]: "ftp://b.example" is not served`,
		`HTTPRoute {filters: [{type: CORS, cors: {allowOrigins: ["https://a.example/x"]}}]}`:                                                         `cors.allowOrigins[0]`,
		`HTTPRoute {filters: [{type: CORS, cors: {allowOrigins: ["*", "https://a.example"]}}]}`:                                                      `cors.allowOrigins[0]`,
		`HTTPRoute {filters: [{type: CORS, cors: {allowMethods: ["GET, PUT"]}}]}`:                                                                    `cors.allowMethods[0]: "GET, PUT" is no method`,
		`HTTPRoute {filters: [{type: CORS, cors: {exposeHeaders: ["a\nb"]}}]}`:                                                                       `cors.exposeHeaders[0]`,
		`HTTPRoute {filters: [{type: ExtensionRef, extensionRef: {group: x, kind: y, name: z}}]}`:                                                    `ExtensionRef is not served`,
		`HTTPRoute {filters: [{type: Next}]}`:                                                                                 `Next is not served`,
		`HTTPRoute {retry: {attempts: 11}}`:                                                                                   `retry.attempts: 11 is not served; 1 to 10 are`,
		`HTTPRoute {retry: {codes: [500, 200]}}`:                                                                              `retry.codes[1]: 200 is no status of an error`,
		`HTTPRoute {retry: {backoff: soon}}`:                                                                                  `retry.backoff`,
		`HTTPRoute {sessionPersistence: {}}`:                                                                                  `sessionPersistence: is not served`,
		`HTTPRoute {matches: [{path: {type: RegularExpression, value: "("}}]}`:                                                `matches[0].path.value: the regular expression cannot be read`,
		`HTTPRoute {matches: [{path: {type: RegularExpression, value: ` + long + `}}]}`:                                       `1024 is the most`,
		`HTTPRoute {matches: [{headers: [{type: RegularExpression, name: a, value: "a{2000}"}]}]}`:                            `headers[0].value`,
		`HTTPRoute {matches: [{queryParams: [{type: Next, name: a, value: b}]}]}`:                                             `queryParams[0].type: "Next" is not served`,
		`HTTPRoute {matches: [{path: {type: Next, value: /a}}]}`:                                                              `path.type: "Next"`,
		`HTTPRoute {matches: [{method: CONNECT}]}`:                                                                            `CONNECT is not served`,
		`HTTPRoute {filters: [{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: Host, value: a}]}}]}`:        `header Host is the proxy's own`,
		`HTTPRoute {filters: [{type: RequestHeaderModifier, requestHeaderModifier: {remove: [transfer-encoding]}}]}`:          `header transfer-encoding`,
		`HTTPRoute {filters: [{type: ResponseHeaderModifier, responseHeaderModifier: {add: [{name: a, value: "b\nc: d"}]}}]}`: `is no value of a header`,
		`HTTPRoute {filters: [{type: RequestRedirect, requestRedirect: {scheme: ftp}}]}`:                                      `scheme: "ftp"`,
		`HTTPRoute {filters: [{type: RequestRedirect, requestRedirect: {statusCode: 399}}]}`:                                  `statusCode: 399`,
		`HTTPRoute {filters: [{type: RequestRedirect, requestRedirect: {path: {type: Next}}}]}`:                               `path.type: "Next"`,
		`HTTPRoute {matches: [{path: {type: Exact, value: /a}}], filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplacePrefixMatch, replacePrefixMatch: /b}}}]}`: `needs matches of type PathPrefix`,
		`HTTPRoute {filters: [{type: URLRewrite, urlRewrite: {hostname: a.example}}, {type: RequestRedirect, requestRedirect: {scheme: https}}]}`:                        `do not go together`,
		`HTTPRoute {timeouts: {request: soon}}`: `timeouts.request`,
		`HTTPRoute {backendRefs: [{name: web, port: 80, filters: [{type: URLRewrite, urlRewrite: {hostname: a.example}}]}]}`: `backendRefs[0].filters[0].type: URLRewrite is not served for one backend`,
		`GRPCRoute {sessionPersistence: {}}`: `sessionPersistence: is not served`,
		`GRPCRoute {filters: [{type: RequestMirror, requestMirror: {backendRef: {name: web, port: 80}, percent: 101}}]}`:                         `101 of 100 requests cannot be mirrored`,
		`GRPCRoute {backendRefs: [{name: web, port: 80, filters: [{type: RequestMirror, requestMirror: {backendRef: {name: web, port: 80}}}]}]}`: `RequestMirror is not served for one backend`,
		`GRPCRoute {matches: [{method: {type: RegularExpression, service: "["}}]}`:                                                               `matches[0].method.value`,
	} {
		kind, rule, _ := strings.Cut(rule, " ")
		v := Evaluate(read(t, gateways+"kind: "+kind+"\nmetadata: {name: r}\nspec: {parentRefs: [{name: g, namespace: infra, sectionName: all}], rules: ["+rule+"]}\n---\n"+
			"kind: "+kind+"\nmetadata: {name: good}\nspec: {parentRefs: [{name: g, namespace: infra, sectionName: all}]}"))
		f := v.Routes[0].Parents[0].Refused
		if !strings.Contains(f.Message, want) || f.Reason != "UnsupportedValue" && f.Reason != "IncompatibleFilters" {
			t.Errorf("%s: %+v, want %s", rule, f, want)
		}
		if len(v.Routes[0].Parents[0].Attached) != 0 || len(v.Routes[1].Parents[0].Attached) != 1 || v.Gateways[0].Listeners[0].Attached != 1 {
			t.Errorf("%s: is served, or another one is not", rule)
		}
	}
}

// TestOneKindAHost: of an HTTPRoute and a GRPCRoute for one host the older is
// accepted.
func TestOneKindAHost(t *testing.T) {
	route := func(kind, name, host string) string {
		return fmt.Sprintf("\n---\nkind: %s\nmetadata: {name: %s}\nspec: {parentRefs: [{name: g, namespace: infra, sectionName: all}], hostnames: ['%s']}", kind, name, host)
	}
	v := Evaluate(read(t, strings.TrimSuffix(gateways, "\n---\n")+route("HTTPRoute", "a", "*.x.example")+route("GRPCRoute", "b", "y.x.example")+route("GRPCRoute", "c", "z.example")+route("HTTPRoute", "d", "*.example")+route("HTTPRoute", "e", "y.example")))
	var got []string
	for _, r := range v.Routes {
		got = append(got, r.Name+" "+r.Parents[0].Refused.Reason)
	}
	if diff := cmp.Diff([]string{"a ", "b HostnameConflict", "c ", "d HostnameConflict", "e "}, got); diff != "" {
		t.Error(diff)
	}
}

// TestStatusKeeps: others' parents and conditions stay, and so does the time of
// what has not changed; a parent that is no longer named goes.
func TestStatusKeeps(t *testing.T) {
	o := read(t, gateways+"kind: HTTPRoute\nmetadata: {name: r}\nspec: {parentRefs: [{name: g, namespace: infra, sectionName: all}]}")
	r := o.HTTPRoutes[0]
	then, now := metav1.NewTime(time.Unix(1, 0)), metav1.NewTime(time.Unix(2, 0))
	gone := r.Spec.ParentRefs[0]
	gone.SectionName = ptr.To[gatewayv1.SectionName]("gone")
	r.Status.Parents = []gatewayv1.RouteParentStatus{{ControllerName: "istio.io/gateway-controller", ParentRef: r.Spec.ParentRefs[0]}, {ControllerName: Controller, ParentRef: gone}}
	r.Status.Parents = append(r.Status.Parents, Evaluate(o).Routes[0].ParentStatuses(then)[1:]...)
	r.Generation = 7
	got := Evaluate(o).Routes[0].ParentStatuses(now)
	if len(got) != 2 || got[0].ControllerName == Controller || SameParent(got[1].ParentRef, gone) {
		t.Fatalf("%+v", got)
	}
	c := got[1].Conditions[0]
	if !c.LastTransitionTime.Equal(&then) || c.ObservedGeneration != 7 {
		t.Errorf("%+v", c)
	}
}

// TestClass: a class with parameters is refused, and its Gateways are not ours.
func TestClass(t *testing.T) {
	o := read(t, gateways)
	if got := said(ClassStatus(o.Classes[0], metav1.Now()).Conditions); got != "Accepted=Accepted" {
		t.Error(got)
	}
	o.Classes[0].Spec.ParametersRef = &gatewayv1.ParametersReference{Name: "p"}
	if got := said(ClassStatus(o.Classes[0], metav1.Now()).Conditions); got != "!Accepted=InvalidParameters" || len(Evaluate(o).Gateways) != 0 {
		t.Error(got)
	}
}

// BenchmarkEvaluate has 1 000 routes with a host each.
func BenchmarkEvaluate(b *testing.B) {
	o := read(b, gateways+"kind: HTTPRoute\nmetadata: {name: r}\nspec: {parentRefs: [{name: g, namespace: infra}], hostnames: [a.example], rules: [{matches: [{path: {value: /a}}], backendRefs: [{name: web, port: 80}]}]}")
	for i := range 999 {
		r := o.HTTPRoutes[0].DeepCopy()
		r.Name = fmt.Sprint("r", i)
		r.Spec.Hostnames = []gatewayv1.Hostname{gatewayv1.Hostname(fmt.Sprintf("h%d.example", i))}
		o.HTTPRoutes = append(o.HTTPRoutes, r)
	}
	for b.Loop() {
		if v := Evaluate(o); v.Gateways[0].Listeners[0].Attached != 1000 {
			b.Fatal(v.Gateways[0].Listeners[0].Attached)
		}
	}
}
