package rbac

import (
	"strings"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

var bindingColumns = []metav1.TableColumnDefinition{
	cells.Name,
	cells.Text("Role", rbacv1.RoleBinding{}.SwaggerDoc()["roleRef"]),
	cells.Age,
	cells.Wide(cells.Text("Users", "Users in the binding.")),
	cells.Wide(cells.Text("Groups", "Groups in the binding.")),
	cells.Wide(cells.Text("ServiceAccounts", "Service accounts in the binding.")),
}

// RoleBinding is the kind RoleBinding.
func RoleBinding() kind.Kind {
	return kind.Typed[*rbacv1.RoleBinding]{
		GVK:        rbacv1.SchemeGroupVersion.WithKind("RoleBinding"),
		Resource:   "rolebindings",
		Singular:   "rolebinding",
		Namespaced: true,

		New:     func() runtime.Object { return &rbacv1.RoleBinding{} },
		NewList: func() runtime.Object { return &rbacv1.RoleBindingList{} },

		Default: func(b *rbacv1.RoleBinding) { defaultBinding(&b.RoleRef, b.Subjects) },
		Validate: func(b *rbacv1.RoleBinding) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&b.ObjectMeta, true, names, field.NewPath("metadata"))
			return append(errs, validateBinding(b.RoleRef, b.Subjects, true)...)
		},
		ValidateUpdate: func(b, old *rbacv1.RoleBinding) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&b.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			errs = append(errs, validateBinding(b.RoleRef, b.Subjects, true)...)
			return append(errs, keepRole(b.RoleRef, old.RoleRef)...)
		},

		Columns: bindingColumns,
		Row: func(b *rbacv1.RoleBinding, now time.Time) []any {
			return bindingRow(&b.ObjectMeta, b.RoleRef, b.Subjects, now)
		},
		CreateOnUpdate:      true,
		UnconditionalUpdate: true,
	}.Kind()
}

// ClusterRoleBinding is the kind ClusterRoleBinding.
func ClusterRoleBinding() kind.Kind {
	return kind.Typed[*rbacv1.ClusterRoleBinding]{
		GVK:      rbacv1.SchemeGroupVersion.WithKind("ClusterRoleBinding"),
		Resource: "clusterrolebindings",
		Singular: "clusterrolebinding",

		New:     func() runtime.Object { return &rbacv1.ClusterRoleBinding{} },
		NewList: func() runtime.Object { return &rbacv1.ClusterRoleBindingList{} },

		Default: func(b *rbacv1.ClusterRoleBinding) { defaultBinding(&b.RoleRef, b.Subjects) },
		Validate: func(b *rbacv1.ClusterRoleBinding) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&b.ObjectMeta, false, names, field.NewPath("metadata"))
			return append(errs, validateBinding(b.RoleRef, b.Subjects, false)...)
		},
		ValidateUpdate: func(b, old *rbacv1.ClusterRoleBinding) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&b.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			errs = append(errs, validateBinding(b.RoleRef, b.Subjects, false)...)
			return append(errs, keepRole(b.RoleRef, old.RoleRef)...)
		},

		Columns: bindingColumns,
		Row: func(b *rbacv1.ClusterRoleBinding, now time.Time) []any {
			return bindingRow(&b.ObjectMeta, b.RoleRef, b.Subjects, now)
		},
		CreateOnUpdate:      true,
		UnconditionalUpdate: true,
	}.Kind()
}

func defaultBinding(role *rbacv1.RoleRef, subjects []rbacv1.Subject) {
	if role.APIGroup == "" {
		role.APIGroup = rbacv1.GroupName
	}
	for i := range subjects {
		if s := &subjects[i]; s.APIGroup == "" && (s.Kind == rbacv1.UserKind || s.Kind == rbacv1.GroupKind) {
			s.APIGroup = rbacv1.GroupName
		}
	}
}

func validateBinding(role rbacv1.RoleRef, subjects []rbacv1.Subject, namespaced bool) field.ErrorList {
	at := field.NewPath("roleRef")
	errs := check.OneOf(at.Child("apiGroup"), role.APIGroup, rbacv1.GroupName)
	kinds := []string{"ClusterRole"}
	if namespaced {
		kinds = append(kinds, "Role")
	}
	errs = append(errs, check.OneOf(at.Child("kind"), role.Kind, kinds...)...)
	errs = append(errs, check.RequiredText(at.Child("name"), role.Name, func(name string) []string { return names(name, false) })...)
	for i, subject := range subjects {
		errs = append(errs, validateSubject(subject, namespaced, field.NewPath("subjects").Index(i))...)
	}
	return errs
}

func validateSubject(s rbacv1.Subject, namespaced bool, at *field.Path) field.ErrorList {
	errs := check.RequiredText(at.Child("name"), s.Name, nil)
	switch s.Kind {
	case rbacv1.ServiceAccountKind:
		if s.Name != "" {
			errs = append(errs, check.Text(at.Child("name"), s.Name, check.Subdomain)...)
		}
		if s.APIGroup != "" {
			errs = append(errs, field.NotSupported(at.Child("apiGroup"), s.APIGroup, []string{""}))
		}
		if s.Namespace == "" && !namespaced {
			errs = append(errs, field.Required(at.Child("namespace"), ""))
		}
	case rbacv1.UserKind, rbacv1.GroupKind:
		errs = append(errs, check.OneOf(at.Child("apiGroup"), s.APIGroup, rbacv1.GroupName)...)
	default:
		errs = append(errs, field.NotSupported(at.Child("kind"), s.Kind, []string{rbacv1.GroupKind, rbacv1.ServiceAccountKind, rbacv1.UserKind}))
	}
	return errs
}

// keepRole: who may edit the subjects of a binding must not turn it into a
// binding of something greater.
func keepRole(role, old rbacv1.RoleRef) field.ErrorList {
	if role != old {
		return field.ErrorList{field.Invalid(field.NewPath("roleRef"), role, "cannot change roleRef")}
	}
	return nil
}

func bindingRow(meta *metav1.ObjectMeta, role rbacv1.RoleRef, subjects []rbacv1.Subject, now time.Time) []any {
	var users, groups, accounts []string
	for _, s := range subjects {
		switch s.Kind {
		case rbacv1.UserKind:
			users = append(users, s.Name)
		case rbacv1.GroupKind:
			groups = append(groups, s.Name)
		case rbacv1.ServiceAccountKind:
			accounts = append(accounts, s.Namespace+"/"+s.Name)
		}
	}
	return []any{
		meta.Name, role.Kind + "/" + role.Name, cells.Since(meta.CreationTimestamp, now),
		strings.Join(users, ", "), strings.Join(groups, ", "), strings.Join(accounts, ", "),
	}
}
