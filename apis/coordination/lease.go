package coordination

import (
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// Lease is the kind Lease. A PUT may create it, and needs the resourceVersion:
// two holders must not overwrite each other unseen.
func Lease() kind.Kind {
	return kind.Typed[*coordinationv1.Lease]{
		GVK:        coordinationv1.SchemeGroupVersion.WithKind("Lease"),
		Resource:   "leases",
		Singular:   "lease",
		Namespaced: true,

		New:     func() runtime.Object { return &coordinationv1.Lease{} },
		NewList: func() runtime.Object { return &coordinationv1.LeaseList{} },

		Validate: func(l *coordinationv1.Lease) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&l.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			return append(errs, validateLeaseSpec(&l.Spec, field.NewPath("spec"))...)
		},
		ValidateUpdate: func(l, old *coordinationv1.Lease) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&l.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			return append(errs, validateLeaseSpec(&l.Spec, field.NewPath("spec"))...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Holder", coordinationv1.LeaseSpec{}.SwaggerDoc()["holderIdentity"]),
			cells.Age,
		},
		Row: func(l *coordinationv1.Lease, now time.Time) []any {
			holder := ""
			if l.Spec.HolderIdentity != nil {
				holder = *l.Spec.HolderIdentity
			}
			return []any{l.Name, holder, cells.Since(l.CreationTimestamp, now)}
		},
		CreateOnUpdate: true,
		// Thousands of nodes renew theirs all the time, each its own.
		NeverTracked: func(l *coordinationv1.Lease) bool { return l.Namespace == corev1.NamespaceNodeLease },
	}.Kind()
}

func validateLeaseSpec(spec *coordinationv1.LeaseSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if seconds := spec.LeaseDurationSeconds; seconds != nil && *seconds <= 0 {
		errs = append(errs, field.Invalid(at.Child("leaseDurationSeconds"), *seconds, "must be greater than 0"))
	}
	if n := spec.LeaseTransitions; n != nil {
		errs = append(errs, check.NonNegative(at.Child("leaseTransitions"), int64(*n))...)
	}
	if spec.Strategy == nil && spec.PreferredHolder != nil && *spec.PreferredHolder != "" {
		errs = append(errs, field.Forbidden(at.Child("preferredHolder"), "may only be specified when `strategy` is defined"))
	}
	return errs
}
