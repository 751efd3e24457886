package core

import (
	"reflect"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// PersistentVolume is the kind PersistentVolume.
func PersistentVolume() kind.Kind {
	return kind.Typed[*corev1.PersistentVolume]{
		GVK:        corev1.SchemeGroupVersion.WithKind("PersistentVolume"),
		Resource:   "persistentvolumes",
		Singular:   "persistentvolume",
		ShortNames: []string{"pv"},

		New:     func() runtime.Object { return &corev1.PersistentVolume{} },
		NewList: func() runtime.Object { return &corev1.PersistentVolumeList{} },

		Default: func(v *corev1.PersistentVolume) {
			if v.Status.Phase == "" {
				v.Status.Phase = corev1.VolumePending
			}
			if v.Spec.PersistentVolumeReclaimPolicy == "" {
				v.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
			}
			setDefault(&v.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
			if path := v.Spec.HostPath; path != nil {
				setDefault(&path.Type, corev1.HostPathUnset)
			}
		},
		PrepareCreate: func(v *corev1.PersistentVolume) {
			v.Status = corev1.PersistentVolumeStatus{Phase: corev1.VolumePending}
		},
		PrepareUpdate: func(v, old *corev1.PersistentVolume) { v.Status = old.Status },
		Validate: func(v *corev1.PersistentVolume) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&v.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			return append(errs, validateVolumeSpec(&v.Spec, field.NewPath("spec"))...)
		},
		ValidateUpdate: validateVolumeUpdate,

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Capacity", corev1.PersistentVolumeSpec{}.SwaggerDoc()["capacity"]),
			cells.Text("Access Modes", corev1.PersistentVolumeSpec{}.SwaggerDoc()["accessModes"]),
			cells.Text("Reclaim Policy", corev1.PersistentVolumeSpec{}.SwaggerDoc()["persistentVolumeReclaimPolicy"]),
			cells.Text("Status", corev1.PersistentVolumeStatus{}.SwaggerDoc()["phase"]),
			cells.Text("Claim", corev1.PersistentVolumeSpec{}.SwaggerDoc()["claimRef"]),
			cells.Text("StorageClass", corev1.PersistentVolumeSpec{}.SwaggerDoc()["storageClassName"]),
			cells.Text("VolumeAttributesClass", corev1.PersistentVolumeSpec{}.SwaggerDoc()["volumeAttributesClassName"]),
			cells.Text("Reason", corev1.PersistentVolumeStatus{}.SwaggerDoc()["reason"]),
			cells.Age,
			cells.Wide(cells.Text("VolumeMode", corev1.PersistentVolumeSpec{}.SwaggerDoc()["volumeMode"])),
		},
		Row: volumeRow,

		Status: &kind.TypedStatus[*corev1.PersistentVolume]{
			PrepareUpdate: func(v, old *corev1.PersistentVolume) { v.Spec = old.Spec },
			ValidateUpdate: func(v, old *corev1.PersistentVolume) field.ErrorList {
				errs := apivalidation.ValidateObjectMetaUpdate(&v.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
				return append(errs, check.OneOf(field.NewPath("status", "phase"), v.Status.Phase,
					corev1.VolumePending, corev1.VolumeAvailable, corev1.VolumeBound, corev1.VolumeReleased, corev1.VolumeFailed)...)
			},
		},
		UnconditionalUpdate: true,
	}.Kind()
}

// sourcesOf returns the JSON names of the sources of a persistent volume.
func sourcesOf(source *corev1.PersistentVolumeSource) []string {
	v, t := reflect.ValueOf(source).Elem(), reflect.TypeFor[corev1.PersistentVolumeSource]()
	var set []string
	for i := range t.NumField() {
		if !v.Field(i).IsNil() {
			name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
			set = append(set, name)
		}
	}
	return set
}

func validateVolumeSpec(spec *corev1.PersistentVolumeSpec, at *field.Path) field.ErrorList {
	errs := validateAccessModes(spec.AccessModes, at.Child("accessModes"))
	capacity := at.Child("capacity")
	switch _, ok := spec.Capacity[corev1.ResourceStorage]; {
	case len(spec.Capacity) == 0:
		errs = append(errs, field.Required(capacity, ""))
	case !ok || len(spec.Capacity) > 1:
		errs = append(errs, field.NotSupported(capacity, spec.Capacity, []corev1.ResourceName{corev1.ResourceStorage}))
	default:
		errs = append(errs, validateStorage(spec.Capacity, capacity)...)
	}
	errs = append(errs, validatePersistentSource(spec, at)...)
	policy := at.Child("persistentVolumeReclaimPolicy")
	errs = append(errs, check.OneOfOrEmpty(policy, spec.PersistentVolumeReclaimPolicy,
		corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRecycle, corev1.PersistentVolumeReclaimRetain)...)
	if h := spec.HostPath; h != nil && h.Path == "/" && spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimRecycle {
		errs = append(errs, field.Forbidden(policy, "may not be 'recycle' for a hostPath mount of '/'"))
	}
	errs = append(errs, optionalName(spec.StorageClassName, at.Child("storageClassName"))...)
	errs = append(errs, check.OneOfOrNil(at.Child("volumeMode"), spec.VolumeMode, corev1.PersistentVolumeBlock, corev1.PersistentVolumeFilesystem)...)
	if name := spec.VolumeAttributesClassName; name != nil {
		errs = append(errs, check.RequiredText(at.Child("volumeAttributesClassName"), *name, check.Subdomain)...)
		if spec.CSI == nil {
			errs = append(errs, field.Required(at.Child("csi"), "has to be specified when using volumeAttributesClassName"))
		}
	}
	return append(errs, validateVolumeAffinity(spec, at.Child("nodeAffinity"))...)
}

func validatePersistentSource(spec *corev1.PersistentVolumeSpec, at *field.Path) field.ErrorList {
	set := sourcesOf(&spec.PersistentVolumeSource)
	if len(set) == 0 {
		return field.ErrorList{field.Required(at, "must specify a volume type")}
	}
	var errs field.ErrorList
	for _, name := range set[1:] {
		errs = append(errs, field.Forbidden(at.Child(name), "may not specify more than 1 volume type"))
	}
	at = at.Child(set[0])
	switch set[0] {
	case "hostPath":
		errs = append(errs, validateHostPath(spec.HostPath, at)...)
	case "local":
		errs = append(errs, check.RequiredText(at.Child("path"), spec.Local.Path, noBacksteps)...)
	case "nfs":
		errs = append(errs, check.RequiredText(at.Child("server"), spec.NFS.Server, nil)...)
		errs = append(errs, check.RequiredText(at.Child("path"), spec.NFS.Path, nil)...)
		if path := spec.NFS.Path; path != "" && !strings.HasPrefix(path, "/") {
			errs = append(errs, field.Invalid(at.Child("path"), path, "must be an absolute path"))
		}
	case "csi":
		errs = append(errs, check.RequiredText(at.Child("driver"), spec.CSI.Driver, check.Subdomain)...)
		errs = append(errs, check.RequiredText(at.Child("volumeHandle"), spec.CSI.VolumeHandle, nil)...)
	}
	return errs
}

// validateVolumeAffinity checks from which nodes a volume can be reached.
func validateVolumeAffinity(spec *corev1.PersistentVolumeSpec, at *field.Path) field.ErrorList {
	switch {
	case spec.NodeAffinity == nil && spec.Local != nil:
		return field.ErrorList{field.Required(at, "Local volume requires node affinity")}
	case spec.NodeAffinity == nil:
		return nil
	case spec.NodeAffinity.Required == nil:
		return field.ErrorList{field.Required(at.Child("required"), "must specify required node constraints")}
	}
	return ValidateNodeSelector(spec.NodeAffinity.Required, at.Child("required"))
}

func validateVolumeUpdate(v, old *corev1.PersistentVolume) field.ErrorList {
	spec := field.NewPath("spec")
	errs := apivalidation.ValidateObjectMetaUpdate(&v.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	errs = append(errs, validateVolumeSpec(&v.Spec, spec)...)
	if !equality.Semantic.DeepEqual(v.Spec.PersistentVolumeSource, old.Spec.PersistentVolumeSource) {
		errs = append(errs, field.Forbidden(spec.Child("persistentvolumesource"), "spec.persistentvolumesource is immutable after creation"))
	}
	errs = append(errs, apivalidation.ValidateImmutableField(v.Spec.VolumeMode, old.Spec.VolumeMode, spec.Child("volumeMode"))...)
	if old.Spec.NodeAffinity != nil {
		errs = append(errs, apivalidation.ValidateImmutableField(v.Spec.NodeAffinity, old.Spec.NodeAffinity, spec.Child("nodeAffinity"))...)
	}
	return errs
}

func volumeRow(v *corev1.PersistentVolume, now time.Time) []any {
	phase := string(v.Status.Phase)
	if v.DeletionTimestamp != nil {
		phase = "Terminating"
	}
	claim := ""
	if ref := v.Spec.ClaimRef; ref != nil {
		claim = ref.Namespace + "/" + ref.Name
	}
	size := v.Spec.Capacity[corev1.ResourceStorage]
	return []any{
		v.Name, size.String(), shortModes(v.Spec.AccessModes), string(v.Spec.PersistentVolumeReclaimPolicy), phase, claim,
		v.Spec.StorageClassName, unset(v.Spec.VolumeAttributesClassName), v.Status.Reason,
		cells.Since(v.CreationTimestamp, now), volumeMode(v.Spec.VolumeMode),
	}
}
