package gateway

import (
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
)

func (r *Route) common() (*gatewayv1.CommonRouteSpec, []gatewayv1.Hostname) {
	if r.HTTP != nil {
		return &r.HTTP.Spec.CommonRouteSpec, r.HTTP.Spec.Hostnames
	}
	return &r.GRPC.Spec.CommonRouteSpec, r.GRPC.Spec.Hostnames
}

// attach finds the route's places; false: none of its parents is ours.
func (r *Route) attach(gateways map[types.NamespacedName]*Gateway, namespaces func(string) labels.Set) bool {
	spec, names := r.common()
	hosts := []string{}
	for _, h := range names {
		hosts = append(hosts, strings.ToLower(string(h)))
	}
	if len(hosts) == 0 {
		hosts = []string{""}
	}
	var unsupported *Fault // it is looked for once there is a parent
	counted := map[*Listener]bool{}
	for _, ref := range spec.ParentRefs {
		if string(ptr.Deref(ref.Group, group)) != group || ptr.Deref(ref.Kind, "Gateway") != "Gateway" {
			continue
		}
		g := gateways[types.NamespacedName{Namespace: string(ptr.Deref(ref.Namespace, gatewayv1.Namespace(r.Namespace))), Name: string(ref.Name)}]
		if g == nil {
			continue
		}
		if unsupported == nil {
			f := r.unsupported()
			unsupported = &f
		}
		p := &Parent{Ref: ref, Of: g}
		r.Parents = append(r.Parents, p)
		if p.Attached, p.Refused = r.places(g, ref, hosts, namespaces); (p.Refused == Fault{}) {
			p.Refused = *unsupported
		}
		if (p.Refused != Fault{}) {
			p.Attached = nil
		}
		for _, a := range p.Attached {
			if a.Listener.holds[r.Kind] == nil {
				a.Listener.holds[r.Kind] = &hostSet{map[string]bool{}}
			}
			a.Listener.holds[r.Kind].add(a.Hosts)
			if !counted[a.Listener] {
				counted[a.Listener] = true
				a.Listener.Attached++
			}
		}
	}
	if len(r.Parents) == 0 {
		return false
	}
	r.resolve()
	return true
}

// places are the listeners of a Gateway that a route is attached to by one
// parentRef.
func (r *Route) places(g *Gateway, ref gatewayv1.ParentReference, hosts []string, namespaces func(string) labels.Set) (out []Attachment, _ Fault) {
	named, allowed, taken := false, false, false
	for _, l := range g.Listeners {
		if ref.SectionName != nil && *ref.SectionName != l.Name || ref.Port != nil && *ref.Port != l.Port {
			continue
		}
		named = true
		if !slices.Contains(l.Kinds, r.Kind) || !l.admits(r.Namespace, namespaces) {
			continue
		}
		allowed = true
		var common []string
		for _, h := range hosts {
			if both, ok := intersect(h, l.Host()); ok && !slices.Contains(common, both) {
				common = append(common, both)
			}
		}
		if len(common) == 0 {
			continue
		}
		if l.holds[otherKind(r.Kind)].meets(common) {
			taken = true
			continue
		}
		out = append(out, Attachment{l, common})
	}
	switch {
	case len(out) > 0:
		return out, Fault{}
	case !named:
		return nil, fault(gatewayv1.RouteReasonNoMatchingParent, "Gateway %s/%s has no listener with this sectionName and port", g.Namespace, g.Name)
	case !allowed:
		return nil, fault(gatewayv1.RouteReasonNotAllowedByListeners, "no listener of Gateway %s/%s allows a %s of namespace %s", g.Namespace, g.Name, r.Kind, r.Namespace)
	case taken:
		return nil, fault(gatewayv1.ListenerReasonHostnameConflict, "an older %s is attached to the same listener of Gateway %s/%s for the same hostname", otherKind(r.Kind), g.Namespace, g.Name)
	}
	return nil, fault(gatewayv1.RouteReasonNoMatchingListenerHostname, "spec.hostnames: no listener of Gateway %s/%s is for one of them", g.Namespace, g.Name)
}

func otherKind(kind string) string {
	if kind == HTTPRoute {
		return GRPCRoute
	}
	return HTTPRoute
}
