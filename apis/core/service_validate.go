package core

import (
	"fmt"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check"
)

// maxAffinitySeconds is a day.
const maxAffinitySeconds = 24 * 60 * 60

func validateService(s *corev1.Service) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&s.ObjectMeta, true, apivalidation.NameIsDNS1035Label, field.NewPath("metadata"))
	return append(errs, validateServiceSpec(&s.Spec, &corev1.ServiceSpec{}, field.NewPath("spec"))...)
}

// validateServiceSpec checks a Service; addresses that old had were let in once, and stay
// good.
func validateServiceSpec(spec, old *corev1.ServiceSpec, at *field.Path) field.ErrorList {
	errs := check.OneOf(at.Child("type"), spec.Type,
		corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeExternalName)
	errs = append(errs, metav1validation.ValidateLabels(spec.Selector, at.Child("selector"))...)
	errs = append(errs, validateServicePorts(spec, at.Child("ports"))...)
	errs = append(errs, validateAffinity(spec, at)...)
	errs = append(errs, validateClusterIPs(spec, old, at)...)
	errs = append(errs, validateTraffic(spec, at)...)
	if spec.Type == corev1.ServiceTypeExternalName {
		errs = append(errs, check.RequiredText(at.Child("externalName"), strings.TrimSuffix(spec.ExternalName, "."), check.Subdomain)...)
	}
	had := sets.New(old.ExternalIPs...)
	for i, ip := range spec.ExternalIPs {
		if had.Has(ip) {
			continue
		}
		external := at.Child("externalIPs").Index(i)
		bad := validation.IsValidIPForLegacyField(external, ip, true, nil)
		if addr, err := netip.ParseAddr(ip); err == nil && len(bad) == 0 {
			bad = check.Reachable(external, addr) // a Service there would take what each node keeps for itself
		}
		errs = append(errs, bad...)
	}
	for i, cidr := range spec.LoadBalancerSourceRanges {
		errs = append(errs, validation.IsValidCIDRForLegacyField(at.Child("loadBalancerSourceRanges").Index(i), strings.TrimSpace(cidr), true, trimmed(old.LoadBalancerSourceRanges))...)
	}
	if len(spec.LoadBalancerSourceRanges) > 0 && spec.Type != corev1.ServiceTypeLoadBalancer {
		errs = append(errs, field.Forbidden(at.Child("loadBalancerSourceRanges"), "may only be used when `type` is 'LoadBalancer'"))
	}
	if spec.LoadBalancerClass != nil {
		if spec.Type != corev1.ServiceTypeLoadBalancer {
			errs = append(errs, field.Forbidden(at.Child("loadBalancerClass"), "may only be used when `type` is 'LoadBalancer'"))
		}
		errs = append(errs, check.Text(at.Child("loadBalancerClass"), *spec.LoadBalancerClass, validation.IsQualifiedName)...)
	}
	if spec.AllocateLoadBalancerNodePorts != nil && spec.Type != corev1.ServiceTypeLoadBalancer {
		errs = append(errs, field.Forbidden(at.Child("allocateLoadBalancerNodePorts"), "may only be used when `type` is 'LoadBalancer'"))
	}
	return errs
}

func trimmed(texts []string) (out []string) {
	for _, text := range texts {
		out = append(out, strings.TrimSpace(text))
	}
	return out
}

func isHeadless(spec *corev1.ServiceSpec) bool {
	return spec.Type == corev1.ServiceTypeClusterIP && spec.ClusterIP == corev1.ClusterIPNone
}

func validateServicePorts(spec *corev1.ServiceSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if len(spec.Ports) == 0 && !isHeadless(spec) && spec.Type != corev1.ServiceTypeExternalName {
		errs = append(errs, field.Required(at, ""))
	}
	names := sets.New[string]()
	ports, nodePorts := map[portKey]bool{}, map[portKey]bool{}
	for i := range spec.Ports {
		port, at := &spec.Ports[i], at.Index(i)
		switch {
		case port.Name == "" && len(spec.Ports) > 1:
			errs = append(errs, field.Required(at.Child("name"), ""))
		case port.Name != "":
			errs = append(errs, check.Text(at.Child("name"), port.Name, validation.IsDNS1123Label)...)
			if names.Has(port.Name) {
				errs = append(errs, field.Duplicate(at.Child("name"), port.Name))
			}
			names.Insert(port.Name)
		}
		errs = append(errs, check.PortNumber(at.Child("port"), port.Port)...)
		errs = append(errs, validateProtocol(port.Protocol, at.Child("protocol"))...)
		errs = append(errs, check.Port(at.Child("targetPort"), port.TargetPort)...)
		if port.AppProtocol != nil {
			errs = append(errs, check.Text(at.Child("appProtocol"), *port.AppProtocol, validation.IsQualifiedName)...)
		}
		if key := (portKey{port.Protocol, port.Port}); ports[key] {
			errs = append(errs, field.Duplicate(at, corev1.ServicePort{Protocol: port.Protocol, Port: port.Port}))
		} else {
			ports[key] = true
		}
		if port.NodePort == 0 {
			continue
		}
		if spec.Type == corev1.ServiceTypeClusterIP || spec.Type == corev1.ServiceTypeExternalName {
			errs = append(errs, field.Forbidden(at.Child("nodePort"), fmt.Sprintf("may not be used when `type` is '%s'", spec.Type)))
		}
		errs = append(errs, check.PortNumber(at.Child("nodePort"), port.NodePort)...)
		if key := (portKey{port.Protocol, port.NodePort}); nodePorts[key] {
			errs = append(errs, field.Duplicate(at.Child("nodePort"), port.NodePort))
		} else {
			nodePorts[key] = true
		}
	}
	return errs
}

func validateAffinity(spec *corev1.ServiceSpec, at *field.Path) field.ErrorList {
	errs := check.OneOf(at.Child("sessionAffinity"), spec.SessionAffinity, corev1.ServiceAffinityClientIP, corev1.ServiceAffinityNone)
	config := at.Child("sessionAffinityConfig")
	switch spec.SessionAffinity {
	case corev1.ServiceAffinityClientIP:
		if spec.SessionAffinityConfig == nil || spec.SessionAffinityConfig.ClientIP == nil || spec.SessionAffinityConfig.ClientIP.TimeoutSeconds == nil {
			return append(errs, field.Required(config, fmt.Sprintf("when session affinity type is %s", corev1.ServiceAffinityClientIP)))
		}
		if seconds := *spec.SessionAffinityConfig.ClientIP.TimeoutSeconds; seconds <= 0 || seconds > maxAffinitySeconds {
			errs = append(errs, field.Invalid(config.Child("clientIP", "timeoutSeconds"), seconds, fmt.Sprintf("must be greater than 0 and less than %d", maxAffinitySeconds)))
		}
	case corev1.ServiceAffinityNone:
		if spec.SessionAffinityConfig != nil {
			errs = append(errs, field.Forbidden(config, fmt.Sprintf("must not be set when session affinity is %s", corev1.ServiceAffinityNone)))
		}
	}
	return errs
}

func validateClusterIPs(spec, old *corev1.ServiceSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	ips := at.Child("clusterIPs")
	if spec.Type == corev1.ServiceTypeExternalName {
		for _, f := range []struct {
			name string
			set  bool
		}{
			{"clusterIPs", spec.ClusterIP != "" || len(spec.ClusterIPs) > 0},
			{"ipFamilies", len(spec.IPFamilies) > 0},
			{"ipFamilyPolicy", spec.IPFamilyPolicy != nil},
		} {
			if f.set {
				errs = append(errs, field.Forbidden(at.Child(f.name), "may not be set for ExternalName services"))
			}
		}
		return errs
	}
	if len(spec.ClusterIPs) > 0 && spec.ClusterIPs[0] != spec.ClusterIP {
		errs = append(errs, field.Invalid(ips, spec.ClusterIPs, "first value must match `clusterIP`"))
	}
	if len(spec.ClusterIPs) > 2 {
		errs = append(errs, field.Invalid(ips, spec.ClusterIPs, "may only hold up to 2 values"))
	}
	for i, ip := range spec.ClusterIPs {
		if ip != corev1.ClusterIPNone {
			errs = append(errs, validation.IsValidIPForLegacyField(ips.Index(i), ip, true, old.ClusterIPs)...)
			continue
		}
		if i > 0 || len(spec.ClusterIPs) > 1 {
			errs = append(errs, field.Invalid(ips.Index(i), ip, "'None' must be the first and only value"))
		}
		if spec.Type != corev1.ServiceTypeClusterIP {
			errs = append(errs, field.Invalid(ips.Index(i), ip, fmt.Sprintf("may not be set to 'None' for %s services", spec.Type)))
		}
	}
	errs = append(errs, validateFamilies(spec, at)...)
	return errs
}

// ValidateServiceAddresses checks what a Service that is no ExternalName says of
// its cluster addresses and their families.
func ValidateServiceAddresses(spec *corev1.ServiceSpec, at *field.Path) field.ErrorList {
	return validateClusterIPs(spec, &corev1.ServiceSpec{}, at)
}

// validateFamilies: one address of each family, in the order of ipFamilies.
func validateFamilies(spec *corev1.ServiceSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	families, ips := at.Child("ipFamilies"), at.Child("clusterIPs")
	if len(spec.IPFamilies) > 2 {
		errs = append(errs, field.Invalid(families, spec.IPFamilies, "may only hold up to 2 values"))
	}
	seen := sets.New[corev1.IPFamily]()
	for i, family := range spec.IPFamilies {
		errs = append(errs, check.OneOf(families.Index(i), family, corev1.IPv4Protocol, corev1.IPv6Protocol)...)
		if seen.Has(family) {
			errs = append(errs, field.Duplicate(families.Index(i), family))
		}
		seen.Insert(family)
	}
	errs = append(errs, check.OneOfOrNil(at.Child("ipFamilyPolicy"), spec.IPFamilyPolicy,
		corev1.IPFamilyPolicySingleStack, corev1.IPFamilyPolicyPreferDualStack, corev1.IPFamilyPolicyRequireDualStack)...)
	if len(errs) > 0 || len(spec.ClusterIPs) > 0 && spec.ClusterIPs[0] == corev1.ClusterIPNone {
		return errs
	}
	six := func(ip string) bool { return strings.Contains(ip, ":") }
	if len(spec.ClusterIPs) == 2 && six(spec.ClusterIPs[0]) == six(spec.ClusterIPs[1]) {
		return append(errs, field.Invalid(ips, spec.ClusterIPs, "may specify no more than one IP for each IP family"))
	}
	for i, ip := range spec.ClusterIPs {
		if i < len(spec.IPFamilies) && six(ip) != (spec.IPFamilies[i] == corev1.IPv6Protocol) {
			errs = append(errs, field.Invalid(ips.Index(i), ip, fmt.Sprintf("expected an %v value as indicated by `ipFamilies[%d]`", spec.IPFamilies[i], i)))
		}
	}
	return errs
}

func validateTraffic(spec *corev1.ServiceSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	external := at.Child("externalTrafficPolicy")
	switch {
	case reachedFromOutside(spec):
		errs = append(errs, check.OneOf(external, spec.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)...)
	case spec.ExternalTrafficPolicy != "":
		errs = append(errs, field.Invalid(external, spec.ExternalTrafficPolicy, "may only be set for externally-accessible services"))
	}
	if needsHealthPort(spec) {
		if spec.HealthCheckNodePort != 0 {
			errs = append(errs, check.PortNumber(at.Child("healthCheckNodePort"), spec.HealthCheckNodePort)...)
		}
	} else if spec.HealthCheckNodePort != 0 {
		errs = append(errs, field.Invalid(at.Child("healthCheckNodePort"), spec.HealthCheckNodePort, "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'"))
	}
	if spec.Type != corev1.ServiceTypeExternalName && spec.InternalTrafficPolicy == nil {
		errs = append(errs, field.Required(at.Child("internalTrafficPolicy"), ""))
	}
	errs = append(errs, check.OneOfOrNil(at.Child("internalTrafficPolicy"), spec.InternalTrafficPolicy, corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal)...)
	errs = append(errs, check.OneOfOrNil(at.Child("trafficDistribution"), spec.TrafficDistribution,
		corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameZone, corev1.ServiceTrafficDistributionPreferSameNode)...)
	return errs
}

func validateServiceUpdate(s, old *corev1.Service) field.ErrorList {
	errs := apivalidation.ValidateObjectMetaUpdate(&s.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	errs = append(errs, validateServiceSpec(&s.Spec, &old.Spec, field.NewPath("spec"))...)
	errs = append(errs, validateClusterIPUpdate(&s.Spec, &old.Spec, field.NewPath("spec"))...)
	const balanced = corev1.ServiceTypeLoadBalancer
	if s.Spec.Type == balanced && old.Spec.Type == balanced && !ptrEqual(s.Spec.LoadBalancerClass, old.Spec.LoadBalancerClass) {
		// Neither program would know that the addresses in the status are the other's.
		errs = append(errs, field.Invalid(field.NewPath("spec", "loadBalancerClass"), ptr.Deref(s.Spec.LoadBalancerClass, ""), "may not change once set"))
	}
	return errs
}

// validateClusterIPUpdate: clients and names point at the addresses, so they stay
// for as long as the service has them. The second one may come and go.
func validateClusterIPUpdate(spec, old *corev1.ServiceSpec, at *field.Path) field.ErrorList {
	if old.Type == corev1.ServiceTypeExternalName || spec.Type == corev1.ServiceTypeExternalName || old.ClusterIP == "" {
		return nil
	}
	ips, families := at.Child("clusterIPs"), at.Child("ipFamilies")
	switch spec.ClusterIP {
	case old.ClusterIP:
	case "":
		return field.ErrorList{field.Invalid(ips.Index(0), spec.ClusterIPs, "primary clusterIP can not be unset")}
	default:
		return field.ErrorList{field.Invalid(ips.Index(0), spec.ClusterIPs, "may not change once set")}
	}
	var errs field.ErrorList
	if len(spec.ClusterIPs) == 2 && len(old.ClusterIPs) == 2 && spec.ClusterIPs[1] != old.ClusterIPs[1] {
		errs = append(errs, field.Invalid(ips.Index(1), spec.ClusterIPs, "may not change once set"))
	}
	// Whoever fills in the endpoints knows their families.
	free := isHeadless(spec) && len(spec.Selector) == 0
	if !free && len(spec.IPFamilies) > 0 && len(old.IPFamilies) > 0 && spec.IPFamilies[0] != old.IPFamilies[0] {
		errs = append(errs, field.Invalid(families.Index(0), spec.IPFamilies, "may not change once set"))
	}
	return errs
}

func validateServiceStatusUpdate(s, old *corev1.Service) field.ErrorList {
	errs := apivalidation.ValidateObjectMetaUpdate(&s.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	at := field.NewPath("status", "loadBalancer", "ingress")
	var had []string
	for _, ingress := range old.Status.LoadBalancer.Ingress {
		had = append(had, ingress.IP)
	}
	if len(s.Status.LoadBalancer.Ingress) > 0 && s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return append(errs, field.Forbidden(at, "may only be used when `spec.type` is \"LoadBalancer\""))
	}
	for i, ingress := range s.Status.LoadBalancer.Ingress {
		if ingress.IP != "" {
			errs = append(errs, validation.IsValidIPForLegacyField(at.Index(i).Child("ip"), ingress.IP, true, had)...)
		}
		switch mode := at.Index(i).Child("ipMode"); {
		case ingress.IPMode == nil:
		case ingress.IP == "":
			errs = append(errs, field.Forbidden(mode, "may not be specified when `ip` is not set"))
		default:
			errs = append(errs, check.OneOf(mode, *ingress.IPMode, corev1.LoadBalancerIPModeProxy, corev1.LoadBalancerIPModeVIP)...)
		}
		if ingress.Hostname != "" {
			errs = append(errs, check.Text(at.Index(i).Child("hostname"), ingress.Hostname, check.Subdomain)...)
		}
	}
	return errs
}
