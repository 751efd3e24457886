package storage

import (
	"time"

	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// defaultAttributes is the annotation of the class for claims that name none.
const defaultAttributes = "volumeattributesclass.kubernetes.io/is-default-class"

// VolumeAttributesClass is the kind VolumeAttributesClass.
func VolumeAttributesClass() kind.Kind {
	return kind.Typed[*storagev1.VolumeAttributesClass]{
		GVK:        storagev1.SchemeGroupVersion.WithKind("VolumeAttributesClass"),
		Resource:   "volumeattributesclasses",
		Singular:   "volumeattributesclass",
		ShortNames: []string{"vac"},

		New:     func() runtime.Object { return &storagev1.VolumeAttributesClass{} },
		NewList: func() runtime.Object { return &storagev1.VolumeAttributesClassList{} },

		Validate: func(c *storagev1.VolumeAttributesClass) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&c.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			errs = append(errs, check.RequiredText(field.NewPath("driverName"), c.DriverName, check.Subdomain)...)
			return append(errs, validateParameters(c.Parameters, false, field.NewPath("parameters"))...)
		},
		ValidateUpdate: func(c, old *storagev1.VolumeAttributesClass) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&c.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			if c.DriverName != old.DriverName {
				errs = append(errs, field.Forbidden(field.NewPath("driverName"), "updates to driverName are forbidden."))
			}
			if !equality.Semantic.DeepEqual(c.Parameters, old.Parameters) {
				errs = append(errs, field.Forbidden(field.NewPath("parameters"), "updates to parameters are forbidden."))
			}
			return errs
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("DriverName", storagev1.VolumeAttributesClass{}.SwaggerDoc()["driverName"]),
			cells.Age,
		},
		Row: func(c *storagev1.VolumeAttributesClass, now time.Time) []any {
			name := c.Name
			if c.Annotations[defaultAttributes] == "true" {
				name += " (default)"
			}
			return []any{name, c.DriverName, cells.Since(c.CreationTimestamp, now)}
		},

		UnconditionalUpdate: true,
	}.Kind()
}
