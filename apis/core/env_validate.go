package core

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/check"
)

// Fields of a pod that the downward API hands to containers.
var (
	envFields = sets.New(
		"metadata.name", "metadata.namespace", "metadata.uid",
		"spec.nodeName", "spec.serviceAccountName",
		"status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs",
	)
	volumeFields = sets.New(
		"metadata.name", "metadata.namespace", "metadata.uid", "metadata.labels", "metadata.annotations",
	)
	resourceFields = sets.New(
		"limits.cpu", "limits.memory", "limits.ephemeral-storage",
		"requests.cpu", "requests.memory", "requests.ephemeral-storage",
	)
)

// Divisors that a resource may be expressed in, by kind of resource.
var (
	cpuDivisors  = []string{"1m", "1"}
	byteDivisors = []string{"1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei"}
)

func validateEnv(env []corev1.EnvVar, volumes map[string]corev1.VolumeSource, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, variable := range env {
		at := at.Index(i)
		errs = append(errs, check.RequiredText(at.Child("name"), variable.Name, validation.IsRelaxedEnvVarName)...)
		if variable.ValueFrom != nil {
			errs = append(errs, validateEnvSource(variable, volumes, at.Child("valueFrom"))...)
		}
	}
	return errs
}

func validateEnvSource(variable corev1.EnvVar, volumes map[string]corev1.VolumeSource, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	from, sources := variable.ValueFrom, 0
	if ref := from.FieldRef; ref != nil {
		sources++
		errs = append(errs, validateFieldRef(ref, envFields, at.Child("fieldRef"))...)
	}
	if ref := from.ResourceFieldRef; ref != nil {
		sources++
		errs = append(errs, validateResourceFieldRef(ref, at.Child("resourceFieldRef"))...)
	}
	if ref := from.ConfigMapKeyRef; ref != nil {
		sources++
		errs = append(errs, validateKeyRef(ref.Name, ref.Key, at.Child("configMapKeyRef"))...)
	}
	if ref := from.SecretKeyRef; ref != nil {
		sources++
		errs = append(errs, validateKeyRef(ref.Name, ref.Key, at.Child("secretKeyRef"))...)
	}
	if ref := from.FileKeyRef; ref != nil {
		sources++
		errs = append(errs, validateFileKeyRef(ref, volumes, at.Child("fileKeyRef"))...)
	}
	switch {
	case sources == 0:
		errs = append(errs, field.Invalid(at, "", "must specify one of: `configMapKeyRef`, `fieldRef`, `fileKeyRef`, `resourceFieldRef` or `secretKeyRef`"))
	case variable.Value != "":
		errs = append(errs, field.Invalid(at, "", "may not be specified when `value` is not empty"))
	case sources > 1:
		errs = append(errs, field.Invalid(at, "", "may not have more than one field specified at a time"))
	}
	return errs
}

func validateKeyRef(name, key string, at *field.Path) field.ErrorList {
	errs := check.RequiredText(at.Child("name"), name, nil)
	return append(errs, check.RequiredText(at.Child("key"), key, validation.IsConfigMapKey)...)
}

func validateFileKeyRef(ref *corev1.FileKeySelector, volumes map[string]corev1.VolumeSource, at *field.Path) field.ErrorList {
	errs := check.RequiredText(at.Child("key"), ref.Key, validation.IsRelaxedEnvVarName)
	errs = append(errs, check.RequiredText(at.Child("path"), ref.Path, localFile)...)
	errs = append(errs, check.RequiredText(at.Child("volumeName"), ref.VolumeName, nil)...)
	if source, ok := volumes[ref.VolumeName]; !ok && ref.VolumeName != "" {
		errs = append(errs, field.NotFound(at.Child("volumeName"), ref.VolumeName))
	} else if ok && source.EmptyDir == nil {
		errs = append(errs, field.Invalid(at.Child("volumeName"), ref.VolumeName, "referenced volume must be of type emptyDir"))
	}
	return errs
}

// validateFieldRef wants a field of a pod that is among allowed, or one label
// or annotation: metadata.labels['key'].
func validateFieldRef(ref *corev1.ObjectFieldSelector, allowed sets.Set[string], at *field.Path) field.ErrorList {
	if ref.APIVersion == "" {
		return field.ErrorList{field.Required(at.Child("apiVersion"), "")}
	}
	if ref.FieldPath == "" {
		return field.ErrorList{field.Required(at.Child("fieldPath"), "")}
	}
	at = at.Child("fieldPath")
	if ref.APIVersion != "v1" {
		return field.ErrorList{field.Invalid(at, ref.FieldPath, fmt.Sprintf("error converting fieldPath: unsupported pod version: %s", ref.APIVersion))}
	}
	if base, key, ok := subscript(ref.FieldPath); ok {
		switch base {
		case "metadata.annotations":
			return check.Text(at, strings.ToLower(key), validation.IsQualifiedName)
		case "metadata.labels":
			return check.Text(at, key, validation.IsQualifiedName)
		default:
			return field.ErrorList{field.Invalid(at, ref.FieldPath, fmt.Sprintf("error converting fieldPath: field label does not support subscript: %s", ref.FieldPath))}
		}
	}
	if allowed.Has(ref.FieldPath) {
		return nil
	}
	if !envFields.Has(ref.FieldPath) && !volumeFields.Has(ref.FieldPath) {
		return field.ErrorList{field.Invalid(at, ref.FieldPath, fmt.Sprintf("error converting fieldPath: field label not supported: %s", ref.FieldPath))}
	}
	return field.ErrorList{field.NotSupported(at, ref.FieldPath, sets.List(allowed))}
}

// subscript splits base['key'].
func subscript(path string) (base, key string, ok bool) {
	base, rest, ok := strings.Cut(path, "['")
	if !ok || !strings.HasSuffix(rest, "']") {
		return "", "", false
	}
	return base, strings.TrimSuffix(rest, "']"), true
}

func validateResourceFieldRef(ref *corev1.ResourceFieldSelector, at *field.Path) field.ErrorList {
	if ref.Resource == "" {
		return field.ErrorList{field.Required(at.Child("resource"), "")}
	}
	_, name, _ := strings.Cut(ref.Resource, ".")
	hugePages := strings.HasPrefix(ref.Resource, "limits."+corev1.ResourceHugePagesPrefix) || strings.HasPrefix(ref.Resource, "requests."+corev1.ResourceHugePagesPrefix)
	if !resourceFields.Has(ref.Resource) && !hugePages {
		return field.ErrorList{field.NotSupported(at.Child("resource"), ref.Resource, sets.List(resourceFields))}
	}
	return validateDivisor(name, ref.Divisor, at.Child("divisor"))
}

func validateDivisor(resourceName string, divisor resource.Quantity, at *field.Path) field.ErrorList {
	if divisor.IsZero() {
		return nil // means 1
	}
	allowed := byteDivisors
	if resourceName == string(corev1.ResourceCPU) {
		allowed = cpuDivisors
	}
	if slices.Contains(allowed, divisor.String()) {
		return nil
	}
	return field.ErrorList{field.Invalid(at, divisor.String(),
		fmt.Sprintf("only divisor's values %s are supported with the %s resource", strings.Join(allowed, ", "), resourceName))}
}

func validateEnvFrom(from []corev1.EnvFromSource, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, source := range from {
		at := at.Index(i)
		if source.Prefix != "" {
			errs = append(errs, check.Text(at.Child("prefix"), source.Prefix, validation.IsRelaxedEnvVarName)...)
		}
		sources := 0
		if source.ConfigMapRef != nil {
			sources++
			errs = append(errs, check.RequiredText(at.Child("configMapRef", "name"), source.ConfigMapRef.Name, check.Subdomain)...)
		}
		if source.SecretRef != nil {
			sources++
			errs = append(errs, check.RequiredText(at.Child("secretRef", "name"), source.SecretRef.Name, check.Subdomain)...)
		}
		if sources == 0 {
			errs = append(errs, field.Invalid(at, "", "must specify one of: `configMapRef` or `secretRef`"))
		}
		if sources > 1 {
			errs = append(errs, field.Invalid(at, "", "may not have more than one field specified at a time"))
		}
	}
	return errs
}
