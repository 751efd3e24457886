package core

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// TestQuotaNames: a quota bounds what is known, or has a domain.
func TestQuotaNames(t *testing.T) {
	for name, ok := range map[string]bool{
		"pods": true, "cpu": true, "requests.cpu": true, "limits.memory": true, "requests.storage": true, "requests.ephemeral-storage": true,
		"hugepages-2Mi": true, "requests.hugepages-1Gi": true, "services.nodeports": true, "count/deployments.apps": true,
		"requests.nvidia.com/gpu": true, "gpu.deviceclass.resource.k8s.io/devices": true, "requests.deviceclass.resource.kubernetes.io/gpu": true,
		"count/resourceclaims.resource.k8s.io": true, "gold.storageclass.storage.k8s.io/requests.storage": true,
		"podz": false, "request.cpu": false, "limits.pods": false, "cores": false,
	} {
		spec := &corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{corev1.ResourceName(name): resource.MustParse("1")}}
		errs := validateQuotaSpec(spec, &corev1.ResourceQuotaSpec{})
		if (len(errs) == 0) != ok || !ok && !strings.Contains(errs[0].Error(), "spec.hard["+name+"]") {
			t.Errorf("%s: %v", name, errs)
		}
		// What a version stored that did not check names goes on.
		if errs := validateQuotaSpec(spec, spec); len(errs) > 0 {
			t.Errorf("%s, stored before: %v", name, errs)
		}
	}
}
