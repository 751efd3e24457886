package core

import (
	"fmt"
	"math"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/check"
)

const (
	maxNameservers     = 3
	maxSearches        = 32
	maxSearchListChars = 2048
)

func validatePod(pod *corev1.Pod) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&pod.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	return append(errs, validatePodSpec(&pod.Spec, field.NewPath("spec"), specOfPod)...)
}

// validatePodCreate adds what may be set later, but not at creation.
func validatePodCreate(pod *corev1.Pod) field.ErrorList {
	errs := validatePod(pod)
	path := field.NewPath("spec")
	if len(pod.Spec.EphemeralContainers) > 0 {
		errs = append(errs, field.Forbidden(path.Child("ephemeralContainers"), "cannot be set on create"))
	}
	if len(pod.Spec.SchedulingGates) > 0 && pod.Spec.NodeName != "" {
		errs = append(errs, field.Forbidden(path.Child("nodeName"), "cannot be set until all schedulingGates have been cleared"))
	}
	for i, v := range pod.Spec.Volumes {
		if v.Ephemeral != nil {
			errs = append(errs, check.Text(path.Child("volumes").Index(i).Child("name"), pod.Name+"-"+v.Name, check.Subdomain)...) // the claim's name
		}
	}
	if metav1.GetControllerOfNoCopy(pod) == nil {
		errs = append(errs, validateDeletionCost(pod.Annotations, field.NewPath("metadata", "annotations"))...)
	}
	if IsMirror(pod) && pod.Spec.NodeName == "" {
		errs = append(errs, field.Invalid(field.NewPath("metadata", "annotations").Key(corev1.MirrorPodAnnotationKey), pod.Annotations[corev1.MirrorPodAnnotationKey], "must set spec.nodeName if mirror pod annotation is set"))
	}
	return errs
}

// validateDeletionCost wants a number that a ReplicaSet can compare.
func validateDeletionCost(annotations map[string]string, at *field.Path) field.ErrorList {
	text, ok := annotations[corev1.PodDeletionCost]
	if n, err := strconv.ParseInt(text, 10, 32); ok && (err != nil || strconv.FormatInt(n, 10) != text) {
		return field.ErrorList{field.Invalid(at.Key(corev1.PodDeletionCost), text, "must be a 32bit integer")}
	}
	return nil
}

// ValidateTemplateCost returns what is wrong with the deletion cost in the template of a
// workload, which was old before an update. One that was stored before there was a rule
// for it stays, and so do the copies that controllers make of it: of a Deployment's for its
// ReplicaSets, and of theirs for pods. What is no number counts as 0 there.
func ValidateTemplateCost(workload metav1.Object, template, old *corev1.PodTemplateSpec, at *field.Path) field.ErrorList {
	if template == nil || metav1.GetControllerOfNoCopy(workload) != nil ||
		old != nil && template.Annotations[corev1.PodDeletionCost] == old.Annotations[corev1.PodDeletionCost] {
		return nil
	}
	return validateDeletionCost(template.Annotations, at.Child("metadata", "annotations"))
}

// ValidatePodTemplate returns the faults of a workload's pod template, but for its
// deletion cost.
func ValidatePodTemplate(template *corev1.PodTemplateSpec, path *field.Path) field.ErrorList {
	meta := path.Child("metadata")
	errs := metav1validation.ValidateLabels(template.Labels, meta.Child("labels"))
	errs = append(errs, apivalidation.ValidateAnnotations(template.Annotations, meta.Child("annotations"))...)
	errs = append(errs, validatePodSpec(&template.Spec, path.Child("spec"), specOfTemplate)...)
	if len(template.Spec.EphemeralContainers) > 0 {
		errs = append(errs, field.Forbidden(path.Child("spec", "ephemeralContainers"), "ephemeral containers not allowed in pod template"))
	}
	return errs
}

// specOwner is what a pod spec is part of: their rules differ a little.
type specOwner int

const (
	specOfPod specOwner = iota
	specOfTemplate
)

func validatePodSpec(spec *corev1.PodSpec, path *field.Path, owner specOwner) field.ErrorList {
	volumes, errs := validateVolumes(spec.Volumes, path.Child("volumes"), owner)
	errs = append(errs, validateContainers(spec, volumes, owner, path)...)
	if spec.HostNetwork {
		errs = append(errs, validateHostNetworkPorts(spec, path, owner)...)
	}
	errs = append(errs, check.OneOf(path.Child("restartPolicy"), spec.RestartPolicy,
		corev1.RestartPolicyAlways, corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever)...)
	errs = append(errs, validateTimes(spec, path)...)
	errs = append(errs, validateDNS(spec, path)...)
	errs = append(errs, validateNames(spec, path)...)
	errs = append(errs, validatePodSecurityContext(spec, path)...)
	errs = append(errs, validateScheduling(spec, path)...)
	errs = append(errs, validateResourceClaims(spec.ResourceClaims, path.Child("resourceClaims"))...)
	errs = append(errs, ValidateOverhead(spec.Overhead, path.Child("overhead"))...)
	if spec.Resources != nil {
		errs = append(errs, validatePodResources(spec, path)...)
	}
	return errs
}

func validateTimes(spec *corev1.PodSpec, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if grace := spec.TerminationGracePeriodSeconds; grace == nil {
		errs = append(errs, field.Required(path.Child("terminationGracePeriodSeconds"), ""))
	} else {
		errs = append(errs, check.NonNegative(path.Child("terminationGracePeriodSeconds"), *grace)...)
	}
	if deadline := spec.ActiveDeadlineSeconds; deadline != nil && (*deadline < 1 || *deadline > math.MaxInt32) {
		errs = append(errs, field.Invalid(path.Child("activeDeadlineSeconds"), *deadline, validation.InclusiveRangeError(1, math.MaxInt32)))
	}
	return errs
}

func validateDNS(spec *corev1.PodSpec, path *field.Path) field.ErrorList {
	errs := check.OneOf(path.Child("dnsPolicy"), spec.DNSPolicy,
		corev1.DNSClusterFirstWithHostNet, corev1.DNSClusterFirst, corev1.DNSDefault, corev1.DNSNone)
	config := spec.DNSConfig
	path = path.Child("dnsConfig")
	if spec.DNSPolicy == corev1.DNSNone {
		msg := fmt.Sprintf("must provide at least one DNS nameserver when `dnsPolicy` is %s", corev1.DNSNone)
		if config == nil {
			return append(errs, field.Required(path, msg))
		}
		if len(config.Nameservers) == 0 {
			return append(errs, field.Required(path.Child("nameservers"), msg))
		}
	}
	if config == nil {
		return errs
	}
	if len(config.Nameservers) > maxNameservers {
		errs = append(errs, field.Invalid(path.Child("nameservers"), config.Nameservers, fmt.Sprintf("must not have more than %v nameservers", maxNameservers)))
	}
	for i, server := range config.Nameservers {
		errs = append(errs, validation.IsValidIPForLegacyField(path.Child("nameservers").Index(i), server, true, nil)...)
	}
	if len(config.Searches) > maxSearches {
		errs = append(errs, field.Invalid(path.Child("searches"), config.Searches, fmt.Sprintf("must not have more than %v search paths", maxSearches)))
	}
	chars := max(0, len(config.Searches)-1) // the spaces between them
	for i, search := range config.Searches {
		chars += len(search)
		if search != "." {
			errs = append(errs, check.Text(path.Child("searches").Index(i), trimDot(search), validation.IsDNS1123SubdomainWithUnderscore)...)
		}
	}
	if chars > maxSearchListChars {
		errs = append(errs, field.Invalid(path.Child("searches"), config.Searches, fmt.Sprintf("must not have more than %v characters (including spaces) in the search list", maxSearchListChars)))
	}
	for i, option := range config.Options {
		if option.Name == "" {
			errs = append(errs, field.Required(path.Child("options").Index(i), "must not be empty"))
		}
	}
	return errs
}

func trimDot(name string) string {
	if len(name) > 0 && name[len(name)-1] == '.' {
		return name[:len(name)-1]
	}
	return name
}

// validateNames checks the names of the pod itself and of what it refers to.
func validateNames(spec *corev1.PodSpec, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, name := range []struct {
		field, value string
		rule         func(string) []string
	}{
		{"serviceAccountName", spec.ServiceAccountName, check.Subdomain},
		{"nodeName", spec.NodeName, check.Subdomain},
		{"hostname", spec.Hostname, validation.IsDNS1123Label},
		{"subdomain", spec.Subdomain, validation.IsDNS1123Label},
		{"priorityClassName", spec.PriorityClassName, check.Subdomain},
	} {
		if name.value != "" {
			errs = append(errs, check.Text(path.Child(name.field), name.value, name.rule)...)
		}
	}
	errs = append(errs, validateHostnameOverride(spec, path)...)
	if spec.RuntimeClassName != nil {
		errs = append(errs, check.Text(path.Child("runtimeClassName"), *spec.RuntimeClassName, check.Subdomain)...)
	}
	for i, alias := range spec.HostAliases {
		at := path.Child("hostAliases").Index(i)
		errs = append(errs, validation.IsValidIPForLegacyField(at.Child("ip"), alias.IP, true, nil)...)
		for j, name := range alias.Hostnames {
			errs = append(errs, check.Text(at.Child("hostnames").Index(j), name, check.Subdomain)...)
		}
	}
	for i, gate := range spec.ReadinessGates {
		errs = append(errs, check.Text(path.Child("readinessGates").Index(i).Child("conditionType"), string(gate.ConditionType), validation.IsQualifiedName)...)
	}
	gates := sets.New[string]()
	for i, gate := range spec.SchedulingGates {
		at := path.Child("schedulingGates").Index(i)
		errs = append(errs, check.Text(at, gate.Name, validation.IsQualifiedName)...)
		if gates.Has(gate.Name) {
			errs = append(errs, field.Duplicate(at, gate.Name))
		}
		gates.Insert(gate.Name)
	}
	if group := spec.SchedulingGroup; group != nil {
		if at := path.Child("schedulingGroup"); group.PodGroupName == nil {
			errs = append(errs, field.Required(at.Child("podGroupName"), "the name of a PodGroup"))
		} else {
			errs = append(errs, check.RequiredText(at.Child("podGroupName"), *group.PodGroupName, check.Subdomain)...)
		}
	}
	if spec.OS != nil {
		errs = append(errs, check.OneOf(path.Child("os", "name"), spec.OS.Name, corev1.Linux, corev1.Windows)...)
	}
	return errs
}

// maxHostname is how long a host name may be in Linux.
const maxHostname = 64

// validateHostnameOverride: the name is the kernel's, and nothing else may
// decide it.
func validateHostnameOverride(spec *corev1.PodSpec, path *field.Path) field.ErrorList {
	if spec.HostnameOverride == nil || *spec.HostnameOverride == "" {
		return nil
	}
	name := *spec.HostnameOverride
	errs := check.Text(path.Child("hostnameOverride"), name, check.Subdomain)
	if len(name) > maxHostname {
		errs = append(errs, field.TooLong(path.Child("hostnameOverride"), name, maxHostname))
	}
	if spec.SetHostnameAsFQDN != nil && *spec.SetHostnameAsFQDN {
		errs = append(errs, field.Invalid(path.Child("hostnameOverride"), name, "may not be specified when `setHostnameAsFQDN` is true"))
	}
	if spec.HostNetwork {
		errs = append(errs, field.Invalid(path.Child("hostnameOverride"), name, "may not be specified when `hostNetwork` is true"))
	}
	return errs
}

func validateHostNetworkPorts(spec *corev1.PodSpec, path *field.Path, owner specOwner) field.ErrorList {
	var errs field.ErrorList
	for _, group := range containerGroups(spec, path) {
		for i := range group.containers {
			for j, port := range group.containers[i].Ports {
				// A pod's host port was defaulted, a template's may be left out.
				if port.HostPort == 0 && owner == specOfTemplate {
					continue
				}
				if port.HostPort != port.ContainerPort {
					errs = append(errs, field.Invalid(group.path.Index(i).Child("ports").Index(j).Child("containerPort"), port.ContainerPort,
						"must match `hostPort` when `hostNetwork` is true"))
				}
			}
		}
	}
	return errs
}

// containerGroup is a list of containers and where it stands.
type containerGroup struct {
	containers []corev1.Container
	path       *field.Path
	init       bool
}

func containerGroups(spec *corev1.PodSpec, path *field.Path) []containerGroup {
	return []containerGroup{
		{spec.InitContainers, path.Child("initContainers"), true},
		{spec.Containers, path.Child("containers"), false},
	}
}
