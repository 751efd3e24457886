package gateway

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// Backend is a Service's port that a share of a rule's requests goes to.
type Backend struct {
	Namespace, Service string
	Port               int32
	Weight             int32
	// Policy is how it is spoken to over TLS; nil: no policy is for it.
	Policy *Policy
	// Fault is why it cannot be used: requests that are its share get an error.
	Fault Fault
}

// protocols are the values of appProtocol that are spoken to backends.
var protocols = []string{"", "http", "https", "h2c", "grpc", "ws", "wss"}

// Protocol is a port's appProtocol without the prefix that Kubernetes' own have.
func Protocol(p *corev1.ServicePort) string {
	return strings.TrimPrefix(strings.ToLower(ptr.Deref(p.AppProtocol, "")), "kubernetes.io/")
}

// Backend resolves one backendRef.
func (r *Route) Backend(ref gatewayv1.BackendRef) Backend {
	b := Backend{
		Namespace: string(ptr.Deref(ref.Namespace, gatewayv1.Namespace(r.Namespace))), Service: string(ref.Name),
		Port: ptr.Deref(ref.Port, 0), Weight: ptr.Deref(ref.Weight, 1),
	}
	if ptr.Deref(ref.Group, "") != "" || ptr.Deref(ref.Kind, "Service") != "Service" {
		b.Fault = fault(gatewayv1.RouteReasonInvalidKind, "backend %q is of kind %q and group %q; Services are served", ref.Name, ptr.Deref(ref.Kind, ""), ptr.Deref(ref.Group, ""))
		return b
	}
	if !r.grants.allow(r.Kind, r.Namespace, "Service", b.Namespace, b.Service) {
		b.Fault = fault(gatewayv1.RouteReasonRefNotPermitted, "no ReferenceGrant in namespace %s lets %ss of namespace %s refer to Service %s", b.Namespace, r.Kind, r.Namespace, b.Service)
		return b
	}
	s := r.get(b.Namespace, b.Service)
	if s == nil {
		b.Fault = fault(gatewayv1.RouteReasonBackendNotFound, "Service %s/%s does not exist", b.Namespace, b.Service)
		return b
	}
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		// A user who may write a Service could have the proxy connect anywhere.
		b.Fault = fault(gatewayv1.RouteReasonUnsupportedValue, "Service %s/%s is of type ExternalName, which is not served", b.Namespace, b.Service)
		return b
	}
	at := slices.IndexFunc(s.Spec.Ports, func(p corev1.ServicePort) bool {
		return p.Port == b.Port && (p.Protocol == "" || p.Protocol == corev1.ProtocolTCP)
	})
	if at < 0 {
		b.Fault = fault(gatewayv1.RouteReasonBackendNotFound, "Service %s/%s has no TCP port %d", b.Namespace, b.Service, b.Port)
		return b
	}
	b.Policy = r.policies.of(b.Namespace, b.Service, s.Spec.Ports[at].Name)
	if p := &s.Spec.Ports[at]; !slices.Contains(protocols, Protocol(p)) {
		b.Fault = fault(gatewayv1.RouteReasonUnsupportedProtocol, "port %d of Service %s/%s has appProtocol %q, which is not spoken", b.Port, b.Namespace, b.Service, *p.AppProtocol)
	}
	return b
}

// MirrorRef is the backend of a mirror, as Backend takes it.
func MirrorRef(m *gatewayv1.HTTPRequestMirrorFilter) gatewayv1.BackendRef {
	return gatewayv1.BackendRef{BackendObjectReference: m.BackendRef}
}

// resolve looks for the first backend that cannot be used.
func (r *Route) resolve() {
	note := func(ref gatewayv1.BackendRef) {
		b := r.Backend(ref)
		if (r.Unresolved == Fault{}) {
			r.Unresolved = b.Fault
		}
		if b.Policy != nil {
			b.Policy.reached(r)
		}
	}
	mirror := func(m *gatewayv1.HTTPRequestMirrorFilter) {
		if m != nil {
			note(MirrorRef(m))
		}
	}
	if r.GRPC != nil {
		for i := range r.GRPC.Spec.Rules {
			for _, b := range r.GRPC.Spec.Rules[i].BackendRefs {
				note(b.BackendRef)
			}
			for _, f := range r.GRPC.Spec.Rules[i].Filters {
				mirror(f.RequestMirror)
			}
		}
		return
	}
	for i := range r.HTTP.Spec.Rules {
		for _, b := range r.HTTP.Spec.Rules[i].BackendRefs {
			note(b.BackendRef)
		}
		for _, f := range r.HTTP.Spec.Rules[i].Filters {
			mirror(f.RequestMirror)
		}
	}
}
