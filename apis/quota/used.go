package quota

import (
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	quota "k8s.io/apiserver/pkg/quota/v1"
	"k8s.io/apiserver/pkg/quota/v1/generic"
)

// Resources are those that a quota with these bounds is about: pods, Services
// and claims to volumes, claims to devices if it bounds those, and what it counts by
// number.
func Resources(hard corev1.ResourceList) []schema.GroupResource {
	resources := []schema.GroupResource{corev1.Resource("pods"), corev1.Resource("services"), corev1.Resource("persistentvolumeclaims")}
	seen := map[schema.GroupResource]bool{}
	for _, r := range resources {
		seen[r] = true
	}
	add := func(r schema.GroupResource) {
		if !seen[r] {
			seen[r] = true
			resources = append(resources, r)
		}
	}
	for name := range hard {
		if counted, ok := strings.CutPrefix(string(name), "count/"); ok {
			add(schema.ParseGroupResource(counted))
		}
		if ofDeviceClass(name) {
			add(resourceClaims)
		}
	}
	for r, alias := range aliases {
		if _, ok := hard[alias]; ok {
			add(r)
		}
	}
	return resources
}

// Used is what the objects in the namespace of q use of what it bounds; now is the
// clock by which pods are past their end.
func Used(q *corev1.ResourceQuota, resources []schema.GroupResource, list List, now func() time.Time) (corev1.ResourceList, error) {
	registry := generic.NewRegistry(Evaluators(resources, list, now))
	used, err := quota.CalculateUsage(q.Namespace, q.Spec.Scopes, q.Spec.Hard, registry, q.Spec.ScopeSelector)
	if err != nil {
		return nil, err
	}
	// A resource without a measure counts as unused.
	return quota.Mask(quota.Add(zero(q.Spec.Hard), used), quota.ResourceNames(q.Spec.Hard)), nil
}

func zero(hard corev1.ResourceList) corev1.ResourceList {
	list := corev1.ResourceList{}
	for name, quantity := range hard {
		none := quantity.DeepCopy()
		none.Set(0)
		list[name] = none
	}
	return list
}

// Configuration is what the library's admission plugin measures by. Kinds that
// are not among resources are counted by number.
func Configuration(resources []schema.GroupResource, list List) quota.Configuration {
	return generic.NewConfiguration(Evaluators(resources, list, time.Now), Ignored())
}
