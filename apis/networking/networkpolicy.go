package networking

import (
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// NetworkPolicy is the kind NetworkPolicy.
func NetworkPolicy() kind.Kind {
	return kind.Typed[*networkingv1.NetworkPolicy]{
		GVK:        networkingv1.SchemeGroupVersion.WithKind("NetworkPolicy"),
		Resource:   "networkpolicies",
		Singular:   "networkpolicy",
		ShortNames: []string{"netpol"},
		Namespaced: true,

		New:     func() runtime.Object { return &networkingv1.NetworkPolicy{} },
		NewList: func() runtime.Object { return &networkingv1.NetworkPolicyList{} },

		Default:       defaultNetworkPolicy,
		PrepareCreate: func(p *networkingv1.NetworkPolicy) { p.Generation = 1 },
		PrepareUpdate: func(p, old *networkingv1.NetworkPolicy) {
			p.Generation = old.Generation
			if !equality.Semantic.DeepEqual(p.Spec, old.Spec) {
				p.Generation++
			}
		},
		Validate: func(p *networkingv1.NetworkPolicy) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&p.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			return append(errs, validatePolicySpec(&p.Spec, nil, field.NewPath("spec"))...)
		},
		ValidateUpdate: func(p, old *networkingv1.NetworkPolicy) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&p.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			return append(errs, validatePolicySpec(&p.Spec, blocksOf(&old.Spec), field.NewPath("spec"))...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Pod-Selector", networkingv1.NetworkPolicySpec{}.SwaggerDoc()["podSelector"]),
			cells.Age,
		},
		Row: func(p *networkingv1.NetworkPolicy, now time.Time) []any {
			return []any{p.Name, metav1.FormatLabelSelector(&p.Spec.PodSelector), cells.Since(p.CreationTimestamp, now)}
		},

		UnconditionalUpdate: true,
	}.Kind()
}

// defaultNetworkPolicy: a policy that says nothing of its types isolates for
// ingress, and for egress if it has rules for it.
func defaultNetworkPolicy(p *networkingv1.NetworkPolicy) {
	for _, rule := range p.Spec.Ingress {
		defaultPorts(rule.Ports)
	}
	for _, rule := range p.Spec.Egress {
		defaultPorts(rule.Ports)
	}
	if len(p.Spec.PolicyTypes) == 0 {
		p.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
		if len(p.Spec.Egress) != 0 {
			p.Spec.PolicyTypes = append(p.Spec.PolicyTypes, networkingv1.PolicyTypeEgress)
		}
	}
}

func defaultPorts(ports []networkingv1.NetworkPolicyPort) {
	for i := range ports {
		if ports[i].Protocol == nil {
			tcp := corev1.ProtocolTCP
			ports[i].Protocol = &tcp
		}
	}
}

// blocksOf are the ranges that a policy names. They were let in once, and stay good
// while they are not changed.
func blocksOf(spec *networkingv1.NetworkPolicySpec) (all []string) {
	add := func(peers []networkingv1.NetworkPolicyPeer) {
		for _, p := range peers {
			if p.IPBlock != nil {
				all = append(append(all, p.IPBlock.CIDR), p.IPBlock.Except...)
			}
		}
	}
	for _, rule := range spec.Ingress {
		add(rule.From)
	}
	for _, rule := range spec.Egress {
		add(rule.To)
	}
	return all
}

// validatePolicySpec checks a policy; had are the ranges that it had before.
func validatePolicySpec(spec *networkingv1.NetworkPolicySpec, had []string, at *field.Path) field.ErrorList {
	errs := check.LabelSelector(at.Child("podSelector"), &spec.PodSelector)
	for i, rule := range spec.Ingress {
		at := at.Child("ingress").Index(i)
		errs = append(errs, validatePolicyPorts(rule.Ports, at.Child("ports"))...)
		errs = append(errs, validatePeers(rule.From, had, at.Child("from"))...)
	}
	for i, rule := range spec.Egress {
		at := at.Child("egress").Index(i)
		errs = append(errs, validatePolicyPorts(rule.Ports, at.Child("ports"))...)
		errs = append(errs, validatePeers(rule.To, had, at.Child("to"))...)
	}
	types := at.Child("policyTypes")
	if len(spec.PolicyTypes) > 2 {
		return append(errs, field.Invalid(types, spec.PolicyTypes, "may not specify more than two policyTypes"))
	}
	for i, t := range spec.PolicyTypes {
		errs = append(errs, check.OneOf(types.Index(i), t, networkingv1.PolicyTypeEgress, networkingv1.PolicyTypeIngress)...)
	}
	return errs
}

func validatePolicyPorts(ports []networkingv1.NetworkPolicyPort, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, p := range ports {
		at := at.Index(i)
		errs = append(errs, check.OneOfOrNil(at.Child("protocol"), p.Protocol, corev1.ProtocolSCTP, corev1.ProtocolTCP, corev1.ProtocolUDP)...)
		if p.Port != nil {
			errs = append(errs, check.Port(at.Child("port"), *p.Port)...)
		}
		if p.EndPort == nil {
			continue
		}
		end := at.Child("endPort")
		switch {
		case p.Port == nil:
			errs = append(errs, field.Required(at.Child("port"), "must be specified when endPort is"))
		case p.Port.Type == intstr.String:
			errs = append(errs, field.Invalid(end, *p.EndPort, "may not be specified when port is a name"))
		case *p.EndPort < p.Port.IntVal:
			errs = append(errs, field.Invalid(end, *p.EndPort, "must be greater than or equal to port"))
		default:
			errs = append(errs, check.PortNumber(end, *p.EndPort)...)
		}
	}
	return errs
}

func validatePeers(peers []networkingv1.NetworkPolicyPeer, had []string, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, p := range peers {
		at := at.Index(i)
		errs = append(errs, check.LabelSelector(at.Child("podSelector"), p.PodSelector)...)
		errs = append(errs, check.LabelSelector(at.Child("namespaceSelector"), p.NamespaceSelector)...)
		switch {
		case p.IPBlock == nil && p.PodSelector == nil && p.NamespaceSelector == nil:
			errs = append(errs, field.Required(at, "must specify a peer: podSelector, namespaceSelector or ipBlock"))
		case p.IPBlock != nil && (p.PodSelector != nil || p.NamespaceSelector != nil):
			errs = append(errs, field.Forbidden(at, "may not specify both ipBlock and another peer"))
		}
		if p.IPBlock != nil {
			errs = append(errs, validateBlock(p.IPBlock, had, at.Child("ipBlock"))...)
		}
	}
	return errs
}

func validateBlock(b *networkingv1.IPBlock, had []string, at *field.Path) field.ErrorList {
	if b.CIDR == "" {
		return field.ErrorList{field.Required(at.Child("cidr"), "")}
	}
	errs := validation.IsValidCIDRForLegacyField(at.Child("cidr"), b.CIDR, true, had)
	cidr, err := netip.ParsePrefix(b.CIDR)
	for i, text := range b.Except {
		at := at.Child("except").Index(i)
		if more := validation.IsValidCIDRForLegacyField(at, text, true, had); len(more) > 0 {
			errs = append(errs, more...)
			continue
		}
		except, exceptErr := netip.ParsePrefix(text)
		if exceptErr != nil && slices.Contains(had, text) {
			continue
		}
		if err == nil && (exceptErr != nil || !cidr.Masked().Contains(except.Addr()) || except.Bits() <= cidr.Bits()) {
			errs = append(errs, field.Invalid(at, text, "must be a strict subset of cidr "+b.CIDR))
		}
	}
	return errs
}
