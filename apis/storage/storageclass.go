package storage

import (
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// DefaultClass is the annotation of the class for claims that name none.
const DefaultClass = "storageclass.kubernetes.io/is-default-class"

const betaDefaultClass = "storageclass.beta.kubernetes.io/is-default-class"

// Default is the class for claims that name none, nil: there is none. Of several
// that are marked, the newest counts, and of equally new ones the first by name.
func Default(classes []storagev1.StorageClass) *storagev1.StorageClass {
	var best *storagev1.StorageClass
	for i := range classes {
		c := &classes[i]
		if c.Annotations[DefaultClass] != "true" && c.Annotations[betaDefaultClass] != "true" {
			continue
		}
		newer := best == nil || best.CreationTimestamp.Before(&c.CreationTimestamp)
		if newer || best.CreationTimestamp.Equal(&c.CreationTimestamp) && c.Name < best.Name {
			best = c
		}
	}
	return best
}

// StorageClass is the kind StorageClass.
func StorageClass() kind.Kind {
	return kind.Typed[*storagev1.StorageClass]{
		GVK:        storagev1.SchemeGroupVersion.WithKind("StorageClass"),
		Resource:   "storageclasses",
		Singular:   "storageclass",
		ShortNames: []string{"sc"},

		New:     func() runtime.Object { return &storagev1.StorageClass{} },
		NewList: func() runtime.Object { return &storagev1.StorageClassList{} },

		Default: func(c *storagev1.StorageClass) {
			setDefault(&c.ReclaimPolicy, corev1.PersistentVolumeReclaimDelete)
			setDefault(&c.VolumeBindingMode, storagev1.VolumeBindingImmediate)
		},
		Validate:       validateClass,
		ValidateUpdate: validateClassUpdate,

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Provisioner", storagev1.StorageClass{}.SwaggerDoc()["provisioner"]),
			cells.Text("ReclaimPolicy", storagev1.StorageClass{}.SwaggerDoc()["reclaimPolicy"]),
			cells.Text("VolumeBindingMode", storagev1.StorageClass{}.SwaggerDoc()["volumeBindingMode"]),
			{Name: "AllowVolumeExpansion", Type: "boolean", Description: storagev1.StorageClass{}.SwaggerDoc()["allowVolumeExpansion"]},
			cells.Age,
		},
		Row: func(c *storagev1.StorageClass, now time.Time) []any {
			name := c.Name
			if c.Annotations[DefaultClass] == "true" {
				name += " (default)"
			}
			return []any{
				name, c.Provisioner, text(c.ReclaimPolicy, string(corev1.PersistentVolumeReclaimDelete)),
				text(c.VolumeBindingMode, "<unset>"), isTrue(c.AllowVolumeExpansion), cells.Since(c.CreationTimestamp, now),
			}
		},
		UnconditionalUpdate: true,
	}.Kind()
}

func validateClass(c *storagev1.StorageClass) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&c.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	errs = append(errs, check.RequiredText(field.NewPath("provisioner"), strings.ToLower(c.Provisioner), validation.IsQualifiedName)...)
	errs = append(errs, validateParameters(c.Parameters, true, field.NewPath("parameters"))...)
	errs = append(errs, check.OneOfOrNil(field.NewPath("reclaimPolicy"), c.ReclaimPolicy,
		corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRetain)...)
	mode := field.NewPath("volumeBindingMode")
	if c.VolumeBindingMode == nil {
		errs = append(errs, field.Required(mode, ""))
	}
	errs = append(errs, check.OneOfOrNil(mode, c.VolumeBindingMode, storagev1.VolumeBindingImmediate, storagev1.VolumeBindingWaitForFirstConsumer)...)
	return append(errs, validateTopologies(c.AllowedTopologies, field.NewPath("allowedTopologies"))...)
}

// validateTopologies checks where volumes may be made.
func validateTopologies(terms []corev1.TopologySelectorTerm, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, term := range terms {
		at := at.Index(i).Child("matchLabelExpressions")
		keys := map[string]bool{}
		for j, requirement := range term.MatchLabelExpressions {
			at := at.Index(j)
			errs = append(errs, check.Text(at.Child("key"), requirement.Key, validation.IsQualifiedName)...)
			if keys[requirement.Key] {
				errs = append(errs, field.Duplicate(at.Child("key"), requirement.Key))
			}
			keys[requirement.Key] = true
			if len(requirement.Values) == 0 {
				errs = append(errs, field.Required(at.Child("values"), ""))
			}
			values := map[string]bool{}
			for k, value := range requirement.Values {
				errs = append(errs, check.Text(at.Child("values").Index(k), value, validation.IsValidLabelValue)...)
				if values[value] {
					errs = append(errs, field.Duplicate(at.Child("values").Index(k), value))
				}
				values[value] = true
			}
		}
	}
	return errs
}

const (
	maxParameters     = 512
	maxParametersSize = 256 << 10
)

// validateParameters checks what is handed on to a driver.
func validateParameters(parameters map[string]string, none bool, at *field.Path) field.ErrorList {
	switch {
	case len(parameters) == 0 && !none:
		return field.ErrorList{field.Required(at, "must contain at least one key/value pair")}
	case len(parameters) > maxParameters:
		return field.ErrorList{field.TooLong(at, "", maxParameters)}
	}
	var errs field.ErrorList
	size := 0
	for key, value := range parameters {
		if key == "" {
			errs = append(errs, field.Invalid(at, key, "field can not be empty."))
		}
		size += len(key) + len(value)
	}
	if size > maxParametersSize {
		errs = append(errs, field.TooLong(at, "", maxParametersSize))
	}
	return errs
}

func validateClassUpdate(c, old *storagev1.StorageClass) field.ErrorList {
	errs := apivalidation.ValidateObjectMetaUpdate(&c.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	for _, immutable := range []struct {
		name string
		same bool
	}{
		{"parameters", equality.Semantic.DeepEqual(c.Parameters, old.Parameters)},
		{"provisioner", c.Provisioner == old.Provisioner},
		{"reclaimPolicy", equality.Semantic.DeepEqual(c.ReclaimPolicy, old.ReclaimPolicy)},
	} {
		if !immutable.same {
			errs = append(errs, field.Forbidden(field.NewPath(immutable.name), "updates to "+immutable.name+" are forbidden."))
		}
	}
	errs = append(errs, apivalidation.ValidateImmutableField(c.VolumeBindingMode, old.VolumeBindingMode, field.NewPath("volumeBindingMode"))...)
	return append(errs, validateTopologies(c.AllowedTopologies, field.NewPath("allowedTopologies"))...)
}

func setDefault[T any](field **T, value T) {
	if *field == nil {
		*field = &value
	}
}

func isTrue(b *bool) bool { return b != nil && *b }

// text is what stands behind a pointer, or what to show in its place.
func text[T ~string](value *T, none string) string {
	if value == nil {
		return none
	}
	return string(*value)
}
