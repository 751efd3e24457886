package core

import (
	"fmt"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/check"
)

// maxRestartRules bounds restartPolicyRules of one container.
const maxRestartRules = 20

// validateContainers checks all containers of a pod and what must be unique
// among them: names over all of them, host ports over those that run together.
func validateContainers(spec *corev1.PodSpec, volumes map[string]corev1.VolumeSource, owner specOwner, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if len(spec.Containers) == 0 {
		errs = append(errs, field.Required(at.Child("containers"), ""))
	}
	names := sets.New[string]()
	hostPorts := sets.New[string]()
	for _, group := range containerGroups(spec, at) {
		for i := range group.containers {
			c, at := &group.containers[i], group.path.Index(i)
			errs = append(errs, validateContainer(c, spec, volumes, owner, at)...)
			if names.Has(c.Name) {
				errs = append(errs, field.Duplicate(at.Child("name"), c.Name))
			}
			if c.Name != "" {
				names.Insert(c.Name)
			}
			if group.init && !IsSidecar(c) {
				errs = append(errs, validateInitContainer(c, at)...)
				errs = append(errs, claimHostPorts(c, sets.New[string](), at)...)
				continue
			}
			errs = append(errs, claimHostPorts(c, hostPorts, at)...)
			errs = append(errs, validateHooks(c, spec, at)...)
		}
	}
	for i := range spec.EphemeralContainers {
		c := (*corev1.Container)(&spec.EphemeralContainers[i].EphemeralContainerCommon)
		at := at.Child("ephemeralContainers").Index(i)
		errs = append(errs, validateContainer(c, spec, volumes, owner, at)...)
		errs = append(errs, validateEphemeralContainer(c, at)...)
		if names.Has(c.Name) {
			errs = append(errs, field.Duplicate(at.Child("name"), c.Name))
		}
		names.Insert(c.Name)
		target := spec.EphemeralContainers[i].TargetContainerName
		if target != "" && !hasContainer(spec, target) {
			errs = append(errs, field.NotFound(at.Child("targetContainerName"), target))
		}
	}
	return errs
}

// hasContainer tells whether a container that is not ephemeral has the name.
func hasContainer(spec *corev1.PodSpec, name string) bool {
	named := func(c corev1.Container) bool { return c.Name == name }
	return slices.ContainsFunc(spec.Containers, named) || slices.ContainsFunc(spec.InitContainers, named)
}

// claimHostPorts reports host ports that are taken and takes the others.
func claimHostPorts(c *corev1.Container, taken sets.Set[string], at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, port := range c.Ports {
		if port.HostPort == 0 {
			continue
		}
		key := fmt.Sprintf("%s/%s/%d", port.Protocol, port.HostIP, port.HostPort)
		if taken.Has(key) {
			errs = append(errs, field.Duplicate(at.Child("ports").Index(i).Child("hostPort"), key))
		}
		taken.Insert(key)
	}
	return errs
}

// validateContainer checks what holds for containers of every sort.
func validateContainer(c *corev1.Container, spec *corev1.PodSpec, volumes map[string]corev1.VolumeSource, owner specOwner, at *field.Path) field.ErrorList {
	errs := check.RequiredText(at.Child("name"), c.Name, validation.IsDNS1123Label)
	switch {
	case c.Image == "":
		errs = append(errs, field.Required(at.Child("image"), ""))
	case owner == specOfPod && c.Image != strings.TrimSpace(c.Image): // in a template others may mend it
		errs = append(errs, field.Invalid(at.Child("image"), c.Image, "must not have leading or trailing whitespace"))
	}
	errs = append(errs, check.OneOf(at.Child("terminationMessagePolicy"), c.TerminationMessagePolicy,
		corev1.TerminationMessageReadFile, corev1.TerminationMessageFallbackToLogsOnError)...)
	errs = append(errs, check.OneOf(at.Child("imagePullPolicy"), c.ImagePullPolicy,
		corev1.PullAlways, corev1.PullIfNotPresent, corev1.PullNever)...)
	errs = append(errs, validatePorts(c.Ports, at.Child("ports"))...)
	errs = append(errs, validateEnv(c.Env, volumes, at.Child("env"))...)
	errs = append(errs, validateEnvFrom(c.EnvFrom, at.Child("envFrom"))...)
	errs = append(errs, validateMounts(c, volumes, at)...)
	errs = append(errs, validateResources(&c.Resources, spec.ResourceClaims, at.Child("resources"))...)
	errs = append(errs, validateResizePolicy(c.ResizePolicy, spec.RestartPolicy, at.Child("resizePolicy"))...)
	errs = append(errs, validateSecurityContext(c.SecurityContext, at.Child("securityContext"))...)
	errs = append(errs, validateProcMount(c.SecurityContext, spec, at.Child("securityContext"))...)
	errs = append(errs, validateRestartRules(c, at)...)
	return errs
}

// validateInitContainer forbids what only makes sense for a container that
// keeps running.
func validateInitContainer(c *corev1.Container, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	const msg = "may not be set for init containers without restartPolicy=Always"
	for _, f := range []struct {
		name string
		set  bool
	}{
		{"lifecycle", c.Lifecycle != nil},
		{"livenessProbe", c.LivenessProbe != nil},
		{"readinessProbe", c.ReadinessProbe != nil},
		{"startupProbe", c.StartupProbe != nil},
	} {
		if f.set {
			errs = append(errs, field.Forbidden(at.Child(f.name), msg))
		}
	}
	return errs
}

func validateRestartRules(c *corev1.Container, at *field.Path) field.ErrorList {
	errs := check.OneOfOrNil(at.Child("restartPolicy"), c.RestartPolicy,
		corev1.ContainerRestartPolicyAlways, corev1.ContainerRestartPolicyNever, corev1.ContainerRestartPolicyOnFailure)
	rules := at.Child("restartPolicyRules")
	if len(c.RestartPolicyRules) > 0 && c.RestartPolicy == nil {
		errs = append(errs, field.Required(at.Child("restartPolicy"), "must specify restartPolicy when restart rules are used"))
	}
	if len(c.RestartPolicyRules) > maxRestartRules {
		errs = append(errs, field.TooMany(rules, len(c.RestartPolicyRules), maxRestartRules))
	}
	for i, rule := range c.RestartPolicyRules {
		at := rules.Index(i)
		// RestartAllContainers would need every container of the pod to be made
		// in place: the agent does not do it yet.
		errs = append(errs, check.OneOf(at.Child("action"), rule.Action, corev1.ContainerRestartRuleActionRestart)...)
		if rule.ExitCodes == nil {
			errs = append(errs, field.Required(at.Child("exitCodes"), "must be specified"))
			continue
		}
		errs = append(errs, check.OneOf(at.Child("exitCodes", "operator"), rule.ExitCodes.Operator,
			corev1.ContainerRestartRuleOnExitCodesOpIn, corev1.ContainerRestartRuleOnExitCodesOpNotIn)...)
		if len(rule.ExitCodes.Values) == 0 {
			errs = append(errs, field.Required(at.Child("exitCodes", "values"), "at least one value is required"))
		}
	}
	return errs
}

func validatePorts(ports []corev1.ContainerPort, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	names := sets.New[string]()
	for i, port := range ports {
		at := at.Index(i)
		if port.Name != "" {
			if faults := check.Text(at.Child("name"), port.Name, validation.IsValidPortName); len(faults) > 0 {
				errs = append(errs, faults...)
			} else if names.Has(port.Name) {
				errs = append(errs, field.Duplicate(at.Child("name"), port.Name))
			}
			names.Insert(port.Name)
		}
		if port.ContainerPort == 0 {
			errs = append(errs, field.Required(at.Child("containerPort"), ""))
		} else {
			errs = append(errs, check.PortNumber(at.Child("containerPort"), port.ContainerPort)...)
		}
		if port.HostPort != 0 {
			errs = append(errs, check.PortNumber(at.Child("hostPort"), port.HostPort)...)
		}
		errs = append(errs, validateProtocol(port.Protocol, at.Child("protocol"))...)
		if port.HostIP != "" {
			errs = append(errs, validation.IsValidIPForLegacyField(at.Child("hostIP"), port.HostIP, true, nil)...)
		}
	}
	return errs
}

func validateProtocol(protocol corev1.Protocol, at *field.Path) field.ErrorList {
	return check.OneOf(at, protocol, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
}

// validateMounts checks mounts and devices: each names a volume of the pod and
// a place of its own in the container.
func validateMounts(c *corev1.Container, volumes map[string]corev1.VolumeSource, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	devices := sets.New[string]()
	for i, device := range c.VolumeDevices {
		at := at.Child("volumeDevices").Index(i)
		errs = append(errs, check.RequiredText(at.Child("name"), device.Name, nil)...)
		if source, ok := volumes[device.Name]; !ok && device.Name != "" {
			errs = append(errs, field.NotFound(at.Child("name"), device.Name))
		} else if ok && source.PersistentVolumeClaim == nil && source.Ephemeral == nil {
			errs = append(errs, field.Invalid(at.Child("name"), device.Name, "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode"))
		}
		errs = append(errs, check.RequiredText(at.Child("devicePath"), device.DevicePath, noBacksteps)...)
		if device.DevicePath != "" && devices.Has(device.DevicePath) {
			errs = append(errs, field.Invalid(at.Child("devicePath"), device.DevicePath, "must be unique"))
		}
		devices.Insert(device.DevicePath)
	}

	privileged := c.SecurityContext != nil && c.SecurityContext.Privileged != nil && *c.SecurityContext.Privileged
	places := sets.New[string]()
	for i, mount := range c.VolumeMounts {
		at := at.Child("volumeMounts").Index(i)
		errs = append(errs, check.RequiredText(at.Child("name"), mount.Name, nil)...)
		source, known := volumes[mount.Name]
		if !known && mount.Name != "" {
			errs = append(errs, field.NotFound(at.Child("name"), mount.Name))
		}
		errs = append(errs, check.RequiredText(at.Child("mountPath"), mount.MountPath, nil)...)
		if mount.MountPath != "" {
			if places.Has(mount.MountPath) {
				errs = append(errs, field.Invalid(at.Child("mountPath"), mount.MountPath, "must be unique"))
			}
			if devices.Has(mount.MountPath) {
				errs = append(errs, field.Invalid(at.Child("mountPath"), mount.MountPath, "must not already exist as a path in volumeDevices"))
			}
			places.Insert(mount.MountPath)
		}
		errs = append(errs, validateSubPath(mount, at)...)
		errs = append(errs, validatePropagation(mount, source, privileged, at)...)
	}
	return errs
}

func validateSubPath(mount corev1.VolumeMount, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if mount.SubPath != "" {
		errs = append(errs, check.Text(at.Child("subPath"), mount.SubPath, descending)...)
	}
	if mount.SubPathExpr != "" {
		if mount.SubPath != "" {
			errs = append(errs, field.Invalid(at.Child("subPathExpr"), mount.SubPathExpr, "subPathExpr and subPath are mutually exclusive"))
		}
		errs = append(errs, check.Text(at.Child("subPathExpr"), mount.SubPathExpr, descending)...)
	}
	return errs
}

func validatePropagation(mount corev1.VolumeMount, source corev1.VolumeSource, privileged bool, at *field.Path) field.ErrorList {
	errs := check.OneOfOrNil(at.Child("mountPropagation"), mount.MountPropagation,
		corev1.MountPropagationBidirectional, corev1.MountPropagationHostToContainer, corev1.MountPropagationNone)
	propagates := mount.MountPropagation != nil && *mount.MountPropagation != corev1.MountPropagationNone
	if propagates && *mount.MountPropagation == corev1.MountPropagationBidirectional && !privileged {
		errs = append(errs, field.Forbidden(at.Child("mountPropagation"), "Bidirectional mount propagation is available only to privileged containers"))
	}
	if mode := mount.RecursiveReadOnly; mode != nil {
		at := at.Child("recursiveReadOnly")
		errs = append(errs, check.OneOf(at, *mode, corev1.RecursiveReadOnlyDisabled, corev1.RecursiveReadOnlyIfPossible, corev1.RecursiveReadOnlyEnabled)...)
		if *mode != corev1.RecursiveReadOnlyDisabled {
			if !mount.ReadOnly {
				errs = append(errs, field.Forbidden(at, "may only be specified when readOnly is true"))
			}
			if propagates {
				errs = append(errs, field.Forbidden(at, "may only be specified when mountPropagation is None or not specified"))
			}
		}
	}
	if source.Image != nil && mount.SubPathExpr != "" {
		errs = append(errs, field.Invalid(at.Child("subPathExpr"), mount.SubPathExpr, "not allowed in image volume sources"))
	}
	return errs
}

// descending is the rule for a path that must stay below where it starts.
func descending(p string) []string {
	var faults []string
	if path.IsAbs(p) {
		faults = append(faults, "must be a relative path")
	}
	return append(faults, noBacksteps(p)...)
}

func noBacksteps(p string) []string {
	for part := range strings.SplitSeq(p, "/") {
		if part == ".." {
			return []string{"must not contain '..'"}
		}
	}
	return nil
}
