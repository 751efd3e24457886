package clusterroleaggregation

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func role(name string, labels map[string]string, verbs ...string) *rbacv1.ClusterRole {
	r := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
	for _, verb := range verbs {
		r.Rules = append(r.Rules, rbacv1.PolicyRule{Verbs: []string{verb}})
	}
	return r
}

func TestRules(t *testing.T) {
	in := map[string]string{"to": "sum"}
	sum := role("sum", in, "old")
	sum.AggregationRule = &rbacv1.AggregationRule{ClusterRoleSelectors: []metav1.LabelSelector{
		{MatchLabels: in}, {MatchLabels: map[string]string{"also": "here"}},
	}}
	roles := []*rbacv1.ClusterRole{
		role("c", map[string]string{"also": "here", "to": "sum"}, "get", "watch"),
		role("b", in, "list", "get"),
		role("a", nil, "delete"),
		sum,
	}
	got, err := Rules(sum, roles)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(role("", nil, "list", "get", "watch").Rules, got); diff != "" {
		t.Error(diff)
	}
	for _, r := range roles {
		if want := r.Name == "b" || r.Name == "c"; feeds(r, sum) != want {
			t.Errorf("%s feeds the sum: %t", r.Name, !want)
		}
	}
	sum.AggregationRule.ClusterRoleSelectors[0].MatchExpressions = []metav1.LabelSelectorRequirement{{Key: "a", Operator: "Sideways"}}
	if _, err := Rules(sum, roles); err == nil {
		t.Error("a selector that makes no sense was taken")
	}
}
