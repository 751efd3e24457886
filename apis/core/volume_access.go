package core

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/check"
)

// accessModes are all ways to mount a volume, with their short names.
var accessModes = []struct {
	mode  corev1.PersistentVolumeAccessMode
	short string
}{
	{corev1.ReadWriteOnce, "RWO"},
	{corev1.ReadOnlyMany, "ROX"},
	{corev1.ReadWriteMany, "RWX"},
	{corev1.ReadWriteOncePod, "RWOP"},
}

// shortModes lists modes by their short names, in their usual order.
func shortModes(modes []corev1.PersistentVolumeAccessMode) string {
	var short []string
	for _, known := range accessModes {
		if slices.Contains(modes, known.mode) {
			short = append(short, known.short)
		}
	}
	return strings.Join(short, ",")
}

func validateAccessModes(modes []corev1.PersistentVolumeAccessMode, at *field.Path) field.ErrorList {
	if len(modes) == 0 {
		return field.ErrorList{field.Required(at, "at least 1 access mode is required")}
	}
	var errs field.ErrorList
	for _, mode := range modes {
		errs = append(errs, check.OneOf(at, mode, corev1.ReadWriteOnce, corev1.ReadOnlyMany, corev1.ReadWriteMany, corev1.ReadWriteOncePod)...)
	}
	if len(modes) > 1 && slices.Contains(modes, corev1.ReadWriteOncePod) {
		errs = append(errs, field.Forbidden(at, "may not use ReadWriteOncePod with other access modes"))
	}
	return errs
}

// validateStorage wants an amount of storage above zero.
func validateStorage(list corev1.ResourceList, at *field.Path) field.ErrorList {
	at = at.Key(string(corev1.ResourceStorage))
	size, ok := list[corev1.ResourceStorage]
	switch {
	case !ok:
		return field.ErrorList{field.Required(at, "")}
	case size.Sign() <= 0:
		return field.ErrorList{field.Invalid(at, size.String(), "must be greater than zero")}
	}
	return nil
}

// optionalName is the rule for a name that may be left out.
func optionalName(name string, at *field.Path) field.ErrorList {
	if name == "" {
		return nil
	}
	return check.Text(at, name, check.Subdomain)
}

// unset is what tables show for a class of attributes that was not chosen.
func unset(name *string) string {
	if name == nil || *name == "" {
		return "<unset>"
	}
	return *name
}

func volumeMode(mode *corev1.PersistentVolumeMode) string {
	if mode == nil {
		return "<unset>"
	}
	return string(*mode)
}
