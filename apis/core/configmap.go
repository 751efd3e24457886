package core

import (
	"time"

	corev1 "k8s.io/api/core/v1"
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

// ConfigMap is the kind ConfigMap.
func ConfigMap() kind.Kind {
	return kind.Typed[*corev1.ConfigMap]{
		GVK:        corev1.SchemeGroupVersion.WithKind("ConfigMap"),
		Resource:   "configmaps",
		Singular:   "configmap",
		ShortNames: []string{"cm"},
		Namespaced: true,

		New:     func() runtime.Object { return &corev1.ConfigMap{} },
		NewList: func() runtime.Object { return &corev1.ConfigMapList{} },

		Validate:       validateConfigMap,
		ValidateUpdate: validateConfigMapUpdate,

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Number("Data", corev1.ConfigMap{}.SwaggerDoc()["data"]),
			cells.Age,
		},
		Row: func(c *corev1.ConfigMap, now time.Time) []any {
			return []any{c.Name, int64(len(c.Data) + len(c.BinaryData)), cells.Since(c.CreationTimestamp, now)}
		},
		UnconditionalUpdate: true,
	}.Kind()
}

func validateConfigMap(c *corev1.ConfigMap) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&c.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	size := 0
	for key, value := range c.Data {
		errs = append(errs, check.Text(field.NewPath("data").Key(key), key, validation.IsConfigMapKey)...)
		if _, twice := c.BinaryData[key]; twice {
			errs = append(errs, field.Invalid(field.NewPath("data").Key(key), key, "duplicate of key present in binaryData"))
		}
		size += len(value)
	}
	for key, value := range c.BinaryData {
		errs = append(errs, check.Text(field.NewPath("binaryData").Key(key), key, validation.IsConfigMapKey)...)
		size += len(value)
	}
	if size > corev1.MaxSecretSize {
		// There is no field for the two maps together: clients know this as "[]".
		errs = append(errs, field.TooLong(field.NewPath(""), "", corev1.MaxSecretSize))
	}
	return errs
}

func validateConfigMapUpdate(c, old *corev1.ConfigMap) field.ErrorList {
	errs := apivalidation.ValidateObjectMetaUpdate(&c.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	if isTrue(old.Immutable) {
		const msg = "field is immutable when `immutable` is set"
		if !isTrue(c.Immutable) {
			errs = append(errs, field.Forbidden(field.NewPath("immutable"), msg))
		}
		if !equality.Semantic.DeepEqual(c.Data, old.Data) {
			errs = append(errs, field.Forbidden(field.NewPath("data"), msg))
		}
		if !equality.Semantic.DeepEqual(c.BinaryData, old.BinaryData) {
			errs = append(errs, field.Forbidden(field.NewPath("binaryData"), msg))
		}
	}
	return append(errs, validateConfigMap(c)...)
}

func isTrue(b *bool) bool { return b != nil && *b }
