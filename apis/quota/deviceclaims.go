package quota

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	quota "k8s.io/apiserver/pkg/quota/v1"
	"k8s.io/apiserver/pkg/quota/v1/generic"
)

// resourceClaims are claims to devices.
var resourceClaims = schema.GroupResource{Group: resourcev1.GroupName, Resource: "resourceclaims"}

// deviceClaims count themselves and the devices that they ask for, by class: as
// many as a claim can get at the most, whatever it is given later. Requests with
// access for administrators count too, as upstream's do.
type deviceClaims struct{ counted }

// Handles implements quota.Evaluator: what a claim asks for never changes.
func (deviceClaims) Handles(a admission.Attributes) bool {
	return a.GetSubresource() == "" && a.GetOperation() == admission.Create
}

// MatchingResources implements quota.Evaluator.
func (c deviceClaims) MatchingResources(input []corev1.ResourceName) []corev1.ResourceName {
	var match []corev1.ResourceName
	for _, name := range input {
		if name == c.count() || ofDeviceClass(name) {
			match = append(match, name)
		}
	}
	return match
}

// ofDeviceClass reports whether a resource of a quota is the devices of a class.
func ofDeviceClass(name corev1.ResourceName) bool {
	return strings.HasSuffix(string(name), corev1.ResourceClaimsPerClass)
}

// Matches implements quota.Evaluator.
func (c deviceClaims) Matches(q *corev1.ResourceQuota, item runtime.Object) (bool, error) {
	return generic.Matches(q, item, c.MatchingResources, generic.MatchesNoScopeFunc)
}

// Usage implements quota.Evaluator.
func (c deviceClaims) Usage(item runtime.Object) (corev1.ResourceList, error) {
	claim, ok := item.(*resourcev1.ResourceClaim)
	if !ok {
		return nil, fmt.Errorf("measure a %T as a ResourceClaim", item)
	}
	most := map[string]int64{} // by class
	for i := range claim.Spec.Devices.Requests {
		r := &claim.Spec.Devices.Requests[i]
		if e := r.Exactly; e != nil {
			most[e.DeviceClassName] += atMost(e.AllocationMode, e.Count)
		}
		// One of the alternatives is met: the greatest of each class.
		alternatives := map[string]int64{}
		for j := range r.FirstAvailable {
			sub := &r.FirstAvailable[j]
			alternatives[sub.DeviceClassName] = max(alternatives[sub.DeviceClassName], atMost(sub.AllocationMode, sub.Count))
		}
		for class, n := range alternatives {
			most[class] += n
		}
	}
	used := corev1.ResourceList{c.count(): one()}
	for class, n := range most {
		used[corev1.ResourceName(class+corev1.ResourceClaimsPerClass)] = *resource.NewQuantity(n, resource.DecimalSI)
	}
	return used, nil
}

// atMost is how many devices a request can get: as many as a claim can have, where it
// asks for all. A mode that is not known counts nothing.
func atMost(mode resourcev1.DeviceAllocationMode, count int64) int64 {
	switch mode {
	case resourcev1.DeviceAllocationModeExactCount:
		return count
	case resourcev1.DeviceAllocationModeAll:
		return resourcev1.AllocationResultsMaxSize
	}
	return 0
}

// UsageStats implements quota.Evaluator.
func (c deviceClaims) UsageStats(o quota.UsageStatsOptions) (quota.UsageStats, error) {
	return generic.CalculateUsageStats(o, c.list, generic.MatchesNoScopeFunc, c.Usage)
}
