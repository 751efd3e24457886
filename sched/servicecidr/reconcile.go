package servicecidr

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/networking"
)

// Ranges are those of the cluster's configuration, one of each IP family it has.
type Ranges struct{ Services, Pods []netip.Prefix }

// Reasons of a ServiceCIDR that is not ready, beside upstream's "Terminating".
const (
	reasonOverlap = "OverlapsPods"
	reasonFamily  = "FamilyNotConfigured"
)

// Condition is the condition Ready of a ServiceCIDR. user is a Service that keeps
// one that is being deleted. Pure.
func (r Ranges) Condition(c *networkingv1.ServiceCIDR, user string) metav1.Condition {
	no := func(reason, message string, args ...any) metav1.Condition {
		return metav1.Condition{
			Type: networkingv1.ServiceCIDRConditionReady, Status: metav1.ConditionFalse, ObservedGeneration: c.Generation,
			Reason: reason, Message: fmt.Sprintf(message, args...),
		}
	}
	if c.DeletionTimestamp != nil {
		return no(networkingv1.ServiceCIDRReasonTerminating, "new Services get no address of it; it stays while Service %s has one that no other ServiceCIDR holds", user)
	}
	usable := false
	for _, cidr := range prefixes(c) {
		for _, pods := range r.Pods {
			if cidr.Overlaps(pods) {
				return no(reasonOverlap, "%s overlaps %s, the pods' range: delete this ServiceCIDR and choose another range", cidr, pods)
			}
		}
		usable = usable || slices.ContainsFunc(r.Services, func(s netip.Prefix) bool { return cidr.Addr().Is4() == s.Addr().Is4() })
	}
	if !usable {
		return no(reasonFamily, "the Services' addresses of this cluster, %s, are of the other IP family", r.Services[0])
	}
	return metav1.Condition{
		Type: networkingv1.ServiceCIDRConditionReady, Status: metav1.ConditionTrue, ObservedGeneration: c.Generation,
		Reason: "Usable", Message: "Services are given addresses of it",
	}
}

// widen is the default ServiceCIDR with the second range that the cluster has got
// since it was made; nil: it needs none. Pure.
func (r Ranges) widen(c *networkingv1.ServiceCIDR) *networkingv1.ServiceCIDR {
	want := newDefault(r.Services).Spec.CIDRs
	if c.Name != networking.DefaultServiceCIDR || c.DeletionTimestamp != nil || len(c.Spec.CIDRs) != 1 || len(want) != 2 || want[0] != c.Spec.CIDRs[0] {
		return nil
	}
	c = c.DeepCopy()
	c.Spec.CIDRs = want
	return c
}

// User is the first Service with an address of a ServiceCIDR that no other one
// holds which stays; "": there is none. Pure.
func User(going *networkingv1.ServiceCIDR, all []*networkingv1.ServiceCIDR, services []corev1.Service) string {
	var others []netip.Prefix
	for _, c := range all {
		if c.Name != going.Name {
			others = append(others, networking.ServiceRanges(c)...)
		}
	}
	within := func(ranges []netip.Prefix, address netip.Addr) bool {
		return slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return p.Contains(address) })
	}
	for i := range services {
		for _, text := range services[i].Spec.ClusterIPs {
			address, err := netip.ParseAddr(text)
			if err == nil && within(prefixes(going), address) && !within(others, address) {
				return services[i].Namespace + "/" + services[i].Name
			}
		}
	}
	return ""
}

func prefixes(c *networkingv1.ServiceCIDR) []netip.Prefix {
	var all []netip.Prefix
	for _, text := range c.Spec.CIDRs {
		if p, err := netip.ParsePrefix(text); err == nil {
			all = append(all, p)
		}
	}
	return all
}
