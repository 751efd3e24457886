package core

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// serviceWarnings returns what is allowed in a Service, but has no effect, or one that
// programs do not agree about.
func serviceWarnings(s *corev1.Service) []string {
	var warnings []string
	spec, at := &s.Spec, field.NewPath("spec")
	if _, ok := s.Annotations[corev1.DeprecatedAnnotationTopologyAwareHints]; ok {
		warnings = append(warnings, "annotation "+corev1.DeprecatedAnnotationTopologyAwareHints+" is deprecated, please use "+corev1.AnnotationTopologyMode+" instead")
	}
	switch {
	case spec.Type == corev1.ServiceTypeExternalName:
		if len(spec.ExternalIPs) > 0 {
			warnings = append(warnings, `spec.externalIPs is ignored when spec.type is "ExternalName"`)
		}
	case spec.ClusterIP == corev1.ClusterIPNone:
		if spec.LoadBalancerIP != "" {
			warnings = append(warnings, `spec.loadBalancerIP is ignored when spec.clusterIP is "None"`)
		}
		if len(spec.ExternalIPs) > 0 {
			warnings = append(warnings, `spec.externalIPs is ignored when spec.clusterIP is "None"`)
		}
		if spec.SessionAffinity != corev1.ServiceAffinityNone {
			warnings = append(warnings, "spec.SessionAffinity is ignored for headless services")
		}
	default:
		for i, ip := range spec.ClusterIPs {
			warnings = append(warnings, validation.GetWarningsForIP(at.Child("clusterIPs").Index(i), ip)...)
		}
	}
	for i, ip := range spec.ExternalIPs {
		warnings = append(warnings, validation.GetWarningsForIP(at.Child("externalIPs").Index(i), ip)...)
	}
	if spec.LoadBalancerIP != "" {
		warnings = append(warnings, validation.GetWarningsForIP(at.Child("loadBalancerIP"), spec.LoadBalancerIP)...)
	}
	for i, cidr := range spec.LoadBalancerSourceRanges {
		warnings = append(warnings, validation.GetWarningsForCIDR(at.Child("loadBalancerSourceRanges").Index(i), cidr)...)
	}
	return warnings
}
