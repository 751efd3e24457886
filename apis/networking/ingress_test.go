package networking

import (
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func TestIngressFaults(t *testing.T) {
	k := Ingress()
	base := func() *networkingv1.Ingress {
		return &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Name: "i", Namespace: "n"}, Spec: networkingv1.IngressSpec{Rules: []networkingv1.IngressRule{{
			Host: "a.example.com", IngressRuleValue: networkingv1.IngressRuleValue{HTTP: &networkingv1.HTTPIngressRuleValue{Paths: []networkingv1.HTTPIngressPath{{
				Path: "/", PathType: ptr.To(networkingv1.PathTypePrefix),
				Backend: networkingv1.IngressBackend{Service: &networkingv1.IngressServiceBackend{Name: "web", Port: networkingv1.ServiceBackendPort{Number: 80}}},
			}}}},
		}}}}
	}
	const path = "spec.rules[0].http.paths[0]"
	for name, test := range map[string]struct {
		change func(*networkingv1.Ingress, *networkingv1.HTTPIngressPath)
		want   []string
	}{
		"whole":    {func(*networkingv1.Ingress, *networkingv1.HTTPIngressPath) {}, nil},
		"empty":    {func(i *networkingv1.Ingress, _ *networkingv1.HTTPIngressPath) { i.Spec.Rules = nil }, []string{"spec: Invalid value: null: either `defaultBackend` or `rules` must be specified"}},
		"address":  {func(i *networkingv1.Ingress, _ *networkingv1.HTTPIngressPath) { i.Spec.Rules[0].Host = "192.0.2.1" }, []string{`spec.rules[0].host: Invalid value: "192.0.2.1": must be a DNS name, not an IP address`}},
		"wildcard": {func(i *networkingv1.Ingress, _ *networkingv1.HTTPIngressPath) { i.Spec.Rules[0].Host = "a.*.com" }, []string{"spec.rules[0].host: Invalid value"}},
		"no type":  {func(_ *networkingv1.Ingress, p *networkingv1.HTTPIngressPath) { p.PathType = nil }, []string{path + ".pathType: Required value: pathType must be specified"}},
		"other type": {func(_ *networkingv1.Ingress, p *networkingv1.HTTPIngressPath) {
			p.PathType = ptr.To(networkingv1.PathType("Regex"))
		}, []string{path + `.pathType: Unsupported value: "Regex"`}},
		"relative":    {func(_ *networkingv1.Ingress, p *networkingv1.HTTPIngressPath) { p.Path = "x" }, []string{path + `.path: Invalid value: "x": must be an absolute path`}},
		"steps back":  {func(_ *networkingv1.Ingress, p *networkingv1.HTTPIngressPath) { p.Path = "/a/../b" }, []string{path + `.path: Invalid value: "/a/../b": must not contain '/../'`}},
		"no backend":  {func(_ *networkingv1.Ingress, p *networkingv1.HTTPIngressPath) { p.Backend.Service = nil }, []string{path + ".backend: Required value"}},
		"no port":     {func(_ *networkingv1.Ingress, p *networkingv1.HTTPIngressPath) { p.Backend.Service.Port.Number = 0 }, []string{path + ".backend.service.port: Required value: port name or number is required"}},
		"two ports":   {func(_ *networkingv1.Ingress, p *networkingv1.HTTPIngressPath) { p.Backend.Service.Port.Name = "http" }, []string{path + ".backend.service.port: Invalid value"}},
		"high port":   {func(_ *networkingv1.Ingress, p *networkingv1.HTTPIngressPath) { p.Backend.Service.Port.Number = 70000 }, []string{path + ".backend.service.port.number: Invalid value: 70000"}},
		"class of no": {func(i *networkingv1.Ingress, _ *networkingv1.HTTPIngressPath) { i.Spec.IngressClassName = ptr.To("") }, []string{`spec.ingressClassName: Invalid value: ""`}},
	} {
		t.Run(name, func(t *testing.T) {
			i := base()
			test.change(i, &i.Spec.Rules[0].HTTP.Paths[0])
			checktest.Faults(t, k.Validate(i), test.want...)
		})
	}
}

func TestIngressClassFaults(t *testing.T) {
	k := IngressClass()
	c := &networkingv1.IngressClass{ObjectMeta: metav1.ObjectMeta{Name: "c", ResourceVersion: "1"}, Spec: networkingv1.IngressClassSpec{
		Controller: "example.com/proxy", Parameters: &networkingv1.IngressClassParametersReference{Kind: "Proxy", Name: "p"},
	}}
	k.Default(c)
	checktest.Faults(t, k.Validate(c))
	other := c.DeepCopy()
	other.Spec.Controller = "proxy"
	other.Spec.Parameters.Scope = ptr.To(networkingv1.IngressClassParametersReferenceScopeNamespace)
	checktest.Faults(t, k.ValidateUpdate(other, c),
		"spec.controller: Invalid value: \"proxy\": must be a domain-prefixed path",
		"spec.controller: Invalid value: \"proxy\": field is immutable",
		"spec.parameters.namespace: Required value")
}
