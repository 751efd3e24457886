package clusterroleaggregation

import (
	"fmt"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// Rules are those that sum should have: of all roles that its selectors take,
// in the order of their names, each rule once. A role does not feed itself.
func Rules(sum *rbacv1.ClusterRole, roles []*rbacv1.ClusterRole) ([]rbacv1.PolicyRule, error) {
	roles = slices.Clone(roles)
	slices.SortFunc(roles, func(a, b *rbacv1.ClusterRole) int { return strings.Compare(a.Name, b.Name) })
	var rules []rbacv1.PolicyRule
	for i := range sum.AggregationRule.ClusterRoleSelectors {
		selector, err := metav1.LabelSelectorAsSelector(&sum.AggregationRule.ClusterRoleSelectors[i])
		if err != nil {
			return nil, fmt.Errorf("cluster role %s: aggregationRule.clusterRoleSelectors[%d]: %w", sum.Name, i, err)
		}
		for _, role := range roles {
			if role.Name == sum.Name || !selector.Matches(labels.Set(role.Labels)) {
				continue
			}
			for _, rule := range role.Rules {
				if !slices.ContainsFunc(rules, func(have rbacv1.PolicyRule) bool { return equality.Semantic.DeepEqual(have, rule) }) {
					rules = append(rules, *rule.DeepCopy())
				}
			}
		}
	}
	return rules, nil
}

// feeds reports whether a selector of sum takes role.
func feeds(role, sum *rbacv1.ClusterRole) bool {
	for i := range sum.AggregationRule.ClusterRoleSelectors {
		selector, err := metav1.LabelSelectorAsSelector(&sum.AggregationRule.ClusterRoleSelectors[i])
		if err == nil && role.Name != sum.Name && selector.Matches(labels.Set(role.Labels)) {
			return true
		}
	}
	return false
}
