// Package storagemigration holds the kinds of storagemigration.k8s.io.
package storagemigration

import (
	"time"

	storagemigrationv1 "k8s.io/api/storagemigration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

type migration = storagemigrationv1.StorageVersionMigration

// StorageVersionMigration is the kind StorageVersionMigration: a wish that every
// object of a resource is written once, in the form in which it is stored today.
func StorageVersionMigration() kind.Kind {
	return kind.Typed[*migration]{
		GVK:      storagemigrationv1.SchemeGroupVersion.WithKind("StorageVersionMigration"),
		Resource: "storageversionmigrations",
		Singular: "storageversionmigration",

		New:     func() runtime.Object { return &migration{} },
		NewList: func() runtime.Object { return &storagemigrationv1.StorageVersionMigrationList{} },

		PrepareCreate: func(m *migration) { m.Status = storagemigrationv1.StorageVersionMigrationStatus{} },
		PrepareUpdate: func(m, old *migration) { m.Status = old.Status },
		Validate:      validate,
		ValidateUpdate: func(m, old *migration) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&m.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			if !equality.Semantic.DeepEqual(m.Spec, old.Spec) {
				errs = append(errs, field.Invalid(field.NewPath("spec"), m.Spec, "field is immutable: make another StorageVersionMigration"))
			}
			return append(errs, validate(m)...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Resource", "GroupResource to migrate"),
			cells.Text("Status", "Status of the migration"),
		},
		Row: func(m *migration, _ time.Time) []any {
			status := "Unknown"
			for _, c := range m.Status.Conditions {
				if c.Status == metav1.ConditionTrue {
					switch storagemigrationv1.MigrationConditionType(c.Type) {
					case storagemigrationv1.MigrationRunning, storagemigrationv1.MigrationSucceeded, storagemigrationv1.MigrationFailed:
						status = c.Type
					}
				}
			}
			return []any{m.Name, m.Spec.Resource.String(), status}
		},

		Status: &kind.TypedStatus[*migration]{
			PrepareUpdate:  func(m, old *migration) { m.Spec = old.Spec },
			ValidateUpdate: validateStatusUpdate,
		},
	}.Kind()
}

func validate(m *migration) field.ErrorList {
	at := field.NewPath("spec", "resource")
	errs := apivalidation.ValidateObjectMeta(&m.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	errs = append(errs, check.RequiredText(at.Child("resource"), m.Spec.Resource.Resource, validation.IsDNS1035Label)...)
	if m.Spec.Resource.Group != "" {
		errs = append(errs, check.Text(at.Child("group"), m.Spec.Resource.Group, check.Subdomain)...)
	}
	return errs
}

func validateStatusUpdate(m, old *migration) field.ErrorList {
	errs := apivalidation.ValidateObjectMetaUpdate(&m.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	at := field.NewPath("status")
	version, before := m.Status.ResourceVersion, old.Status.ResourceVersion
	if version != "" {
		if _, err := resourceversion.CompareResourceVersion(version, version); err != nil {
			errs = append(errs, field.Invalid(at.Child("resourceVersion"), version, err.Error()))
		}
	}
	if before != "" && before != version {
		errs = append(errs, field.Invalid(at.Child("resourceVersion"), version, "field is immutable once it is set"))
	}
	conditions := at.Child("conditions")
	errs = append(errs, metav1validation.ValidateConditions(m.Status.Conditions, conditions)...)
	is := func(m *migration, t storagemigrationv1.MigrationConditionType) bool {
		return meta.IsStatusConditionTrue(m.Status.Conditions, string(t))
	}
	if is(m, storagemigrationv1.MigrationSucceeded) && is(m, storagemigrationv1.MigrationFailed) {
		errs = append(errs, field.Invalid(conditions, m.Status.Conditions, "Succeeded and Failed cannot both be True"))
	}
	for _, end := range []storagemigrationv1.MigrationConditionType{storagemigrationv1.MigrationSucceeded, storagemigrationv1.MigrationFailed} {
		if is(old, end) && !is(m, end) {
			errs = append(errs, field.Invalid(conditions, m.Status.Conditions, string(end)+" must stay True once it is"))
		}
	}
	return errs
}
