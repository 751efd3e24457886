package gateway

import (
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/clusterd/clusterd/apis/names"
)

func newGateway(gw *gatewayv1.Gateway, o Objects, g grants) *Gateway {
	out := &Gateway{Gateway: gw, Service: serviceName(gw)}
	out.Asked, out.Refused = asked(gw, out.Shared())
	switch s := &gw.Spec; {
	case out.Refused != Fault{}:
	case s.Infrastructure != nil && s.Infrastructure.ParametersRef != nil:
		out.Refused = fault(gatewayv1.GatewayReasonInvalidParameters, "spec.infrastructure.parametersRef: there are no parameters; leave it out")
	case s.TLS != nil && s.TLS.Frontend != nil && out.Shared():
		// Others may have listeners at the same port that are for all clients.
		out.Refused = fault(gatewayv1.ListenerReasonUnsupportedValue, "spec.tls.frontend: clients' certificates are verified at a Gateway's own addresses alone; take the annotation %s away", names.SharedAddress)
	case s.DefaultScope != "" && s.DefaultScope != gatewayv1.GatewayDefaultScopeNone:
		out.Refused = fault(gatewayv1.ListenerReasonUnsupportedValue, "spec.defaultScope: routes have to name their Gateways; leave it out")
	}
	out.shown(o, g)
	if i := gw.Spec.Infrastructure; i != nil && len(i.Labels)+len(i.Annotations) > 0 {
		out.Notes = append(out.Notes, "spec.infrastructure is not acted on: all Gateways share their pods")
	}
	if a := gw.Spec.AllowedListeners; a != nil && a.Namespaces != nil && ptr.Deref(a.Namespaces.From, gatewayv1.NamespacesFromNone) != gatewayv1.NamespacesFromNone {
		out.Notes = append(out.Notes, "spec.allowedListeners is not acted on: ListenerSets are not served")
	}
	for i := range gw.Spec.Listeners {
		out.Listeners = append(out.Listeners, newListener(out, &gw.Spec.Listeners[i], o, g))
	}
	conflicts(out.Listeners)
	return out
}

func newListener(of *Gateway, spec *gatewayv1.Listener, o Objects, g grants) *Listener {
	l := &Listener{Listener: spec, Of: of, holds: map[string]*hostSet{}}
	switch spec.Protocol {
	case gatewayv1.HTTPProtocolType:
		if spec.TLS != nil {
			l.Refused = fault(gatewayv1.ListenerReasonUnsupportedValue, "tls: is for protocol HTTPS")
		}
	case gatewayv1.HTTPSProtocolType:
		l.tls(o, g)
		l.clients(o, g)
	default:
		l.Refused = fault(gatewayv1.ListenerReasonUnsupportedProtocol, "protocol %q: HTTP and HTTPS are served", spec.Protocol)
		return l // no route of a kind of ours is for it
	}
	l.routes()
	return l
}

func (l *Listener) tls(o Objects, g grants) {
	t := l.TLS
	switch {
	case t == nil || len(t.CertificateRefs) == 0 && len(t.Options) == 0 && ptr.Deref(t.Mode, gatewayv1.TLSModeTerminate) == gatewayv1.TLSModeTerminate:
		l.Unresolved = fault(gatewayv1.ListenerReasonInvalidCertificateRef, "tls.certificateRefs: names no Secret with a certificate")
		return
	case ptr.Deref(t.Mode, gatewayv1.TLSModeTerminate) != gatewayv1.TLSModeTerminate:
		l.Refused = fault(gatewayv1.ListenerReasonUnsupportedValue, "tls.mode %q: Terminate is served", *t.Mode)
		return
	case len(t.Options) > 0:
		l.Refused = fault(gatewayv1.ListenerReasonUnsupportedValue, "tls.options: there are none; leave them out")
		return
	}
	unresolved := func(f Fault) {
		if (l.Unresolved == Fault{}) {
			l.Unresolved = f
		}
	}
	for i, ref := range t.CertificateRefs {
		at := fmt.Sprintf("tls.certificateRefs[%d]", i)
		name := types.NamespacedName{Namespace: string(ptr.Deref(ref.Namespace, gatewayv1.Namespace(l.Of.Namespace))), Name: string(ref.Name)}
		if ptr.Deref(ref.Group, "") != "" || ptr.Deref(ref.Kind, "Secret") != "Secret" {
			unresolved(fault(gatewayv1.ListenerReasonInvalidCertificateRef, "%s: is no Secret of the core group", at))
			continue
		}
		if !g.allow("Gateway", l.Of.Namespace, "Secret", name.Namespace, name.Name) {
			unresolved(fault(gatewayv1.ListenerReasonRefNotPermitted, "%s: no ReferenceGrant in namespace %s lets Gateways of namespace %s refer to Secret %s", at, name.Namespace, l.Of.Namespace, name.Name))
			continue
		}
		if err := o.Certificate(name.Namespace, name.Name); err != nil {
			unresolved(fault(gatewayv1.ListenerReasonInvalidCertificateRef, "%s: %v", at, err))
			continue
		}
		l.Certificates = append(l.Certificates, name)
	}
}

// routes reads which ones are allowed.
func (l *Listener) routes() {
	served := []string{HTTPRoute, GRPCRoute}
	a := l.AllowedRoutes
	if a == nil || len(a.Kinds) == 0 {
		l.Kinds = served
	} else {
		for i, k := range a.Kinds {
			if string(ptr.Deref(k.Group, group)) != group || !slices.Contains(served, string(k.Kind)) {
				if (l.Unresolved == Fault{}) {
					l.Unresolved = fault(gatewayv1.ListenerReasonInvalidRouteKinds, "allowedRoutes.kinds[%d]: %q is not served; HTTPRoute and GRPCRoute are", i, k.Kind)
				}
				continue
			}
			if !slices.Contains(l.Kinds, string(k.Kind)) {
				l.Kinds = append(l.Kinds, string(k.Kind))
			}
		}
	}
	if a == nil || a.Namespaces == nil || ptr.Deref(a.Namespaces.From, gatewayv1.NamespacesFromSame) != gatewayv1.NamespacesFromSelector {
		return
	}
	s, err := metav1.LabelSelectorAsSelector(a.Namespaces.Selector)
	if err != nil {
		l.Refused = fault(gatewayv1.ListenerReasonUnsupportedValue, "allowedRoutes.namespaces.selector: %v", err)
		s = labels.Nothing()
	}
	l.selector = s
}

// admits reports whether routes of a namespace may be attached.
func (l *Listener) admits(namespace string, of func(string) labels.Set) bool {
	from := gatewayv1.NamespacesFromSame
	if a := l.AllowedRoutes; a != nil && a.Namespaces != nil {
		from = ptr.Deref(a.Namespaces.From, from)
	}
	switch from {
	case gatewayv1.NamespacesFromAll:
		return true
	case gatewayv1.NamespacesFromSame:
		return namespace == l.Of.Namespace
	case gatewayv1.NamespacesFromSelector:
		return l.selector != nil && l.selector.Matches(of(namespace))
	}
	return false
}

// conflicts marks listeners of one Gateway that nothing tells apart: none of
// them is served.
func conflicts(all []*Listener) {
	for i, a := range all {
		for _, b := range all[i+1:] {
			if a.Port != b.Port {
				continue
			}
			var f Fault
			switch {
			case a.Protocol != b.Protocol:
				f = fault(gatewayv1.ListenerReasonProtocolConflict, "listeners %s and %s have port %d and different protocols", a.Name, b.Name, a.Port)
			case a.Host() == b.Host():
				f = fault(gatewayv1.ListenerReasonHostnameConflict, "listeners %s and %s have the same port, protocol and hostname", a.Name, b.Name)
			default:
				continue
			}
			for _, l := range []*Listener{a, b} {
				l.Conflicted = f
				if (l.Refused == Fault{}) {
					l.Refused = f
				}
			}
		}
	}
}

// sharePorts gives each port of a Service to the protocol of the oldest Gateway that
// has it; of the shared one 80 and 443 are the Ingresses' too.
func sharePorts(all []*Gateway) {
	services := map[string]map[int32]gatewayv1.ProtocolType{}
	for _, g := range all {
		if (g.Refused != Fault{}) {
			continue
		}
		owned, most := services[g.Service], MaxPorts
		if owned == nil {
			owned = map[int32]gatewayv1.ProtocolType{}
			if g.Shared() {
				owned[80], owned[443] = gatewayv1.HTTPProtocolType, gatewayv1.HTTPSProtocolType
			}
			services[g.Service] = owned
		}
		if g.Shared() {
			most += 2
		}
		for _, l := range g.Listeners {
			if (l.Refused != Fault{}) {
				continue
			}
			has, taken := owned[l.Port]
			switch {
			case taken && has != l.Protocol:
				l.Refused = fault(gatewayv1.ListenerReasonPortUnavailable, "port %d is for %s, as Ingresses or an older Gateway with the same addresses have it; take the annotation %s away for addresses of its own", l.Port, has, names.SharedAddress)
			case !taken && len(owned) >= most:
				l.Refused = fault(gatewayv1.ListenerReasonPortUnavailable, "port %d: the listeners at these addresses have %d ports together, which is the most; use one of them", l.Port, MaxPorts)
			case !taken:
				owned[l.Port] = l.Protocol
			}
		}
	}
}

// hostSet are names that routes of one kind are attached for.
type hostSet struct{ names map[string]bool }

func (h *hostSet) add(hosts []string) {
	for _, n := range hosts {
		h.names[n] = true
	}
}

// meets reports whether a request could be for both.
func (h *hostSet) meets(hosts []string) bool {
	if h == nil {
		return false
	}
	for _, a := range hosts {
		if a != "" && !strings.HasPrefix(a, "*") { // the usual case needs no walk
			if h.names[""] || h.names[a] {
				return true
			}
			for rest := a; ; {
				_, parent, ok := strings.Cut(rest, ".")
				if !ok {
					break
				}
				if h.names["*."+parent] {
					return true
				}
				rest = parent
			}
			continue
		}
		for b := range h.names {
			if _, ok := intersect(a, b); ok {
				return true
			}
		}
	}
	return false
}

// intersect is what two hostnames have in common; "" is any, and "*.a" every
// name that ends in ".a".
func intersect(a, b string) (string, bool) {
	switch {
	case a == "" || a == b:
		return b, true
	case b == "":
		return a, true
	case covers(a, b):
		return b, true
	case covers(b, a):
		return a, true
	}
	return "", false
}

// covers: every name of narrow is one of wide.
func covers(wide, narrow string) bool {
	after, wild := strings.CutPrefix(wide, "*")
	return wild && strings.HasSuffix(strings.TrimPrefix(narrow, "*"), after) && narrow != after[1:]
}
