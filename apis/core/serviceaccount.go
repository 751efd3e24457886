package core

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/kind"
)

// ServiceAccount is the kind ServiceAccount.
func ServiceAccount() kind.Kind {
	return kind.Typed[*corev1.ServiceAccount]{
		GVK:        corev1.SchemeGroupVersion.WithKind("ServiceAccount"),
		Resource:   "serviceaccounts",
		Singular:   "serviceaccount",
		ShortNames: []string{"sa"},
		Namespaced: true,

		New:     func() runtime.Object { return &corev1.ServiceAccount{} },
		NewList: func() runtime.Object { return &corev1.ServiceAccountList{} },

		Validate: func(a *corev1.ServiceAccount) field.ErrorList {
			return apivalidation.ValidateObjectMeta(&a.ObjectMeta, true, apivalidation.ValidateServiceAccountName, field.NewPath("metadata"))
		},
		ValidateUpdate: func(a, old *corev1.ServiceAccount) field.ErrorList {
			return apivalidation.ValidateObjectMetaUpdate(&a.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Number("Secrets", corev1.ServiceAccount{}.SwaggerDoc()["secrets"]),
			cells.Age,
		},
		Row: func(a *corev1.ServiceAccount, now time.Time) []any {
			return []any{a.Name, int64(len(a.Secrets)), cells.Since(a.CreationTimestamp, now)}
		},
		UnconditionalUpdate: true,
	}.Kind()
}
