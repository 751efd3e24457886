package gateway

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// Policy is a BackendTLSPolicy: it says that a Service is spoken to over TLS, and how
// its certificate is verified.
type Policy struct {
	*gatewayv1.BackendTLSPolicy
	// Authorities are the ConfigMaps with those that have to have signed the
	// certificate.
	Authorities []types.NamespacedName
	// Refused and Unresolved are the faults behind the conditions Accepted and
	// ResolvedRefs. Requests for what a refused one is for get an error: to send them
	// without TLS, or to an unverified backend, is what its user does not want.
	Refused, Unresolved Fault
	// Gateways are those of which a route leads to what it is for.
	Gateways []*Gateway

	younger []*Policy // for the same as this one, which has it
}

// target is what a policy is for: a Service, or one of its ports.
type target struct{ namespace, service, port string }

// policies are the holders of targets: the oldest policy that names one has it.
type policies map[target]*Policy

// newPolicies judges them all, the oldest first.
func newPolicies(all []*gatewayv1.BackendTLSPolicy, o Objects) (policies, []*Policy) {
	held, list := policies{}, []*Policy{}
	for _, one := range slices.SortedFunc(slices.Values(all), older) {
		if one.DeletionTimestamp != nil {
			continue
		}
		p := &Policy{BackendTLSPolicy: one}
		list = append(list, p)
		p.validate(o)
		for i, ref := range one.Spec.TargetRefs {
			if ref.Group != "" || ref.Kind != "Service" {
				continue
			}
			t := target{one.Namespace, string(ref.Name), string(ptr.Deref(ref.SectionName, ""))}
			if other := held[t]; other != nil && other != p {
				p.Refused = fault(gatewayv1.PolicyReasonConflicted, "spec.targetRefs[%d]: BackendTLSPolicy %s is older and for the same", i, other.Name)
				other.younger = append(other.younger, p)
				continue
			}
			held[t] = p
		}
	}
	return held, list
}

func (p *Policy) validate(o Objects) {
	unresolved := func(reason gatewayv1.PolicyConditionReason, format string, args ...any) {
		if (p.Unresolved == Fault{}) {
			p.Unresolved = fault(reason, format, args...)
		}
	}
	v := &p.Spec.Validation
	for i, ref := range v.CACertificateRefs {
		at := fmt.Sprintf("spec.validation.caCertificateRefs[%d]", i)
		if ref.Group != "" || ref.Kind != "ConfigMap" {
			unresolved(gatewayv1.BackendTLSPolicyReasonInvalidKind, "%s: is of kind %q and group %q; ConfigMaps of the core group are read", at, ref.Kind, ref.Group)
			continue
		}
		name := types.NamespacedName{Namespace: p.Namespace, Name: string(ref.Name)}
		if _, err := Authorities(o.ConfigMap(name.Namespace, name.Name)); err != nil {
			unresolved(gatewayv1.BackendTLSPolicyReasonInvalidCACertificateRef, "%s: ConfigMap %s: %v", at, name, err)
			continue
		}
		p.Authorities = append(p.Authorities, name)
	}
	switch {
	case len(p.Spec.Options) > 0:
		p.Refused = fault(gatewayv1.PolicyReasonInvalid, "spec.options: there are none; leave them out")
	case ptr.Deref(v.WellKnownCACertificates, "") != "":
		p.Refused = fault(gatewayv1.PolicyReasonInvalid, "spec.validation.wellKnownCACertificates: the proxies have no certificates of a system; name a ConfigMap in caCertificateRefs")
	case len(p.Authorities) == 0:
		p.Refused = fault(gatewayv1.BackendTLSPolicyReasonNoValidCACertificate, "no authority is known: see the condition ResolvedRefs")
	}
}

// of is the policy for a port of a Service; nil: there is none.
func (p policies) of(namespace, service, port string) *Policy {
	if one := p[target{namespace, service, port}]; one != nil {
		return one
	}
	return p[target{namespace, service, ""}]
}

// reached notes the Gateways of a route that leads to what the policy is for. They
// matter to the younger ones, too, whose statuses say that they have no effect.
func (p *Policy) reached(by *Route) {
	for _, parent := range by.Parents {
		if !slices.Contains(p.Gateways, parent.Of) {
			p.Gateways = append(p.Gateways, parent.Of)
		}
	}
	for _, y := range p.younger {
		y.reached(by)
	}
}

// mostAncestors is how many a status may have.
const mostAncestors = 16

// PolicyStatus is the policy's, with what other controllers wrote as it is.
func (p *Policy) PolicyStatus(now metav1.Time) gatewayv1.PolicyStatus {
	out := gatewayv1.PolicyStatus{Ancestors: []gatewayv1.PolicyAncestorStatus{}}
	for _, a := range p.Status.Ancestors {
		if a.ControllerName != Controller {
			out.Ancestors = append(out.Ancestors, a)
		}
	}
	for _, g := range slices.SortedFunc(slices.Values(p.Gateways), func(a, b *Gateway) int { return older(a.Gateway, b.Gateway) }) {
		if len(out.Ancestors) == mostAncestors {
			break
		}
		ref := gatewayv1.ParentReference{
			Group: ptr.To(gatewayv1.Group(group)), Kind: ptr.To(gatewayv1.Kind("Gateway")),
			Namespace: ptr.To(gatewayv1.Namespace(g.Namespace)), Name: gatewayv1.ObjectName(g.Name),
		}
		c := conditions{nil, p.Generation, now}
		for _, a := range p.Status.Ancestors {
			if a.ControllerName == Controller && SameParent(a.AncestorRef, ref) {
				c.list = slices.Clone(a.Conditions)
			}
		}
		c.good(string(gatewayv1.PolicyConditionAccepted), p.Refused)
		c.good(string(gatewayv1.BackendTLSPolicyConditionResolvedRefs), p.Unresolved)
		out.Ancestors = append(out.Ancestors, gatewayv1.PolicyAncestorStatus{AncestorRef: ref, ControllerName: Controller, Conditions: c.list})
	}
	return out
}
