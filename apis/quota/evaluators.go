// Package quota measures what counts against the ResourceQuotas of a
// namespace. It decides nothing: the library's plugin compares, and a loop
// writes the sums down.
package quota

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/admission"
	quota "k8s.io/apiserver/pkg/quota/v1"
	"k8s.io/apiserver/pkg/quota/v1/generic"
	resourcehelper "k8s.io/component-helpers/resource"
	volumehelper "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/core"
)

// List gives the objects of a resource in a namespace.
type List func(resource schema.GroupResource, namespace string) ([]runtime.Object, error)

// names by which the number of objects of a kind was counted before
// count/RESOURCE.GROUP.
var aliases = map[schema.GroupResource]corev1.ResourceName{
	corev1.Resource("configmaps"):             corev1.ResourceConfigMaps,
	corev1.Resource("secrets"):                corev1.ResourceSecrets,
	corev1.Resource("replicationcontrollers"): corev1.ResourceReplicationControllers,
	corev1.Resource("resourcequotas"):         corev1.ResourceQuotas,
}

// Ignored are the resources that no quota counts.
func Ignored() map[schema.GroupResource]struct{} {
	return map[schema.GroupResource]struct{}{
		corev1.Resource("events"):                                              {},
		{Group: "events.k8s.io", Resource: "events"}:                           {},
		corev1.Resource("bindings"):                                            {},
		{Group: "authorization.k8s.io", Resource: "localsubjectaccessreviews"}: {},
	}
}

// Evaluators are those of the namespaced resources: pods, Services and claims to
// volumes and devices by what they ask for, and all by their number. now is the clock
// by which pods are past their end.
func Evaluators(resources []schema.GroupResource, list List, now func() time.Time) []quota.Evaluator {
	var all []quota.Evaluator
	for _, r := range resources {
		of := func(namespace string) ([]runtime.Object, error) { return list(r, namespace) }
		switch r {
		case corev1.Resource("pods"):
			all = append(all, pods{counted{r, of}, now})
		case corev1.Resource("services"):
			all = append(all, services{counted{r, of}})
		case corev1.Resource("persistentvolumeclaims"):
			all = append(all, claims{counted{r, of}})
		case resourceClaims:
			all = append(all, deviceClaims{counted{r, of}})
		default:
			all = append(all, generic.NewObjectCountEvaluator(r, of, aliases[r]))
		}
	}
	return all
}

// counted is what the evaluators share.
type counted struct {
	resource schema.GroupResource
	list     generic.ListFuncByNamespace
}

// GroupResource implements quota.Evaluator.
func (c counted) GroupResource() schema.GroupResource { return c.resource }

// Constraints implements quota.Evaluator.
func (counted) Constraints([]corev1.ResourceName, runtime.Object) error { return nil }

// MatchingScopes implements quota.Evaluator.
func (counted) MatchingScopes(runtime.Object, []corev1.ScopedResourceSelectorRequirement) ([]corev1.ScopedResourceSelectorRequirement, error) {
	return nil, nil
}

// UncoveredQuotaScopes implements quota.Evaluator.
func (counted) UncoveredQuotaScopes([]corev1.ScopedResourceSelectorRequirement, []corev1.ScopedResourceSelectorRequirement) ([]corev1.ScopedResourceSelectorRequirement, error) {
	return nil, nil
}

func (c counted) count() corev1.ResourceName {
	return generic.ObjectCountQuotaResourceNameFor(c.resource)
}

func one() resource.Quantity { return *resource.NewQuantity(1, resource.DecimalSI) }

// services count themselves, their node ports and their load balancers.
type services struct{ counted }

// Handles implements quota.Evaluator.
func (services) Handles(a admission.Attributes) bool {
	return a.GetSubresource() == "" && (a.GetOperation() == admission.Create || a.GetOperation() == admission.Update)
}

// MatchingResources implements quota.Evaluator.
func (s services) MatchingResources(input []corev1.ResourceName) []corev1.ResourceName {
	return quota.Intersection(input, []corev1.ResourceName{s.count(), corev1.ResourceServices, corev1.ResourceServicesNodePorts, corev1.ResourceServicesLoadBalancers})
}

// Matches implements quota.Evaluator.
func (s services) Matches(q *corev1.ResourceQuota, item runtime.Object) (bool, error) {
	return generic.Matches(q, item, s.MatchingResources, generic.MatchesNoScopeFunc)
}

// Usage implements quota.Evaluator.
func (s services) Usage(item runtime.Object) (corev1.ResourceList, error) {
	service, ok := item.(*corev1.Service)
	if !ok {
		return nil, fmt.Errorf("measure a %T as a Service", item)
	}
	used := corev1.ResourceList{s.count(): one(), corev1.ResourceServices: one(), corev1.ResourceServicesNodePorts: {}, corev1.ResourceServicesLoadBalancers: {}}
	ports := int64(len(service.Spec.Ports))
	switch service.Spec.Type {
	case corev1.ServiceTypeNodePort:
		used[corev1.ResourceServicesNodePorts] = *resource.NewQuantity(ports, resource.DecimalSI)
	case corev1.ServiceTypeLoadBalancer:
		used[corev1.ResourceServicesLoadBalancers] = one()
		if !ptr.Deref(service.Spec.AllocateLoadBalancerNodePorts, true) {
			ports = named(service.Spec.Ports) // it is given none, and keeps those that it names
		}
		used[corev1.ResourceServicesNodePorts] = *resource.NewQuantity(ports, resource.DecimalSI)
	}
	return used, nil
}

// named is how many of the ports have a node port.
func named(ports []corev1.ServicePort) (n int64) {
	for i := range ports {
		if ports[i].NodePort != 0 {
			n++
		}
	}
	return n
}

// UsageStats implements quota.Evaluator.
func (s services) UsageStats(o quota.UsageStatsOptions) (quota.UsageStats, error) {
	return generic.CalculateUsageStats(o, s.list, generic.MatchesNoScopeFunc, s.Usage)
}

// claims count themselves and the storage they ask for, together and by class.
type claims struct{ counted }

const classSuffix = ".storageclass.storage.k8s.io/"

// Handles implements quota.Evaluator.
func (claims) Handles(a admission.Attributes) bool {
	return a.GetSubresource() == "" && (a.GetOperation() == admission.Create || a.GetOperation() == admission.Update)
}

// MatchingResources implements quota.Evaluator.
func (c claims) MatchingResources(input []corev1.ResourceName) []corev1.ResourceName {
	var match []corev1.ResourceName
	for _, name := range input {
		if name == c.count() || name == corev1.ResourcePersistentVolumeClaims || name == corev1.ResourceRequestsStorage || strings.Contains(string(name), classSuffix) {
			match = append(match, name)
		}
	}
	return match
}

// Matches implements quota.Evaluator.
func (c claims) Matches(q *corev1.ResourceQuota, item runtime.Object) (bool, error) {
	return generic.Matches(q, item, c.MatchingResources, claimInScope)
}

// MatchingScopes implements quota.Evaluator.
func (claims) MatchingScopes(item runtime.Object, scopes []corev1.ScopedResourceSelectorRequirement) ([]corev1.ScopedResourceSelectorRequirement, error) {
	return matching(item, scopes, claimInScope)
}

// UncoveredQuotaScopes implements quota.Evaluator.
func (claims) UncoveredQuotaScopes(limited, matched []corev1.ScopedResourceSelectorRequirement) ([]corev1.ScopedResourceSelectorRequirement, error) {
	return uncovered(limited, matched), nil
}

// AttributesClasses are the VolumeAttributesClasses of a claim: the one that it asks for,
// the one that its volume has, and the one that it is about to get. While it changes its
// class, both count it.
func AttributesClasses(claim *corev1.PersistentVolumeClaim) sets.Set[string] {
	classes := sets.New(ptr.Deref(claim.Spec.VolumeAttributesClassName, ""), ptr.Deref(claim.Status.CurrentVolumeAttributesClassName, ""))
	if m := claim.Status.ModifyVolumeStatus; m != nil {
		classes.Insert(m.TargetVolumeAttributesClassName)
	}
	return classes.Delete("")
}

// claimInScope reports whether a claim is in a scope of a quota.
func claimInScope(scope corev1.ScopedResourceSelectorRequirement, item runtime.Object) (bool, error) {
	claim, ok := item.(*corev1.PersistentVolumeClaim)
	if !ok {
		return false, fmt.Errorf("measure a %T as a PersistentVolumeClaim", item)
	}
	if scope.ScopeName != corev1.ResourceQuotaScopeVolumeAttributesClass {
		return false, nil
	}
	classes := AttributesClasses(claim)
	switch scope.Operator {
	case corev1.ScopeSelectorOpIn:
		return classes.HasAny(scope.Values...), nil
	case corev1.ScopeSelectorOpNotIn:
		return classes.Len() == 0 || classes.Difference(sets.New(scope.Values...)).Len() > 0, nil
	case corev1.ScopeSelectorOpDoesNotExist:
		return classes.Len() == 0, nil
	}
	return classes.Len() > 0, nil
}

// Usage implements quota.Evaluator.
func (c claims) Usage(item runtime.Object) (corev1.ResourceList, error) {
	claim, ok := item.(*corev1.PersistentVolumeClaim)
	if !ok {
		return nil, fmt.Errorf("measure a %T as a PersistentVolumeClaim", item)
	}
	used := corev1.ResourceList{c.count(): one(), corev1.ResourcePersistentVolumeClaims: one()}
	class := volumehelper.GetPersistentVolumeClaimClass(claim)
	if class != "" {
		used[corev1.ResourceName(class+classSuffix+"persistentvolumeclaims")] = one()
	}
	if size, ok := claim.Spec.Resources.Requests[corev1.ResourceStorage]; ok {
		used[corev1.ResourceRequestsStorage] = size
		if class != "" {
			used[corev1.ResourceName(class+classSuffix+"requests.storage")] = size
		}
	}
	return used, nil
}

// UsageStats implements quota.Evaluator.
func (c claims) UsageStats(o quota.UsageStatsOptions) (quota.UsageStats, error) {
	return generic.CalculateUsageStats(o, c.list, claimInScope, c.Usage)
}

// pods count what they request and are limited to while they may run.
type pods struct {
	counted
	now func() time.Time
}

// computed are the resources that a quota names without a prefix.
var computed = []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage}

const requestsPrefix, limitsPrefix = "requests.", "limits."

// Handles implements quota.Evaluator: what a pod asks for changes with its
// creation and its resizing.
func (pods) Handles(a admission.Attributes) bool {
	return a.GetOperation() == admission.Create && a.GetSubresource() == "" ||
		a.GetOperation() == admission.Update && a.GetSubresource() == "resize"
}

// measures reports whether pods use a resource of a quota.
func (p pods) measures(name corev1.ResourceName) bool {
	if name == corev1.ResourcePods || name == p.count() || slices.Contains(computed, name) {
		return true
	}
	rest, ok := strings.CutPrefix(string(name), requestsPrefix)
	if ok {
		return slices.Contains(computed, corev1.ResourceName(rest)) || strings.HasPrefix(rest, corev1.ResourceHugePagesPrefix) || extended(rest)
	}
	rest, ok = strings.CutPrefix(string(name), limitsPrefix)
	return ok && slices.Contains(computed, corev1.ResourceName(rest)) || strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix)
}

// extended reports whether a resource is one that devices bring: of a domain of its
// own, or by the name of a class.
func extended(name string) bool {
	if strings.HasPrefix(name, resourcev1.ResourceDeviceClassPrefix) {
		return true
	}
	return strings.Contains(name, "/") && !strings.Contains(name, "kubernetes.io/") && !strings.Contains(name, classSuffix) && !ofDeviceClass(corev1.ResourceName(name))
}

// MatchingResources implements quota.Evaluator.
func (p pods) MatchingResources(input []corev1.ResourceName) []corev1.ResourceName {
	var match []corev1.ResourceName
	for _, name := range input {
		if p.measures(name) {
			match = append(match, name)
		}
	}
	return match
}

// Constraints refuses a pod whose containers do not say what a quota of their
// namespace measures.
func (p pods) Constraints(required []corev1.ResourceName, item runtime.Object) error {
	pod, ok := item.(*corev1.Pod)
	if !ok {
		return fmt.Errorf("measure a %T as a Pod", item)
	}
	var missing []string
	podRequests := resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{ExcludeOverhead: true})
	podLimits := resourcehelper.PodLimits(pod, resourcehelper.PodResourcesOptions{ExcludeOverhead: true})
	podLevel := resourcehelper.IsPodLevelResourcesSet(pod)
	for _, name := range required {
		plain := strings.TrimPrefix(string(name), requestsPrefix)
		list := func(r corev1.ResourceRequirements) corev1.ResourceList { return r.Requests }
		sum := podRequests
		if rest, ok := strings.CutPrefix(string(name), limitsPrefix); ok {
			plain, sum = rest, podLimits
			list = func(r corev1.ResourceRequirements) corev1.ResourceList { return r.Limits }
		}
		if !slices.Contains(computed, corev1.ResourceName(plain)) {
			continue
		}
		if _, ok := sum[corev1.ResourceName(plain)]; ok && podLevel {
			continue
		}
		for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
			if _, ok := list(c.Resources)[corev1.ResourceName(plain)]; !ok {
				missing = append(missing, fmt.Sprintf("%s for: %s", name, c.Name))
			}
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("must specify %s", strings.Join(missing, "; "))
	}
	return nil
}

// Usage implements quota.Evaluator.
func (p pods) Usage(item runtime.Object) (corev1.ResourceList, error) {
	pod, ok := item.(*corev1.Pod)
	if !ok {
		return nil, fmt.Errorf("measure a %T as a Pod", item)
	}
	used := corev1.ResourceList{p.count(): one()}
	// One that has ended is only an object. So is one that should have: its node is
	// lost, and what replaces it needs room.
	if core.Finished(pod) || overdue(pod, p.now()) {
		return used, nil
	}
	used[corev1.ResourcePods] = one()
	for name, quantity := range resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{}) {
		if slices.Contains(computed, name) || strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix) {
			used[name] = quantity
		}
		used[corev1.ResourceName(requestsPrefix+string(name))] = quantity
	}
	for name, quantity := range resourcehelper.PodLimits(pod, resourcehelper.PodResourcesOptions{}) {
		used[corev1.ResourceName(limitsPrefix+string(name))] = quantity
	}
	return used, nil
}

// overdue reports whether the pod was deleted and its grace has passed.
func overdue(pod *corev1.Pod, now time.Time) bool {
	if pod.DeletionTimestamp == nil || pod.DeletionGracePeriodSeconds == nil {
		return false
	}
	grace := min(max(*pod.DeletionGracePeriodSeconds, 0), int64(math.MaxInt64/time.Second))
	return now.After(pod.DeletionTimestamp.Add(time.Duration(grace) * time.Second))
}

// Matches implements quota.Evaluator.
func (p pods) Matches(q *corev1.ResourceQuota, item runtime.Object) (bool, error) {
	return generic.Matches(q, item, p.MatchingResources, inScope)
}

// MatchingScopes implements quota.Evaluator.
func (p pods) MatchingScopes(item runtime.Object, scopes []corev1.ScopedResourceSelectorRequirement) ([]corev1.ScopedResourceSelectorRequirement, error) {
	return matching(item, scopes, inScope)
}

// matching are those of the scopes that an object is in.
func matching(item runtime.Object, scopes []corev1.ScopedResourceSelectorRequirement, inScope generic.MatchesScopeFunc) ([]corev1.ScopedResourceSelectorRequirement, error) {
	var match []corev1.ScopedResourceSelectorRequirement
	for _, scope := range scopes {
		in, err := inScope(scope, item)
		if err != nil {
			return nil, err
		}
		if in {
			match = append(match, scope)
		}
	}
	return match, nil
}

// UncoveredQuotaScopes implements quota.Evaluator.
func (p pods) UncoveredQuotaScopes(limited, matched []corev1.ScopedResourceSelectorRequirement) ([]corev1.ScopedResourceSelectorRequirement, error) {
	return uncovered(limited, matched), nil
}

// uncovered are the limited scopes that no matched one is of.
func uncovered(limited, matched []corev1.ScopedResourceSelectorRequirement) (left []corev1.ScopedResourceSelectorRequirement) {
	for _, scope := range limited {
		if !slices.ContainsFunc(matched, func(m corev1.ScopedResourceSelectorRequirement) bool { return m.ScopeName == scope.ScopeName }) {
			left = append(left, scope)
		}
	}
	return left
}

// UsageStats implements quota.Evaluator.
func (p pods) UsageStats(o quota.UsageStatsOptions) (quota.UsageStats, error) {
	return generic.CalculateUsageStats(o, p.list, inScope, p.Usage)
}

// inScope reports whether a pod is in a scope of a quota.
func inScope(scope corev1.ScopedResourceSelectorRequirement, item runtime.Object) (bool, error) {
	pod, ok := item.(*corev1.Pod)
	if !ok {
		return false, fmt.Errorf("measure a %T as a Pod", item)
	}
	terminating := pod.Spec.ActiveDeadlineSeconds != nil && *pod.Spec.ActiveDeadlineSeconds >= 0
	switch scope.ScopeName {
	case corev1.ResourceQuotaScopeTerminating:
		return terminating, nil
	case corev1.ResourceQuotaScopeNotTerminating:
		return !terminating, nil
	case corev1.ResourceQuotaScopeBestEffort:
		return bestEffort(pod), nil
	case corev1.ResourceQuotaScopeNotBestEffort:
		return !bestEffort(pod), nil
	case corev1.ResourceQuotaScopeCrossNamespacePodAffinity:
		return acrossNamespaces(pod), nil
	case corev1.ResourceQuotaScopePriorityClass:
		class := pod.Spec.PriorityClassName
		switch scope.Operator {
		case corev1.ScopeSelectorOpIn:
			return slices.Contains(scope.Values, class), nil
		case corev1.ScopeSelectorOpNotIn:
			return !slices.Contains(scope.Values, class), nil
		case corev1.ScopeSelectorOpDoesNotExist:
			return class == "", nil
		}
		return class != "", nil
	}
	return false, nil
}

// bestEffort: no container asks for processor or memory.
func bestEffort(pod *corev1.Pod) bool {
	for _, list := range []corev1.ResourceList{
		resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{ExcludeOverhead: true}),
		resourcehelper.PodLimits(pod, resourcehelper.PodResourcesOptions{ExcludeOverhead: true}),
	} {
		if !list.Cpu().IsZero() || !list.Memory().IsZero() {
			return false
		}
	}
	return true
}

func acrossNamespaces(pod *corev1.Pod) bool {
	affinity := pod.Spec.Affinity
	if affinity == nil {
		return false
	}
	var terms []corev1.PodAffinityTerm
	if a := affinity.PodAffinity; a != nil {
		terms = append(terms, a.RequiredDuringSchedulingIgnoredDuringExecution...)
		for _, w := range a.PreferredDuringSchedulingIgnoredDuringExecution {
			terms = append(terms, w.PodAffinityTerm)
		}
	}
	if a := affinity.PodAntiAffinity; a != nil {
		terms = append(terms, a.RequiredDuringSchedulingIgnoredDuringExecution...)
		for _, w := range a.PreferredDuringSchedulingIgnoredDuringExecution {
			terms = append(terms, w.PodAffinityTerm)
		}
	}
	return slices.ContainsFunc(terms, func(t corev1.PodAffinityTerm) bool {
		return len(t.Namespaces) > 0 || t.NamespaceSelector != nil
	})
}
