// Package watch turns Ingresses, Services, EndpointSlices and Secrets of the API
// into the values of package route, and keeps them so.
package watch

import (
	"cmp"
	"crypto/tls"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/apis/networking"
	"github.com/clusterd/clusterd/ingress/route"
)

// objects is what is compiled. The functions return nil for what is not there.
type objects struct {
	ingresses []*networkingv1.Ingress
	classes   []*networkingv1.IngressClass
	service   func(namespace, name string) *corev1.Service
	slices    func(namespace, service string) []*discoveryv1.EndpointSlice
	pair      func(namespace, secret string) (*tls.Certificate, error)
	configMap func(namespace, name string) *corev1.ConfigMap
	namespace func(name string) labels.Set // its labels
}

// compile makes rules of all Ingresses of our classes. faults say what of them
// cannot work, sorted. Pure.
func compile(o objects) (rules []route.Rule, certificates []route.Certificate, faults []string) {
	own := map[string]bool{}
	for _, c := range o.classes {
		own[c.Name] = c.Spec.Controller == names.IngressController
	}
	// The oldest first: the certificate of a host is that of its oldest Ingress.
	all := slices.SortedFunc(slices.Values(o.ingresses), func(a, b *networkingv1.Ingress) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	c := compiler{objects: o, backends: map[backendKey]*route.Backend{}}
	for _, i := range all {
		if own[networking.ClassOf(i)] && i.DeletionTimestamp == nil {
			c.ingress(i)
		}
	}
	slices.Sort(c.faults)
	return c.rules, c.certificates, slices.Compact(c.faults)
}

type backendKey struct {
	namespace, service, port string
	shown                    types.NamespacedName // the Secret of the certificate that it is shown
}

type compiler struct {
	objects
	backends     map[backendKey]*route.Backend
	rules        []route.Rule
	certificates []route.Certificate
	faults       []string
	// shown is the Secret with the certificate that backends of a BackendTLSPolicy are
	// shown by the Gateway whose rules are made; nil: none.
	shown *types.NamespacedName
}

func (c *compiler) fault(i *networkingv1.Ingress, format string, args ...any) {
	c.faults = append(c.faults, fmt.Sprintf("Ingress %s/%s: %s", i.Namespace, i.Name, fmt.Sprintf(format, args...)))
}

func (c *compiler) ingress(i *networkingv1.Ingress) {
	redirects := i.Annotations[names.SSLRedirect] != "false"
	add := func(r route.Rule, b *networkingv1.IngressBackend) {
		r.Host = strings.ToLower(r.Host)
		r.Backend = c.backend(i, b)
		r.Owner = route.Owner{Namespace: i.Namespace, Name: i.Name}
		r.Since = i.CreationTimestamp.Time
		r.Redirect = redirects && secured(i, r.Host)
		c.rules = append(c.rules, r)
	}
	hosts := map[string]bool{}
	for _, rule := range i.Spec.Rules {
		hosts[rule.Host] = true
		if rule.HTTP == nil {
			if b := i.Spec.DefaultBackend; b != nil { // all of the host's requests
				add(route.Rule{Host: rule.Host}, b)
			}
			continue
		}
		for j := range rule.HTTP.Paths {
			p := &rule.HTTP.Paths[j]
			match := route.Prefix
			if ptr.Deref(p.PathType, networkingv1.PathTypeImplementationSpecific) == networkingv1.PathTypeExact {
				match = route.Exact
			}
			add(route.Rule{Host: rule.Host, Path: p.Path, Match: match}, &p.Backend)
		}
	}
	if b := i.Spec.DefaultBackend; b != nil {
		if len(hosts) == 0 {
			hosts[""] = true
		}
		for host := range hosts {
			add(route.Rule{Host: host, Default: true}, b)
		}
	}
	for _, t := range i.Spec.TLS {
		c.tls(i, t)
	}
}

// secured: the Ingress has TLS for the host.
func secured(i *networkingv1.Ingress, host string) bool {
	return slices.ContainsFunc(i.Spec.TLS, func(t networkingv1.IngressTLS) bool {
		return len(t.Hosts) == 0 || slices.ContainsFunc(t.Hosts, func(h string) bool {
			parent, wild := strings.CutPrefix(strings.ToLower(h), "*.")
			_, after, _ := strings.Cut(host, ".")
			return strings.EqualFold(h, host) || wild && after == parent
		})
	})
}

func (c *compiler) tls(i *networkingv1.Ingress, t networkingv1.IngressTLS) {
	if t.SecretName == "" {
		return // the proxy's own certificate
	}
	pair, err := c.pair(i.Namespace, t.SecretName)
	if err != nil {
		c.fault(i, "%v; clients are shown a certificate that no host has", err)
		return
	}
	hosts := t.Hosts
	if len(hosts) == 0 {
		hosts = []string{""}
	}
	for _, h := range hosts {
		h = strings.ToLower(h)
		if h != "" && pair.Leaf != nil && pair.Leaf.VerifyHostname(strings.Replace(h, "*.", "any.", 1)) != nil {
			c.fault(i, "the certificate in Secret %q is not for host %q, which it is shown for", t.SecretName, h)
		}
		c.certificates = append(c.certificates, route.Certificate{Host: h, Pair: pair})
	}
}

// backend is the one of a Service's port; rules share it.
func (c *compiler) backend(i *networkingv1.Ingress, b *networkingv1.IngressBackend) *route.Backend {
	if b.Service == nil {
		c.fault(i, "a backend that is a resource, not a Service, is not served")
		return &route.Backend{Fault: fmt.Sprintf("Ingress %s/%s names a backend that is no Service, which is not served", i.Namespace, i.Name)}
	}
	port := b.Service.Port.Name
	if port == "" {
		port = fmt.Sprint(b.Service.Port.Number)
	}
	key := backendKey{namespace: i.Namespace, service: b.Service.Name, port: port}
	if c.backends[key] == nil {
		c.backends[key] = c.serviceBackend(key, b.Service.Port)
	}
	if f := c.backends[key].Fault; f != "" {
		c.fault(i, "%s", f)
	}
	return c.backends[key]
}

func (c *compiler) serviceBackend(key backendKey, want networkingv1.ServiceBackendPort) *route.Backend {
	out := &route.Backend{Name: key.namespace + "/" + key.service + ":" + key.port, Protocol: route.HTTP}
	s := c.service(key.namespace, key.service)
	if s == nil {
		out.Fault = fmt.Sprintf("Service %s/%s does not exist", key.namespace, key.service)
		return out
	}
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		// A user who may write a Service could have this proxy connect anywhere.
		out.Fault = fmt.Sprintf("Service %s/%s is of type ExternalName, which is not served", key.namespace, key.service)
		return out
	}
	at := slices.IndexFunc(s.Spec.Ports, func(p corev1.ServicePort) bool {
		return want.Name != "" && p.Name == want.Name || want.Name == "" && p.Port == want.Number
	})
	if at < 0 {
		out.Fault = fmt.Sprintf("Service %s/%s has no port %s", key.namespace, key.service, key.port)
		return out
	}
	port := s.Spec.Ports[at]
	if port.Protocol != "" && port.Protocol != corev1.ProtocolTCP {
		out.Fault = fmt.Sprintf("port %s of Service %s/%s is of protocol %s, not TCP", key.port, key.namespace, key.service, port.Protocol)
		return out
	}
	switch strings.ToLower(ptr.Deref(port.AppProtocol, "")) {
	case "kubernetes.io/h2c", "h2c", "grpc":
		out.Protocol = route.H2C
	case "https", "kubernetes.io/wss", "wss":
		out.Protocol = route.HTTPS
	}
	out.Sticky = s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP
	out.Endpoints = endpoints(c.slices(key.namespace, key.service), port.Name)
	return out
}

// endpoints are the ready ones of a port; while there is none, those that end
// and still serve.
func endpoints(all []*discoveryv1.EndpointSlice, port string) []netip.AddrPort {
	var ready, ending []netip.AddrPort
	for _, s := range all {
		for _, p := range s.Ports {
			if ptr.Deref(p.Name, "") != port || p.Port == nil || *p.Port <= 0 || *p.Port > 65535 {
				continue
			}
			for _, e := range s.Endpoints {
				if len(e.Addresses) == 0 {
					continue
				}
				addr, err := netip.ParseAddr(e.Addresses[0])
				if err != nil || forbidden(addr) {
					continue
				}
				a := netip.AddrPortFrom(addr.Unmap(), uint16(*p.Port))
				switch {
				case ptr.Deref(e.Conditions.Ready, true):
					ready = append(ready, a)
				case ptr.Deref(e.Conditions.Serving, false) && ptr.Deref(e.Conditions.Terminating, false):
					ending = append(ending, a)
				}
			}
		}
	}
	if len(ready) == 0 {
		ready = ending
	}
	slices.SortFunc(ready, netip.AddrPort.Compare)
	return slices.Compact(ready)
}

// forbidden: slices may be written by hand, and no client may reach through this
// proxy what only its own pod or its node reaches.
func forbidden(a netip.Addr) bool {
	a = a.Unmap()
	return a.IsLoopback() || a.IsUnspecified() || a.IsMulticast() || a.IsLinkLocalUnicast()
}
