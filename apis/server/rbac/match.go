package rbac

import (
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// Allows reports whether rule permits what a asks.
func Allows(a authorizer.Attributes, rule *rbacv1.PolicyRule) bool {
	if !has(rule.Verbs, a.GetVerb()) {
		return false
	}
	if !a.IsResourceRequest() {
		return slices.ContainsFunc(rule.NonResourceURLs, func(pattern string) bool { return matchPath(pattern, a.GetPath()) })
	}
	return has(rule.APIGroups, a.GetAPIGroup()) &&
		hasResource(rule.Resources, a.GetResource(), a.GetSubresource()) &&
		(len(rule.ResourceNames) == 0 || slices.Contains(rule.ResourceNames, a.GetName()))
}

func has(list []string, value string) bool {
	return slices.Contains(list, rbacv1.VerbAll) || slices.Contains(list, value)
}

// hasResource: "*" is every resource and every subresource, "*/scale" that
// subresource of every resource.
func hasResource(list []string, resource, subresource string) bool {
	for _, entry := range list {
		if entry == rbacv1.ResourceAll {
			return true
		}
		if subresource == "" {
			if entry == resource {
				return true
			}
			continue
		}
		owner, sub, ok := strings.Cut(entry, "/")
		if ok && sub == subresource && (owner == resource || owner == rbacv1.ResourceAll) {
			return true
		}
	}
	return false
}

func matchPath(pattern, path string) bool {
	if prefix, ok := strings.CutSuffix(pattern, "*"); ok {
		return strings.HasPrefix(path, prefix)
	}
	return pattern == path
}
