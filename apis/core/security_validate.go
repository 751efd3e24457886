package core

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/check"
)

const (
	maxSysctl    = 253
	sysctlFormat = `([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?`
)

var sysctlRegexp = regexp.MustCompile("^" + sysctlFormat + "$")

// validatePodSecurityContext checks securityContext and the fields beside it
// that open the pod to its node.
func validatePodSecurityContext(spec *corev1.PodSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if spec.HostPID && spec.ShareProcessNamespace != nil && *spec.ShareProcessNamespace {
		errs = append(errs, field.Invalid(at.Child("shareProcessNamespace"), *spec.ShareProcessNamespace, "ShareProcessNamespace and HostPID cannot both be enabled"))
	}
	if spec.HostUsers != nil && !*spec.HostUsers {
		for _, host := range []struct {
			name string
			set  bool
		}{{"hostNetwork", spec.HostNetwork}, {"hostPID", spec.HostPID}, {"hostIPC", spec.HostIPC}} {
			if host.set {
				errs = append(errs, field.Forbidden(at.Child(host.name), "when `hostUsers` is false"))
			}
		}
	}
	sc := spec.SecurityContext
	if sc == nil {
		return errs
	}
	at = at.Child("securityContext")
	errs = append(errs, check.ID(at.Child("runAsUser"), sc.RunAsUser, validation.IsValidUserID)...)
	errs = append(errs, check.ID(at.Child("runAsGroup"), sc.RunAsGroup, validation.IsValidGroupID)...)
	errs = append(errs, check.ID(at.Child("fsGroup"), sc.FSGroup, validation.IsValidGroupID)...)
	for i := range sc.SupplementalGroups {
		errs = append(errs, check.ID(at.Child("supplementalGroups").Index(i), &sc.SupplementalGroups[i], validation.IsValidGroupID)...)
	}
	errs = append(errs, check.OneOfOrNil(at.Child("supplementalGroupsPolicy"), sc.SupplementalGroupsPolicy,
		corev1.SupplementalGroupsPolicyMerge, corev1.SupplementalGroupsPolicyStrict)...)
	errs = append(errs, check.OneOfOrNil(at.Child("fsGroupChangePolicy"), sc.FSGroupChangePolicy,
		corev1.FSGroupChangeOnRootMismatch, corev1.FSGroupChangeAlways)...)
	errs = append(errs, validateSysctls(spec, at.Child("sysctls"))...)
	errs = append(errs, validateSeccomp(sc.SeccompProfile, at.Child("seccompProfile"))...)
	errs = append(errs, validateAppArmor(sc.AppArmorProfile, at.Child("appArmorProfile"))...)
	return errs
}

func validateSysctls(spec *corev1.PodSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	names := sets.New[string]()
	for i, sysctl := range spec.SecurityContext.Sysctls {
		at := at.Index(i).Child("name")
		switch {
		case sysctl.Name == "":
			errs = append(errs, field.Required(at, ""))
		case len(sysctl.Name) > maxSysctl || !sysctlRegexp.MatchString(sysctl.Name):
			errs = append(errs, field.Invalid(at, sysctl.Name, fmt.Sprintf("must have at most %d characters and match regex %s", maxSysctl, sysctlFormat)))
		case names.Has(sysctl.Name):
			errs = append(errs, field.Duplicate(at, sysctl.Name))
		}
		names.Insert(sysctl.Name)
	}
	return errs
}

func validateSecurityContext(sc *corev1.SecurityContext, at *field.Path) field.ErrorList {
	if sc == nil {
		return nil
	}
	errs := check.ID(at.Child("runAsUser"), sc.RunAsUser, validation.IsValidUserID)
	errs = append(errs, check.ID(at.Child("runAsGroup"), sc.RunAsGroup, validation.IsValidGroupID)...)
	errs = append(errs, validateSeccomp(sc.SeccompProfile, at.Child("seccompProfile"))...)
	errs = append(errs, validateAppArmor(sc.AppArmorProfile, at.Child("appArmorProfile"))...)
	if sc.AllowPrivilegeEscalation != nil && !*sc.AllowPrivilegeEscalation {
		if sc.Privileged != nil && *sc.Privileged {
			errs = append(errs, field.Invalid(at, sc, "cannot set `allowPrivilegeEscalation` to false and `privileged` to true"))
		}
		if sc.Capabilities != nil && slices.Contains(sc.Capabilities.Add, "CAP_SYS_ADMIN") {
			errs = append(errs, field.Invalid(at, sc, "cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN"))
		}
	}
	return errs
}

// validateProcMount: only root of a user namespace of its own may see all of
// /proc (KEP-4265).
func validateProcMount(sc *corev1.SecurityContext, spec *corev1.PodSpec, at *field.Path) field.ErrorList {
	if sc == nil || sc.ProcMount == nil {
		return nil
	}
	at = at.Child("procMount")
	errs := check.OneOf(at, *sc.ProcMount, corev1.DefaultProcMount, corev1.UnmaskedProcMount)
	if *sc.ProcMount == corev1.UnmaskedProcMount && (spec.HostUsers == nil || *spec.HostUsers) {
		errs = append(errs, field.Invalid(at, *sc.ProcMount, "`hostUsers` must be false to use `Unmasked`"))
	}
	return errs
}

func validateSeccomp(p *corev1.SeccompProfile, at *field.Path) field.ErrorList {
	if p == nil {
		return nil
	}
	errs := check.OneOf(at.Child("type"), p.Type, corev1.SeccompProfileTypeLocalhost, corev1.SeccompProfileTypeRuntimeDefault, corev1.SeccompProfileTypeUnconfined)
	return append(errs, validateLocalProfile(p.LocalhostProfile, p.Type == corev1.SeccompProfileTypeLocalhost, "seccomp", descending, at.Child("localhostProfile"))...)
}

func validateAppArmor(p *corev1.AppArmorProfile, at *field.Path) field.ErrorList {
	if p == nil {
		return nil
	}
	errs := check.OneOf(at.Child("type"), p.Type, corev1.AppArmorProfileTypeLocalhost, corev1.AppArmorProfileTypeRuntimeDefault, corev1.AppArmorProfileTypeUnconfined)
	return append(errs, validateLocalProfile(p.LocalhostProfile, p.Type == corev1.AppArmorProfileTypeLocalhost, "AppArmor", appArmorName, at.Child("localhostProfile"))...)
}

// maxAppArmorName is the length of a profile's name that AppArmor can load.
const maxAppArmorName = 4095

func appArmorName(name string) []string {
	switch {
	case name != strings.TrimSpace(name):
		return []string{"must not be padded with whitespace"}
	case len(name) > maxAppArmorName:
		return []string{validation.MaxLenError(maxAppArmorName)}
	}
	return nil
}

// validateLocalProfile: a profile has a name exactly if it is a local one.
func validateLocalProfile(name *string, local bool, what string, rule func(string) []string, at *field.Path) field.ErrorList {
	switch {
	case !local && name != nil:
		return field.ErrorList{field.Invalid(at, *name, fmt.Sprintf("can only be set when %s type is Localhost", what))}
	case local && (name == nil || path.Clean(*name) == "."):
		return field.ErrorList{field.Required(at, fmt.Sprintf("must be set when %s type is Localhost", what))}
	case local && rule != nil:
		return check.Text(at, *name, rule)
	}
	return nil
}
