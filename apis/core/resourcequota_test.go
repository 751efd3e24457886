package core

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"
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

// TestQuotaScopes: scopes are about pods, or one about claims; they say nothing of what else is bounded.
func TestQuotaScopes(t *testing.T) {
	const fault = "unsupported scope applied to resource"
	for _, test := range []struct {
		scope, name string
		ok          bool
	}{
		{"Terminating", "pods", true}, {"Terminating", "requests.cpu", true}, {"NotBestEffort", "limits.memory", true}, {"BestEffort", "pods", true}, {"Terminating", "count/secrets", true},
		{"PriorityClass", "example.com/gpu", true}, {"Terminating", "hugepages-2Mi", true},
		{"BestEffort", "requests.cpu", false}, {"Terminating", "secrets", false}, {"NotTerminating", "services", false}, {"PriorityClass", "requests.storage", false},
		{"VolumeAttributesClass", "persistentvolumeclaims", true}, {"VolumeAttributesClass", "requests.storage", true}, {"VolumeAttributesClass", "gold.storageclass.storage.k8s.io/requests.storage", true},
		{"VolumeAttributesClass", "pods", false}, {"VolumeAttributesClass", "requests.cpu", false}, {"VolumeAttributesClass", "hugepages-2Mi", false},
		{"NotBestEffort", "ephemeral-storage", false},
	} {
		hard := corev1.ResourceList{corev1.ResourceName(test.name): resource.MustParse("1")}
		plain := &corev1.ResourceQuotaSpec{Hard: hard, Scopes: []corev1.ResourceQuotaScope{corev1.ResourceQuotaScope(test.scope)}}
		selected := &corev1.ResourceQuotaSpec{Hard: hard, ScopeSelector: &corev1.ScopeSelector{MatchExpressions: []corev1.ScopedResourceSelectorRequirement{
			{ScopeName: corev1.ResourceQuotaScope(test.scope), Operator: corev1.ScopeSelectorOpExists},
		}}}
		for at, spec := range map[string]*corev1.ResourceQuotaSpec{"spec.scopes[0]": plain, "spec.scopeSelector.matchExpressions[0].scopeName": selected} {
			errs := validateQuotaSpec(spec, &corev1.ResourceQuotaSpec{})
			if (len(errs) == 0) != test.ok || !test.ok && (len(errs) != 1 || errs[0].Field != at || !strings.Contains(errs[0].Error(), fault)) {
				t.Errorf("%s of %s at %s: %v", test.scope, test.name, at, errs)
			}
			if errs := validateQuotaSpec(spec, spec); len(errs) > 0 {
				t.Errorf("%s of %s, stored before: %v", test.scope, test.name, errs)
			}
		}
	}
	old := &corev1.ResourceQuota{Spec: corev1.ResourceQuotaSpec{Scopes: []corev1.ResourceQuotaScope{"Terminating", "NotBestEffort"}}}
	for scopes, ok := range map[string]bool{"NotBestEffort,Terminating": true, "Terminating": false, "Terminating,NotBestEffort,PriorityClass": false} {
		q := old.DeepCopy()
		q.Spec.Scopes = nil
		for scope := range strings.SplitSeq(scopes, ",") {
			q.Spec.Scopes = append(q.Spec.Scopes, corev1.ResourceQuotaScope(scope))
		}
		immutable := slices.ContainsFunc(ResourceQuota().ValidateUpdate(q, old), func(e *field.Error) bool { return e.Field == "spec.scopes" })
		if immutable == ok {
			t.Errorf("scopes become %s: refused %v", scopes, immutable)
		}
	}
	q := old.DeepCopy()
	q.Spec.ScopeSelector = &corev1.ScopeSelector{MatchExpressions: []corev1.ScopedResourceSelectorRequirement{{ScopeName: "PriorityClass", Operator: corev1.ScopeSelectorOpExists}}}
	if errs := ResourceQuota().ValidateUpdate(q, old); slices.ContainsFunc(errs, func(e *field.Error) bool { return strings.HasPrefix(e.Field, "spec") }) {
		t.Errorf("another selector of scopes: %v", errs)
	}
}
