package alloc

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	utilnet "k8s.io/utils/net"

	"github.com/clusterd/clusterd/apis/core"
)

// Families are the cluster's IP families: Services have addresses of the first one
// unless they ask for others.
type Families struct {
	order []corev1.IPFamily
	by    map[corev1.IPFamily]*Addresses
	had   hadAddresses
}

// NewFamilies takes one Addresses for each family of the cluster, one or two, in
// their order.
func NewFamilies(all ...*Addresses) *Families {
	f := &Families{by: map[corev1.IPFamily]*Addresses{}, had: hadAddresses{by: map[types.UID][]string{}}}
	for _, a := range all {
		family := corev1.IPv6Protocol
		if a.span.cidr.Addr().Is4() {
			family = corev1.IPv4Protocol
		}
		f.order = append(f.order, family)
		f.by[family] = a
	}
	return f
}

func (f *Families) dual() bool { return len(f.order) == 2 }

// withOther are the families with the one that is missing behind them.
func withOther(families []corev1.IPFamily) []corev1.IPFamily {
	if families[0] == corev1.IPv4Protocol {
		return append(slices.Clone(families), corev1.IPv6Protocol)
	}
	return append(slices.Clone(families), corev1.IPv4Protocol)
}

// settle makes policy, families and the number of addresses of a Service agree, and
// says what of them cannot be. old is what the Service had; nil: it had no
// addresses. A Service never gets or loses a family unless its policy, families or
// addresses are changed, whatever the cluster's families are by now.
func (f *Families) settle(spec, old *corev1.ServiceSpec) field.ErrorList {
	at := field.NewPath("spec")
	if old != nil && policyOf(old) == corev1.IPFamilyPolicyPreferDualStack && policyOf(spec) == corev1.IPFamilyPolicyPreferDualStack &&
		slices.Equal(spec.ClusterIPs, old.ClusterIPs) && slices.Equal(spec.IPFamilies, old.IPFamilies) {
		return nil
	}
	// The author of such a Service's endpoints knows their families.
	free := f.dual() && spec.ClusterIP == corev1.ClusterIPNone && len(spec.Selector) == 0
	if spec.IPFamilyPolicy == nil {
		policy := corev1.IPFamilyPolicySingleStack
		if free {
			policy = corev1.IPFamilyPolicyRequireDualStack
		}
		spec.IPFamilyPolicy = &policy
	}
	if errs := core.ValidateServiceAddresses(spec, at); len(errs) > 0 {
		return errs
	}
	single := policyOf(spec) == corev1.IPFamilyPolicySingleStack
	errs := reduce(spec, old, single, at)
	if single && len(spec.ClusterIPs) == 2 {
		errs = append(errs, field.Invalid(at.Child("ipFamilyPolicy"), *spec.IPFamilyPolicy, "must be 'RequireDualStack' or 'PreferDualStack' when multiple cluster IPs are specified"))
	}
	if single && len(spec.IPFamilies) == 2 {
		errs = append(errs, field.Invalid(at.Child("ipFamilyPolicy"), *spec.IPFamilyPolicy, "must be 'RequireDualStack' or 'PreferDualStack' when multiple IP families are specified"))
	}
	// An address that is named says its family.
	for i, ip := range spec.ClusterIPs {
		if ip == corev1.ClusterIPNone || i < len(spec.IPFamilies) {
			continue
		}
		family := corev1.IPv4Protocol
		if utilnet.IsIPv6String(ip) {
			family = corev1.IPv6Protocol
		}
		if f.by[family] == nil {
			errs = append(errs, field.Invalid(at.Child("clusterIPs").Index(i), spec.ClusterIPs, fmt.Sprintf("%s is not configured on this cluster", family)))
			continue
		}
		spec.IPFamilies = append(slices.Clone(spec.IPFamilies), family)
	}
	if len(errs) > 0 {
		return errs
	}
	if !free {
		errs = f.offered(spec, at)
	}
	if len(errs) > 0 {
		return errs
	}
	if len(spec.IPFamilies) == 0 {
		spec.IPFamilies = slices.Clone(f.order[:1])
	}
	if !single && len(spec.IPFamilies) == 1 && f.dual() {
		spec.IPFamilies = withOther(spec.IPFamilies)
	}
	return nil
}

// reduce takes the second address and family from a Service that is to have one
// family now; it must say so.
func reduce(spec, old *corev1.ServiceSpec, single bool, at *field.Path) field.ErrorList {
	if old == nil {
		return nil
	}
	if single {
		if len(spec.ClusterIPs) > 1 && slices.Equal(spec.ClusterIPs, old.ClusterIPs) {
			spec.ClusterIPs = spec.ClusterIPs[:1:1]
		}
		if len(spec.IPFamilies) > 1 && slices.Equal(spec.IPFamilies, old.IPFamilies) {
			spec.IPFamilies = spec.IPFamilies[:1:1]
		}
		return nil
	}
	var errs field.ErrorList
	if n := len(spec.ClusterIPs); n > 0 && n < len(old.ClusterIPs) {
		errs = append(errs, field.Invalid(at.Child("ipFamilyPolicy"), *spec.IPFamilyPolicy, "must be 'SingleStack' to release the secondary cluster IP"))
	}
	if n := len(spec.IPFamilies); n > 0 && n < len(old.IPFamilies) {
		errs = append(errs, field.Invalid(at.Child("ipFamilyPolicy"), *spec.IPFamilyPolicy, "must be 'SingleStack' to release the secondary IP family"))
	}
	return errs
}

// offered refuses what the cluster does not have.
func (f *Families) offered(spec *corev1.ServiceSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if policyOf(spec) == corev1.IPFamilyPolicyRequireDualStack && !f.dual() {
		errs = append(errs, field.Invalid(at.Child("ipFamilyPolicy"), *spec.IPFamilyPolicy, "this cluster is not configured for dual-stack services"))
	}
	for i, family := range spec.IPFamilies {
		if f.by[family] == nil {
			errs = append(errs, field.Invalid(at.Child("ipFamilies").Index(i), family, "not configured on this cluster"))
		}
	}
	return errs
}

func policyOf(spec *corev1.ServiceSpec) corev1.IPFamilyPolicy {
	if spec.IPFamilyPolicy == nil {
		return ""
	}
	return *spec.IPFamilyPolicy
}
