package endpointslice

import (
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// hints says for which zone and node an endpoint is meant by the Service's
// trafficDistribution: its own. A proxy that finds no endpoint with a hint for it takes
// all; so do all nodes while an endpoint has no hint, as its zone is unknown.
// Endpoints that are not ready have none: they are used when nothing else is
// left, wherever they are.
func hints(distribution *string, e discoveryv1.Endpoint) *discoveryv1.EndpointHints {
	if distribution == nil || !*e.Conditions.Ready {
		return nil
	}
	h := &discoveryv1.EndpointHints{}
	switch *distribution {
	case corev1.ServiceTrafficDistributionPreferSameNode:
		h.ForNodes = []discoveryv1.ForNode{{Name: *e.NodeName}}
	case corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameZone:
	default:
		return nil // of a later API: validation takes the three alone
	}
	if e.Zone != nil {
		h.ForZones = []discoveryv1.ForZone{{Name: *e.Zone}}
	}
	if len(h.ForNodes)+len(h.ForZones) == 0 {
		return nil
	}
	return h
}
