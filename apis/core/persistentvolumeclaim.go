package core

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// PersistentVolumeClaim is the kind PersistentVolumeClaim.
func PersistentVolumeClaim() kind.Kind {
	return kind.Typed[*corev1.PersistentVolumeClaim]{
		GVK:        corev1.SchemeGroupVersion.WithKind("PersistentVolumeClaim"),
		Resource:   "persistentvolumeclaims",
		Singular:   "persistentvolumeclaim",
		ShortNames: []string{"pvc"},
		Namespaced: true,

		New:     func() runtime.Object { return &corev1.PersistentVolumeClaim{} },
		NewList: func() runtime.Object { return &corev1.PersistentVolumeClaimList{} },

		Default: func(c *corev1.PersistentVolumeClaim) {
			if c.Status.Phase == "" {
				c.Status.Phase = corev1.ClaimPending
			}
			setDefault(&c.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
		},
		PrepareCreate: func(c *corev1.PersistentVolumeClaim) {
			c.Status = corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimPending}
			sameSource(&c.Spec)
		},
		PrepareUpdate: func(c, old *corev1.PersistentVolumeClaim) {
			c.Status = old.Status
			sameSource(&c.Spec)
		},
		Validate: func(c *corev1.PersistentVolumeClaim) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&c.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			return append(errs, ValidateClaimSpec(&c.Spec, field.NewPath("spec"))...)
		},
		ValidateUpdate: validateClaimUpdate,

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Status", corev1.PersistentVolumeClaimStatus{}.SwaggerDoc()["phase"]),
			cells.Text("Volume", corev1.PersistentVolumeClaimSpec{}.SwaggerDoc()["volumeName"]),
			cells.Text("Capacity", corev1.PersistentVolumeClaimStatus{}.SwaggerDoc()["capacity"]),
			cells.Text("Access Modes", corev1.PersistentVolumeClaimStatus{}.SwaggerDoc()["accessModes"]),
			cells.Text("StorageClass", corev1.PersistentVolumeClaimSpec{}.SwaggerDoc()["storageClassName"]),
			cells.Text("VolumeAttributesClass", corev1.PersistentVolumeClaimSpec{}.SwaggerDoc()["volumeAttributesClassName"]),
			cells.Age,
			cells.Wide(cells.Text("VolumeMode", corev1.PersistentVolumeClaimSpec{}.SwaggerDoc()["volumeMode"])),
		},
		Row: claimRow,

		Status: &kind.TypedStatus[*corev1.PersistentVolumeClaim]{
			PrepareUpdate: func(c, old *corev1.PersistentVolumeClaim) { c.Spec = old.Spec },
			ValidateUpdate: func(c, old *corev1.PersistentVolumeClaim) field.ErrorList {
				status := field.NewPath("status")
				errs := apivalidation.ValidateObjectMetaUpdate(&c.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
				errs = append(errs, check.OneOf(status.Child("phase"), c.Status.Phase, corev1.ClaimPending, corev1.ClaimBound, corev1.ClaimLost)...)
				for name, size := range c.Status.Capacity {
					errs = append(errs, validateQuantity(name, size, status.Child("capacity").Key(string(name)))...)
				}
				return errs
			},
		},
		UnconditionalUpdate: true,
	}.Kind()
}

// sameSource keeps the two fields for the source of a claim's data alike, as
// long as what they name can stand in both.
func sameSource(spec *corev1.PersistentVolumeClaimSpec) {
	switch source, ref := spec.DataSource, spec.DataSourceRef; {
	case source != nil && ref == nil:
		spec.DataSourceRef = &corev1.TypedObjectReference{APIGroup: source.APIGroup, Kind: source.Kind, Name: source.Name}
	case source == nil && ref != nil && (ref.Namespace == nil || *ref.Namespace == ""):
		spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: ref.APIGroup, Kind: ref.Kind, Name: ref.Name}
	}
}

// ValidateClaimSpec checks the spec of a claim, alone or in a template.
func ValidateClaimSpec(spec *corev1.PersistentVolumeClaimSpec, at *field.Path) field.ErrorList {
	errs := validateAccessModes(spec.AccessModes, at.Child("accessModes"))
	errs = append(errs, check.LabelSelector(at.Child("selector"), spec.Selector)...)
	errs = append(errs, validateStorage(spec.Resources.Requests, at.Child("resources"))...)
	if name := spec.StorageClassName; name != nil {
		errs = append(errs, optionalName(*name, at.Child("storageClassName"))...)
	}
	if name := spec.VolumeAttributesClassName; name != nil {
		errs = append(errs, optionalName(*name, at.Child("volumeAttributesClassName"))...)
	}
	errs = append(errs, check.OneOfOrNil(at.Child("volumeMode"), spec.VolumeMode, corev1.PersistentVolumeBlock, corev1.PersistentVolumeFilesystem)...)
	if s := spec.DataSource; s != nil {
		errs = append(errs, validateDataSource(s.APIGroup, s.Kind, s.Name, at.Child("dataSource"))...)
	}
	if s := spec.DataSourceRef; s != nil {
		errs = append(errs, validateDataSource(s.APIGroup, s.Kind, s.Name, at.Child("dataSourceRef"))...)
	}
	switch source, ref := spec.DataSource, spec.DataSourceRef; {
	case source == nil || ref == nil:
	case ref.Namespace != nil && *ref.Namespace != "":
		errs = append(errs, field.Invalid(at.Child("dataSource"), source.Name, "may not be specified when dataSourceRef.namespace is specified"))
	case ptr.Deref(source.APIGroup, "") != ptr.Deref(ref.APIGroup, "") || source.Kind != ref.Kind || source.Name != ref.Name:
		errs = append(errs, field.Invalid(at.Child("dataSource"), source.Name, "must match dataSourceRef"))
	}
	return errs
}

func validateDataSource(group *string, kindName, name string, at *field.Path) field.ErrorList {
	errs := check.RequiredText(at.Child("name"), name, nil)
	errs = append(errs, check.RequiredText(at.Child("kind"), kindName, nil)...)
	if (group == nil || *group == "") && kindName != "PersistentVolumeClaim" {
		errs = append(errs, field.Invalid(at, kindName, "must be 'PersistentVolumeClaim' when referencing the default apiGroup"))
	}
	if group != nil && *group != "" {
		errs = append(errs, check.Text(at.Child("apiGroup"), *group, check.Subdomain)...)
	}
	return errs
}

// validateClaimUpdate lets a claim be bound once, be given a class while it is
// not bound, and grow.
func validateClaimUpdate(c, old *corev1.PersistentVolumeClaim) field.ErrorList {
	spec := field.NewPath("spec")
	errs := apivalidation.ValidateObjectMetaUpdate(&c.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	errs = append(errs, ValidateClaimSpec(&c.Spec, spec)...)

	rest := c.Spec.DeepCopy()
	if old.Spec.VolumeName == "" {
		rest.VolumeName = ""
	}
	if old.Spec.StorageClassName == nil && old.Spec.VolumeName == "" {
		rest.StorageClassName = nil
	}
	bound := old.Status.Phase == corev1.ClaimBound
	if bound {
		rest.Resources.Requests = old.Spec.Resources.Requests
	}
	if bound {
		rest.VolumeAttributesClassName = old.Spec.VolumeAttributesClassName
		if now, was := c.Spec.VolumeAttributesClassName, old.Spec.VolumeAttributesClassName; was != nil && *was != "" && (now == nil || *now == "") {
			errs = append(errs, field.Forbidden(spec.Child("volumeAttributesClassName"), fmt.Sprintf("may not be unset: it is %q", *was)))
		}
	}
	if !equality.Semantic.DeepEqual(*rest, old.Spec) {
		return append(errs, field.Forbidden(spec, "spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims"))
	}
	size, was := c.Spec.Resources.Requests[corev1.ResourceStorage], old.Spec.Resources.Requests[corev1.ResourceStorage]
	// A growth that does not succeed may be taken back as far as the volume is.
	if has, ok := old.Status.Capacity[corev1.ResourceStorage]; size.Cmp(was) < 0 && (!ok || size.Cmp(has) <= 0) {
		errs = append(errs, field.Forbidden(spec.Child("resources", "requests", "storage"), "field can not be less than status.capacity"))
	}
	return errs
}

func claimRow(c *corev1.PersistentVolumeClaim, now time.Time) []any {
	phase := string(c.Status.Phase)
	if c.DeletionTimestamp != nil {
		phase = "Terminating"
	}
	modes, size := "", ""
	if c.Spec.VolumeName != "" {
		modes = shortModes(c.Status.AccessModes)
		capacity := c.Status.Capacity[corev1.ResourceStorage]
		size = capacity.String()
	}
	class := ""
	if c.Spec.StorageClassName != nil {
		class = *c.Spec.StorageClassName
	}
	return []any{
		c.Name, phase, c.Spec.VolumeName, size, modes, class, unset(c.Spec.VolumeAttributesClassName),
		cells.Since(c.CreationTimestamp, now), volumeMode(c.Spec.VolumeMode),
	}
}
