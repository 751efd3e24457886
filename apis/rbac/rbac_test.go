package rbac

import (
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func TestValidateRules(t *testing.T) {
	tests := []struct {
		name       string
		rule       rbacv1.PolicyRule
		namespaced bool
		want       []string
	}{
		{"resources", rbacv1.PolicyRule{Verbs: []string{"get"}, APIGroups: []string{""}, Resources: []string{"pods"}}, true, nil},
		{"paths", rbacv1.PolicyRule{Verbs: []string{"get"}, NonResourceURLs: []string{"/metrics"}}, false, nil},
		{"nothing", rbacv1.PolicyRule{}, true, []string{
			"rules[0].verbs: Required value: verbs must contain at least one value",
			"rules[0].apiGroups: Required value: resource rules must supply at least one api group",
			"rules[0].resources: Required value: resource rules must supply at least one resource",
		}},
		{"paths in a namespace", rbacv1.PolicyRule{Verbs: []string{"get"}, NonResourceURLs: []string{"/metrics"}}, true,
			[]string{`rules[0].nonResourceURLs: Invalid value: ["/metrics"]: namespaced rules cannot apply to non-resource URLs`}},
		{"both", rbacv1.PolicyRule{Verbs: []string{"get"}, NonResourceURLs: []string{"/"}, Resources: []string{"pods"}}, false,
			[]string{`rules[0].nonResourceURLs: Invalid value: ["/"]: rules cannot apply to both regular resources and non-resource URLs`}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "system:a", Namespace: "hello"}, Rules: []rbacv1.PolicyRule{test.rule}}
			if test.namespaced {
				checktest.Faults(t, Role().Validate(role), test.want...)
				return
			}
			checktest.Faults(t, ClusterRole().Validate(&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "system:a"}, Rules: role.Rules}), test.want...)
		})
	}
	empty := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "a/b"}, AggregationRule: &rbacv1.AggregationRule{}}
	checktest.Faults(t, ClusterRole().Validate(empty),
		`metadata.name: Invalid value: "a/b": may not contain '/'`,
		"aggregationRule.clusterRoleSelectors: Required value: at least one clusterRoleSelector required if aggregationRule is non-nil")
}

func TestValidateBindings(t *testing.T) {
	tests := []struct {
		name     string
		role     rbacv1.RoleRef
		subjects []rbacv1.Subject
		cluster  bool
		want     []string
	}{
		{"sound", rbacv1.RoleRef{Kind: "Role", Name: "a"}, []rbacv1.Subject{{Kind: "User", Name: "ann"}, {Kind: "ServiceAccount", Name: "web"}}, false, nil},
		{"role for the cluster", rbacv1.RoleRef{Kind: "Role", Name: "a"}, nil, true, []string{`roleRef.kind: Unsupported value: "Role": supported values: "ClusterRole"`}},
		{"nothing", rbacv1.RoleRef{}, nil, false, []string{"roleRef.kind: Required value", "roleRef.name: Required value"}},
		{"other group", rbacv1.RoleRef{APIGroup: "example.com", Kind: "Role", Name: "a"}, nil, false, []string{`roleRef.apiGroup: Unsupported value: "example.com"`}},
		{"account of no namespace", rbacv1.RoleRef{Kind: "ClusterRole", Name: "a"}, []rbacv1.Subject{{Kind: "ServiceAccount", Name: "web"}}, true, []string{"subjects[0].namespace: Required value"}},
		{"subjects", rbacv1.RoleRef{Kind: "ClusterRole", Name: "a"}, []rbacv1.Subject{{Kind: "Robot", Name: "r"}, {Kind: "Group"}}, false, []string{
			`subjects[0].kind: Unsupported value: "Robot": supported values: "Group", "ServiceAccount", "User"`,
			"subjects[1].name: Required value",
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			meta := metav1.ObjectMeta{Name: "b"}
			if test.cluster {
				b := &rbacv1.ClusterRoleBinding{ObjectMeta: meta, RoleRef: test.role, Subjects: test.subjects}
				ClusterRoleBinding().Default(b)
				checktest.Faults(t, ClusterRoleBinding().Validate(b), test.want...)
				return
			}
			meta.Namespace = "hello"
			b := &rbacv1.RoleBinding{ObjectMeta: meta, RoleRef: test.role, Subjects: test.subjects}
			RoleBinding().Default(b)
			checktest.Faults(t, RoleBinding().Validate(b), test.want...)
		})
	}
}

func TestBindingsKeepTheirRole(t *testing.T) {
	old := &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "b", ResourceVersion: "7"}, RoleRef: rbacv1.RoleRef{Kind: "ClusterRole", Name: "view"}}
	ClusterRoleBinding().Default(old)
	b := old.DeepCopy()
	b.RoleRef.Name = "admin"
	checktest.Faults(t, ClusterRoleBinding().ValidateUpdate(b, old), "roleRef: Invalid value: ")
}
