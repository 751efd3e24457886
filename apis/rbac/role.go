// Package rbac describes the kinds of the rbac.authorization.k8s.io API group:
// what roles allow, and to whom they are bound.
package rbac

import (
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/api/validation/path"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// names of roles and bindings may hold colons ("system:node"): they need only
// be one segment of a path.
var names = path.ValidatePathSegmentName

// createdAt is the last column of roles, which show a date instead of an age.
var createdAt = metav1.TableColumnDefinition{Name: "Created At", Type: "date", Description: metav1.ObjectMeta{}.SwaggerDoc()["creationTimestamp"]}

// Role is the kind Role.
func Role() kind.Kind {
	return kind.Typed[*rbacv1.Role]{
		GVK:        rbacv1.SchemeGroupVersion.WithKind("Role"),
		Resource:   "roles",
		Singular:   "role",
		Namespaced: true,

		New:     func() runtime.Object { return &rbacv1.Role{} },
		NewList: func() runtime.Object { return &rbacv1.RoleList{} },

		Validate: func(r *rbacv1.Role) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&r.ObjectMeta, true, names, field.NewPath("metadata"))
			return append(errs, validateRules(r.Rules, true, field.NewPath("rules"))...)
		},
		ValidateUpdate: func(r, old *rbacv1.Role) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&r.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			return append(errs, validateRules(r.Rules, true, field.NewPath("rules"))...)
		},

		Columns: []metav1.TableColumnDefinition{cells.Name, createdAt},
		Row: func(r *rbacv1.Role, _ time.Time) []any {
			return []any{r.Name, date(r.CreationTimestamp)}
		},
		CreateOnUpdate:      true,
		UnconditionalUpdate: true,
	}.Kind()
}

// ClusterRole is the kind ClusterRole.
func ClusterRole() kind.Kind {
	return kind.Typed[*rbacv1.ClusterRole]{
		GVK:      rbacv1.SchemeGroupVersion.WithKind("ClusterRole"),
		Resource: "clusterroles",
		Singular: "clusterrole",

		New:     func() runtime.Object { return &rbacv1.ClusterRole{} },
		NewList: func() runtime.Object { return &rbacv1.ClusterRoleList{} },

		Validate: func(r *rbacv1.ClusterRole) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&r.ObjectMeta, false, names, field.NewPath("metadata"))
			return append(errs, validateClusterRole(r)...)
		},
		ValidateUpdate: func(r, old *rbacv1.ClusterRole) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&r.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			return append(errs, validateClusterRole(r)...)
		},

		Columns: []metav1.TableColumnDefinition{cells.Name, createdAt},
		Row: func(r *rbacv1.ClusterRole, _ time.Time) []any {
			return []any{r.Name, date(r.CreationTimestamp)}
		},
		CreateOnUpdate:      true,
		UnconditionalUpdate: true,
	}.Kind()
}

func validateClusterRole(r *rbacv1.ClusterRole) field.ErrorList {
	errs := validateRules(r.Rules, false, field.NewPath("rules"))
	if r.AggregationRule == nil {
		return errs
	}
	at := field.NewPath("aggregationRule", "clusterRoleSelectors")
	if len(r.AggregationRule.ClusterRoleSelectors) == 0 {
		errs = append(errs, field.Required(at, "at least one clusterRoleSelector required if aggregationRule is non-nil"))
	}
	for i := range r.AggregationRule.ClusterRoleSelectors {
		errs = append(errs, check.LabelSelector(at.Index(i), &r.AggregationRule.ClusterRoleSelectors[i])...)
	}
	return errs
}

// validateRules wants each rule to be about resources or, for the cluster as a
// whole, about paths that are none.
func validateRules(rules []rbacv1.PolicyRule, namespaced bool, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, rule := range rules {
		at := at.Index(i)
		if len(rule.Verbs) == 0 {
			errs = append(errs, field.Required(at.Child("verbs"), "verbs must contain at least one value"))
		}
		if len(rule.NonResourceURLs) > 0 {
			if namespaced {
				errs = append(errs, field.Invalid(at.Child("nonResourceURLs"), rule.NonResourceURLs, "namespaced rules cannot apply to non-resource URLs"))
			}
			if len(rule.APIGroups)+len(rule.Resources)+len(rule.ResourceNames) > 0 {
				errs = append(errs, field.Invalid(at.Child("nonResourceURLs"), rule.NonResourceURLs, "rules cannot apply to both regular resources and non-resource URLs"))
			}
			continue
		}
		if len(rule.APIGroups) == 0 {
			errs = append(errs, field.Required(at.Child("apiGroups"), "resource rules must supply at least one api group"))
		}
		if len(rule.Resources) == 0 {
			errs = append(errs, field.Required(at.Child("resources"), "resource rules must supply at least one resource"))
		}
	}
	return errs
}

func date(t metav1.Time) string {
	if t.IsZero() {
		return "<unknown>"
	}
	return t.UTC().Format(time.RFC3339)
}
