package gateway

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/gateway-api/pkg/features"
)

// conditions changes a list of them for one generation of an object. A
// condition that stays keeps its time.
type conditions struct {
	list       []metav1.Condition
	generation int64
	now        metav1.Time
}

func (c *conditions) set(kind string, holds bool, reason, message string) {
	status := metav1.ConditionFalse
	if holds {
		status = metav1.ConditionTrue
	}
	meta.SetStatusCondition(&c.list, metav1.Condition{
		Type: kind, Status: status, Reason: reason, Message: cut(message), ObservedGeneration: c.generation, LastTransitionTime: c.now,
	})
}

// good sets a condition that is True without a fault, with its type as reason.
func (c *conditions) good(kind string, f Fault) {
	if (f != Fault{}) {
		c.set(kind, false, f.Reason, f.Message)
		return
	}
	c.set(kind, true, kind, "")
}

// cut keeps messages, which repeat what others wrote, within what a condition may
// say.
func cut(s string) string {
	const most = 2048
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}

// ClassStatus is the status of a GatewayClass of our controller.
func ClassStatus(gc *gatewayv1.GatewayClass, now metav1.Time) gatewayv1.GatewayClassStatus {
	c := conditions{slices.Clone(gc.Status.Conditions), gc.Generation, now}
	c.good(string(gatewayv1.GatewayClassConditionStatusAccepted), ClassFault(gc))
	out := gatewayv1.GatewayClassStatus{Conditions: c.list}
	for _, f := range Features {
		out.SupportedFeatures = append(out.SupportedFeatures, gatewayv1.SupportedFeature{Name: gatewayv1.FeatureName(f)})
	}
	return out
}

// Features are what of the API is served, in the words of its conformance suite,
// sorted.
var Features = slices.Sorted(slices.Values([]features.FeatureName{
	features.SupportGateway, features.SupportGatewayPort8080, features.SupportGatewayHTTPListenerIsolation,
	features.SupportGatewayFrontendClientCertificateValidation, features.SupportGatewayFrontendClientCertificateValidationInsecureFallback,
	features.SupportGatewayBackendClientCertificate,
	features.SupportGatewayAddressEmpty, features.SupportGatewayStaticAddresses,
	features.SupportGatewayHTTPSListenerDetectMisdirectedRequests,
	features.SupportReferenceGrant,
	features.SupportHTTPRoute, features.SupportHTTPRouteBackendRequestHeaderModification, features.SupportHTTPRouteQueryParamMatching,
	features.SupportHTTPRouteMethodMatching, features.SupportHTTPRouteResponseHeaderModification, features.SupportHTTPRoutePortRedirect,
	features.SupportHTTPRouteSchemeRedirect, features.SupportHTTPRoutePathRedirect, features.SupportHTTPRouteHostRewrite,
	features.SupportHTTPRoutePathRewrite, features.SupportHTTPRouteRequestTimeout, features.SupportHTTPRouteBackendTimeout,
	features.SupportHTTPRouteParentRefPort, features.SupportHTTPRouteDestinationPortMatching, features.SupportHTTPRouteBackendProtocolH2C, features.SupportHTTPRouteBackendProtocolWebSocket,
	features.SupportHTTPRouteNamedRouteRule, features.SupportHTTPRoute303RedirectStatusCode, features.SupportHTTPRoute307RedirectStatusCode,
	features.SupportHTTPRoute308RedirectStatusCode,
	features.SupportHTTPRouteRequestMirror, features.SupportHTTPRouteRequestMultipleMirrors, features.SupportHTTPRouteRequestPercentageMirror,
	features.SupportHTTPRouteCORS,
	features.SupportGRPCRoute, features.SupportGRPCRouteNamedRouteRule,
	features.SupportBackendTLSPolicy, features.SupportBackendTLSPolicySANValidation,
}))

// pending is the message while the Service has no address.
func (g *Gateway) pending() string {
	return "the Service " + ServiceNamespace + "/" + g.Service + " has no address yet: load balancers need a pool of them with a free one (ConfigMap kube-system/clusterd-load-balancer), or the Service externalIPs"
}

// Status is the Gateway's, with the addresses of its Service.
func (g *Gateway) Status(addresses []gatewayv1.GatewayStatusAddress, now metav1.Time) gatewayv1.GatewayStatus {
	out := gatewayv1.GatewayStatus{Addresses: addresses}
	serving, invalid := 0, []string{}
	for _, l := range g.Listeners {
		if l.Serves() {
			serving++
		}
		if (l.Refused != Fault{}) {
			invalid = append(invalid, string(l.Name))
		}
		out.Listeners = append(out.Listeners, l.status(len(addresses) > 0, now))
	}
	c := conditions{slices.Clone(g.Gateway.Status.Conditions), g.Generation, now}
	accepted := gatewayv1.GatewayConditionAccepted
	refused := g.Refused
	switch notes := strings.Join(g.Notes, "; "); {
	case g.Refused != Fault{}:
		c.good(string(accepted), g.Refused)
	case len(invalid) > 0:
		f := fault(gatewayv1.GatewayReasonListenersNotValid, "listeners that are not served: %s", strings.Join(invalid, ", "))
		if len(invalid) == len(g.Listeners) {
			refused = f
		}
		c.set(string(accepted), len(invalid) < len(g.Listeners), f.Reason, f.Message)
	default:
		c.set(string(accepted), true, string(gatewayv1.GatewayReasonAccepted), notes)
	}
	programmed := Fault{}
	switch {
	case refused != Fault{}:
		programmed = fault(gatewayv1.GatewayReasonInvalid, "the Gateway is not accepted")
	case serving == 0:
		programmed = fault(gatewayv1.GatewayReasonInvalid, "no listener can be served: see their conditions")
	case g.unusable(addresses) != "":
		programmed = fault(gatewayv1.GatewayReasonAddressNotUsable, "%s", g.unusable(addresses))
	case len(addresses) == 0:
		programmed = fault(gatewayv1.GatewayReasonAddressNotAssigned, "%s", g.pending())
	}
	c.good(string(gatewayv1.GatewayConditionProgrammed), programmed)
	if g.clientCertificate() != nil {
		c.good(string(gatewayv1.GatewayConditionResolvedRefs), g.Unresolved)
	} else {
		meta.RemoveStatusCondition(&c.list, string(gatewayv1.GatewayConditionResolvedRefs))
	}
	insecure := string(gatewayv1.GatewayConditionInsecureFrontendValidationMode)
	if slices.ContainsFunc(g.Listeners, func(l *Listener) bool { return l.Clients != nil && l.Clients.Any }) {
		c.set(insecure, true, string(gatewayv1.GatewayReasonConfigurationChanged), "clients with a certificate that is not valid, and without one, are let in, as spec.tls.frontend says")
	} else {
		meta.RemoveStatusCondition(&c.list, insecure)
	}
	out.Conditions = c.list
	return out
}

func (l *Listener) status(reachable bool, now metav1.Time) gatewayv1.ListenerStatus {
	out := gatewayv1.ListenerStatus{Name: l.Name, AttachedRoutes: l.Attached, SupportedKinds: []gatewayv1.RouteGroupKind{}}
	for _, k := range l.Kinds {
		out.SupportedKinds = append(out.SupportedKinds, gatewayv1.RouteGroupKind{Group: ptr.To[gatewayv1.Group](group), Kind: gatewayv1.Kind(k)})
	}
	c := conditions{nil, l.Of.Generation, now}
	for _, old := range l.Of.Gateway.Status.Listeners {
		if old.Name == l.Name {
			c.list = slices.Clone(old.Conditions)
		}
	}
	if (l.Conflicted != Fault{}) {
		c.set(string(gatewayv1.ListenerConditionConflicted), true, l.Conflicted.Reason, l.Conflicted.Message)
	} else {
		c.set(string(gatewayv1.ListenerConditionConflicted), false, string(gatewayv1.ListenerReasonNoConflicts), "")
	}
	c.good(string(gatewayv1.ListenerConditionAccepted), l.Refused)
	c.good(string(gatewayv1.ListenerConditionResolvedRefs), l.Unresolved)
	programmed := Fault{}
	switch {
	case !l.Serves():
		programmed = fault(gatewayv1.ListenerReasonInvalid, "see the other conditions")
		if (l.Of.Refused != Fault{}) {
			programmed.Message = "the Gateway is not accepted"
		}
	case !reachable:
		programmed = fault(gatewayv1.ListenerReasonPending, "%s", l.Of.pending())
	}
	c.good(string(gatewayv1.ListenerConditionProgrammed), programmed)
	out.Conditions = c.list
	return out
}

// Old are the parents in the route's status as it is.
func (r *Route) Old() []gatewayv1.RouteParentStatus {
	if r.HTTP != nil {
		return r.HTTP.Status.Parents
	}
	return r.GRPC.Status.Parents
}

// ParentStatuses are the route's, with those of other controllers as they are.
func (r *Route) ParentStatuses(now metav1.Time) []gatewayv1.RouteParentStatus {
	out := Foreign(r.Old())
	for _, p := range r.Parents {
		c := conditions{nil, r.Generation, now}
		for _, old := range r.Old() {
			if old.ControllerName == Controller && SameParent(old.ParentRef, p.Ref) {
				c.list = slices.Clone(old.Conditions)
			}
		}
		c.good(string(gatewayv1.RouteConditionAccepted), p.Refused)
		c.good(string(gatewayv1.RouteConditionResolvedRefs), r.Unresolved)
		out = append(out, gatewayv1.RouteParentStatus{ParentRef: p.Ref, ControllerName: Controller, Conditions: c.list})
	}
	return out
}

// Foreign are the parents that other controllers wrote.
func Foreign(all []gatewayv1.RouteParentStatus) []gatewayv1.RouteParentStatus {
	out := []gatewayv1.RouteParentStatus{}
	for _, p := range all {
		if p.ControllerName != Controller {
			out = append(out, p)
		}
	}
	return out
}

// SameParent reports whether two references name the same part of the same
// object.
func SameParent(a, b gatewayv1.ParentReference) bool {
	key := func(p gatewayv1.ParentReference) string {
		return fmt.Sprint(ptr.Deref(p.Group, group), "/", ptr.Deref(p.Kind, "Gateway"), "/", ptr.Deref(p.Namespace, ""), "/", p.Name, "/", ptr.Deref(p.SectionName, ""), "/", ptr.Deref(p.Port, 0))
	}
	return key(a) == key(b)
}
