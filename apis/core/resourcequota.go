package core

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/kind"
)

// ResourceQuota is the kind ResourceQuota.
func ResourceQuota() kind.Kind {
	return kind.Typed[*corev1.ResourceQuota]{
		GVK:        corev1.SchemeGroupVersion.WithKind("ResourceQuota"),
		Resource:   "resourcequotas",
		Singular:   "resourcequota",
		ShortNames: []string{"quota"},
		Namespaced: true,

		New:     func() runtime.Object { return &corev1.ResourceQuota{} },
		NewList: func() runtime.Object { return &corev1.ResourceQuotaList{} },

		PrepareCreate: func(q *corev1.ResourceQuota) { q.Status = corev1.ResourceQuotaStatus{} },
		PrepareUpdate: func(q, old *corev1.ResourceQuota) { q.Status = old.Status },
		Validate: func(q *corev1.ResourceQuota) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&q.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			return append(errs, validateQuotaSpec(&q.Spec, &corev1.ResourceQuotaSpec{})...)
		},
		ValidateUpdate: func(q, old *corev1.ResourceQuota) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&q.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			errs = append(errs, validateQuotaSpec(&q.Spec, &old.Spec)...)
			if !sets.New(q.Spec.Scopes...).Equal(sets.New(old.Spec.Scopes...)) {
				errs = append(errs, field.Invalid(field.NewPath("spec", "scopes"), q.Spec.Scopes, "field is immutable"))
			}
			return errs
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Request", "Request represents a minimum amount of cpu/memory that a container may consume."),
			cells.Text("Limit", "Limits control the maximum amount of cpu/memory that a container may use independent of contention on the node."),
			cells.Age,
		},
		Row: func(q *corev1.ResourceQuota, now time.Time) []any {
			requests, limits := quotaCells(q)
			return []any{q.Name, requests, limits, cells.Since(q.CreationTimestamp, now)}
		},

		Status: &kind.TypedStatus[*corev1.ResourceQuota]{
			PrepareUpdate: func(q, old *corev1.ResourceQuota) { q.Spec = old.Spec },
			ValidateUpdate: func(q, old *corev1.ResourceQuota) field.ErrorList {
				errs := apivalidation.ValidateObjectMetaUpdate(&q.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
				errs = append(errs, validateQuotaList(q.Status.Hard, old.Spec.Hard, field.NewPath("status", "hard"))...)
				return append(errs, validateQuotaList(q.Status.Used, old.Spec.Hard, field.NewPath("status", "used"))...)
			},
		},
		CreateOnUpdate:      true,
		UnconditionalUpdate: true,
	}.Kind()
}

// quotaCells write used/hard of each resource, limits apart from the rest.
func quotaCells(q *corev1.ResourceQuota) (requests, limits string) {
	var r, l []string
	for _, name := range slices.Sorted(maps.Keys(q.Status.Hard)) {
		hard, used := q.Status.Hard[name], q.Status.Used[name]
		cell := fmt.Sprintf("%s: %s/%s", name, used.String(), hard.String())
		if strings.HasPrefix(string(name), "limits") {
			l = append(l, cell)
		} else {
			r = append(r, cell)
		}
	}
	return strings.Join(r, ", "), strings.Join(l, ", ")
}

var quotaScopes = []corev1.ResourceQuotaScope{
	corev1.ResourceQuotaScopeTerminating, corev1.ResourceQuotaScopeNotTerminating, corev1.ResourceQuotaScopeBestEffort,
	corev1.ResourceQuotaScopeNotBestEffort, corev1.ResourceQuotaScopePriorityClass, corev1.ResourceQuotaScopeCrossNamespacePodAffinity,
	corev1.ResourceQuotaScopeVolumeAttributesClass,
}

func validateQuotaSpec(spec, old *corev1.ResourceQuotaSpec) field.ErrorList {
	at := field.NewPath("spec")
	errs := validateQuotaList(spec.Hard, old.Hard, at.Child("hard"))
	scopes := map[corev1.ResourceQuotaScope]bool{}
	for i, scope := range spec.Scopes {
		if !slices.Contains(quotaScopes, scope) {
			errs = append(errs, field.Invalid(at.Child("scopes").Index(i), scope, "unsupported scope"))
		}
		scopes[scope] = true
	}
	if spec.ScopeSelector != nil {
		for i, e := range spec.ScopeSelector.MatchExpressions {
			errs = append(errs, validateScopeExpression(e, at.Child("scopeSelector", "matchExpressions").Index(i))...)
			if e.Operator != corev1.ScopeSelectorOpDoesNotExist {
				scopes[e.ScopeName] = true
			}
		}
	}
	for _, pair := range [][2]corev1.ResourceQuotaScope{
		{corev1.ResourceQuotaScopeBestEffort, corev1.ResourceQuotaScopeNotBestEffort},
		{corev1.ResourceQuotaScopeTerminating, corev1.ResourceQuotaScopeNotTerminating},
	} {
		if scopes[pair[0]] && scopes[pair[1]] {
			errs = append(errs, field.Invalid(at.Child("scopes"), spec.Scopes, "conflicting scopes"))
		}
	}
	return append(errs, validateScopeUse(spec, old, at)...)
}

// validateScopeUse wants scopes that say something of what is bounded: which pods are
// meant says nothing of Secrets. What is stored goes on, while its scopes stay.
func validateScopeUse(spec, old *corev1.ResourceQuotaSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	same := equality.Semantic.DeepEqual(spec.Scopes, old.Scopes) && equality.Semantic.DeepEqual(spec.ScopeSelector, old.ScopeSelector)
	wrong := func(scope corev1.ResourceQuotaScope) bool {
		return slices.Contains(quotaScopes, scope) && slices.ContainsFunc(slices.Sorted(maps.Keys(spec.Hard)), func(name corev1.ResourceName) bool {
			_, had := old.Hard[name]
			return !(same && had) && !scopeFits(scope, name)
		})
	}
	for i, scope := range spec.Scopes {
		if wrong(scope) {
			errs = append(errs, field.Invalid(at.Child("scopes").Index(i), scope, "unsupported scope applied to resource"))
		}
	}
	if spec.ScopeSelector != nil {
		for i, e := range spec.ScopeSelector.MatchExpressions {
			if wrong(e.ScopeName) {
				errs = append(errs, field.Invalid(at.Child("scopeSelector", "matchExpressions").Index(i).Child("scopeName"), e.ScopeName, "unsupported scope applied to resource"))
			}
		}
	}
	return errs
}

// scopeFits: scopes are about pods, but for one that is about claims, and pods that ask for
// nothing have no amounts. What a quota counts by a domain, or as count/, is not told of by its name.
func scopeFits(scope corev1.ResourceQuotaScope, name corev1.ResourceName) bool {
	if scope == corev1.ResourceQuotaScopeVolumeAttributesClass {
		return name == corev1.ResourcePersistentVolumeClaims || name == corev1.ResourceRequestsStorage || strings.Contains(string(name), "/")
	}
	switch plain := strings.TrimPrefix(strings.TrimPrefix(string(name), "requests."), "limits."); {
	case name == corev1.ResourcePods || strings.Contains(string(name), "/") || isHugePages(corev1.ResourceName(plain)):
		return true
	case plain == string(corev1.ResourceCPU), plain == string(corev1.ResourceMemory):
		return scope != corev1.ResourceQuotaScopeBestEffort
	}
	return false
}

func validateScopeExpression(e corev1.ScopedResourceSelectorRequirement, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if !slices.Contains(quotaScopes, e.ScopeName) {
		errs = append(errs, field.Invalid(at.Child("scopeName"), e.ScopeName, "unsupported scope"))
	}
	switch e.Operator {
	case corev1.ScopeSelectorOpIn, corev1.ScopeSelectorOpNotIn:
		if len(e.Values) == 0 {
			errs = append(errs, field.Required(at.Child("values"), "must be at least one value when `operator` is 'In' or 'NotIn' for scope selector"))
		}
		if e.ScopeName != corev1.ResourceQuotaScopePriorityClass && e.ScopeName != corev1.ResourceQuotaScopeVolumeAttributesClass {
			errs = append(errs, field.Invalid(at.Child("operator"), e.Operator, "must be 'Exist' when scope is any of ResourceQuotaScopeTerminating, ResourceQuotaScopeNotTerminating, ResourceQuotaScopeBestEffort, ResourceQuotaScopeNotBestEffort or ResourceQuotaScopeCrossNamespacePodAffinity"))
		}
	case corev1.ScopeSelectorOpExists, corev1.ScopeSelectorOpDoesNotExist:
		if len(e.Values) > 0 {
			errs = append(errs, field.Invalid(at.Child("values"), e.Values, "must be no value when `operator` is 'Exist' or 'DoesNotExist' for scope selector"))
		}
	default:
		errs = append(errs, field.Invalid(at.Child("operator"), e.Operator, "not a valid selector operator"))
	}
	return errs
}

// validateQuotaList checks what a quota bounds, or counts; had are names that are
// stored, perhaps by a version that did not check them.
func validateQuotaList(list, had corev1.ResourceList, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, name := range slices.Sorted(maps.Keys(list)) {
		quantity := list[name]
		if _, old := had[name]; !old && !boundable(name) {
			errs = append(errs, field.Invalid(at.Key(string(name)), string(name), "is no resource that a quota can bound: name a standard one (pods, requests.cpu, limits.memory, …), count/RESOURCE.GROUP, or requests.DOMAIN/NAME of an extended resource"))
		}
		errs = append(errs, validateQuantity(name, quantity, at.Key(string(name)))...)
		if quotaCounts(name) && quantity.MilliValue()%1000 != 0 {
			errs = append(errs, field.Invalid(at.Key(string(name)), quantity.String(), "must be an integer"))
		}
	}
	return errs
}

// boundable reports whether a quota may name a resource: anything with a domain or
// class before a slash, and else what is known.
func boundable(name corev1.ResourceName) bool {
	if strings.Contains(string(name), "/") {
		return len(validation.IsQualifiedName(string(name))) == 0
	}
	if quotaCounts(name) {
		return true
	}
	plain := strings.TrimPrefix(strings.TrimPrefix(string(name), "requests."), "limits.")
	switch corev1.ResourceName(plain) {
	case corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage, corev1.ResourceStorage:
		return true
	}
	return isHugePages(corev1.ResourceName(plain))
}

// quotaCounts reports whether a resource of a quota is a number of objects.
func quotaCounts(name corev1.ResourceName) bool {
	switch name {
	case corev1.ResourcePods, corev1.ResourceServices, corev1.ResourceReplicationControllers, corev1.ResourceQuotas,
		corev1.ResourceSecrets, corev1.ResourceConfigMaps, corev1.ResourcePersistentVolumeClaims,
		corev1.ResourceServicesNodePorts, corev1.ResourceServicesLoadBalancers:
		return true
	}
	return strings.HasPrefix(string(name), "count/")
}
