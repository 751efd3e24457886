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

// VolumeAttachment is the kind VolumeAttachment.
func VolumeAttachment() kind.Kind {
	return kind.Typed[*storagev1.VolumeAttachment]{
		GVK:      storagev1.SchemeGroupVersion.WithKind("VolumeAttachment"),
		Resource: "volumeattachments",
		Singular: "volumeattachment",

		New:     func() runtime.Object { return &storagev1.VolumeAttachment{} },
		NewList: func() runtime.Object { return &storagev1.VolumeAttachmentList{} },

		PrepareCreate: func(a *storagev1.VolumeAttachment) { a.Status = storagev1.VolumeAttachmentStatus{} },
		PrepareUpdate: func(a, old *storagev1.VolumeAttachment) { a.Status = old.Status },
		Validate: func(a *storagev1.VolumeAttachment) field.ErrorList {
			spec := field.NewPath("spec")
			errs := apivalidation.ValidateObjectMeta(&a.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			errs = append(errs, check.RequiredText(spec.Child("attacher"), a.Spec.Attacher, check.Subdomain)...)
			errs = append(errs, check.RequiredText(spec.Child("nodeName"), a.Spec.NodeName, check.Subdomain)...)
			source := spec.Child("source")
			switch inline, name := a.Spec.Source.InlineVolumeSpec, a.Spec.Source.PersistentVolumeName; {
			case inline == nil && name == nil:
				errs = append(errs, field.Required(source, "must specify exactly one of inlineVolumeSpec and persistentVolumeName"))
			case inline != nil && name != nil:
				errs = append(errs, field.Invalid(source, *name, "must specify exactly one of inlineVolumeSpec and persistentVolumeName"))
			case name != nil:
				errs = append(errs, check.RequiredText(source.Child("persistentVolumeName"), *name, check.Subdomain)...)
			}
			return errs
		},
		ValidateUpdate: func(a, old *storagev1.VolumeAttachment) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&a.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			if !equality.Semantic.DeepEqual(a.Spec, old.Spec) {
				errs = append(errs, field.Invalid(field.NewPath("spec"), a.Spec, "field is immutable"))
			}
			return errs
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Attacher", storagev1.VolumeAttachmentSpec{}.SwaggerDoc()["attacher"]),
			cells.Text("PV", storagev1.VolumeAttachmentSource{}.SwaggerDoc()["persistentVolumeName"]),
			cells.Text("Node", storagev1.VolumeAttachmentSpec{}.SwaggerDoc()["nodeName"]),
			{Name: "Attached", Type: "boolean", Description: storagev1.VolumeAttachmentStatus{}.SwaggerDoc()["attached"]},
			cells.Age,
		},
		Row: func(a *storagev1.VolumeAttachment, now time.Time) []any {
			return []any{
				a.Name, a.Spec.Attacher, text(a.Spec.Source.PersistentVolumeName, ""), a.Spec.NodeName,
				a.Status.Attached, cells.Since(a.CreationTimestamp, now),
			}
		},

		Status: &kind.TypedStatus[*storagev1.VolumeAttachment]{
			PrepareUpdate: func(a, old *storagev1.VolumeAttachment) { a.Spec = old.Spec },
			ValidateUpdate: func(a, old *storagev1.VolumeAttachment) field.ErrorList {
				return apivalidation.ValidateObjectMetaUpdate(&a.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			},
		},
	}.Kind()
}
