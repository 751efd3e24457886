package core

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

const (
	// fileMode is the mode of files projected into volumes.
	fileMode int32 = 0o644
	// tokenSeconds is how long a projected service account token lives.
	tokenSeconds int64 = 60 * 60
)

// defaultPod fills a pod. What a pod gets and a template does not (requests
// from limits, host ports, service links) is done here, so that templates stay
// as their users wrote them.
func defaultPod(pod *corev1.Pod) {
	spec := &pod.Spec
	DefaultPodSpec(spec)
	setDefault(&spec.EnableServiceLinks, corev1.DefaultEnableServiceLinks)
	for _, containers := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range containers {
			requestLimits(&containers[i].Resources)
			if spec.HostNetwork {
				hostPorts(containers[i].Ports)
			}
		}
	}
	if spec.Resources != nil {
		requestPodLimits(spec)
	}
	status := &pod.Status
	switch {
	case status.PodIP == "" && len(status.PodIPs) > 0:
		status.PodIP = status.PodIPs[0].IP
	case status.PodIP != "" && len(status.PodIPs) == 0:
		status.PodIPs = []corev1.PodIP{{IP: status.PodIP}}
	}
}

// DefaultPodTemplate fills the pod template of a workload.
func DefaultPodTemplate(template *corev1.PodTemplateSpec) {
	DefaultPodSpec(&template.Spec)
}

// DefaultPodSpec fills what pods and pod templates have in common.
func DefaultPodSpec(spec *corev1.PodSpec) {
	if spec.DNSPolicy == "" {
		spec.DNSPolicy = corev1.DNSClusterFirst
	}
	if spec.RestartPolicy == "" {
		spec.RestartPolicy = corev1.RestartPolicyAlways
	}
	if spec.SchedulerName == "" {
		spec.SchedulerName = corev1.DefaultSchedulerName
	}
	if spec.SecurityContext == nil {
		spec.SecurityContext = &corev1.PodSecurityContext{}
	}
	setDefault(&spec.TerminationGracePeriodSeconds, corev1.DefaultTerminationGracePeriodSeconds)

	// Two names of one field: the newer one wins.
	if spec.ServiceAccountName == "" {
		spec.ServiceAccountName = spec.DeprecatedServiceAccount
	}
	spec.DeprecatedServiceAccount = spec.ServiceAccountName

	for i := range spec.Volumes {
		defaultVolume(&spec.Volumes[i])
	}
	for i := range spec.InitContainers {
		defaultContainer(&spec.InitContainers[i])
	}
	for i := range spec.Containers {
		defaultContainer(&spec.Containers[i])
	}
	for i := range spec.EphemeralContainers {
		defaultContainer((*corev1.Container)(&spec.EphemeralContainers[i].EphemeralContainerCommon))
	}
	roundResources(spec.Overhead)
	if spec.Resources != nil {
		roundResources(spec.Resources.Limits)
		roundResources(spec.Resources.Requests)
	}
}

func defaultContainer(c *corev1.Container) {
	if c.ImagePullPolicy == "" {
		c.ImagePullPolicy = pullPolicy(c.Image)
	}
	if c.TerminationMessagePath == "" {
		c.TerminationMessagePath = corev1.TerminationMessagePathDefault
	}
	if c.TerminationMessagePolicy == "" {
		c.TerminationMessagePolicy = corev1.TerminationMessageReadFile
	}
	for i := range c.Ports {
		if c.Ports[i].Protocol == "" {
			c.Ports[i].Protocol = corev1.ProtocolTCP
		}
	}
	for i := range c.Env {
		from := c.Env[i].ValueFrom
		if from == nil {
			continue
		}
		defaultFieldRef(from.FieldRef)
		if from.FileKeyRef != nil {
			setDefault(&from.FileKeyRef.Optional, false)
		}
	}
	roundResources(c.Resources.Limits)
	roundResources(c.Resources.Requests)
	for _, probe := range []*corev1.Probe{c.LivenessProbe, c.ReadinessProbe, c.StartupProbe} {
		defaultProbe(probe)
	}
	if c.Lifecycle != nil {
		for _, handler := range []*corev1.LifecycleHandler{c.Lifecycle.PostStart, c.Lifecycle.PreStop} {
			if handler != nil {
				defaultHTTPGet(handler.HTTPGet)
			}
		}
	}
}

func defaultProbe(p *corev1.Probe) {
	if p == nil {
		return
	}
	if p.TimeoutSeconds == 0 {
		p.TimeoutSeconds = 1
	}
	if p.PeriodSeconds == 0 {
		p.PeriodSeconds = 10
	}
	if p.SuccessThreshold == 0 {
		p.SuccessThreshold = 1
	}
	if p.FailureThreshold == 0 {
		p.FailureThreshold = 3
	}
	defaultHTTPGet(p.HTTPGet)
	if p.GRPC != nil {
		setDefault(&p.GRPC.Service, "")
	}
}

func defaultHTTPGet(get *corev1.HTTPGetAction) {
	if get == nil {
		return
	}
	if get.Path == "" {
		get.Path = "/"
	}
	if get.Scheme == "" {
		get.Scheme = corev1.URISchemeHTTP
	}
}

func defaultFieldRef(ref *corev1.ObjectFieldSelector) {
	if ref != nil && ref.APIVersion == "" {
		ref.APIVersion = "v1"
	}
}

func defaultVolume(v *corev1.Volume) {
	if len(volumeSources(&v.VolumeSource)) == 0 {
		v.EmptyDir = &corev1.EmptyDirVolumeSource{}
		return
	}
	if v.HostPath != nil {
		setDefault(&v.HostPath.Type, corev1.HostPathUnset)
	}
	if v.ConfigMap != nil {
		setDefault(&v.ConfigMap.DefaultMode, fileMode)
	}
	if v.Secret != nil {
		setDefault(&v.Secret.DefaultMode, fileMode)
	}
	if v.DownwardAPI != nil {
		setDefault(&v.DownwardAPI.DefaultMode, fileMode)
		defaultDownwardFiles(v.DownwardAPI.Items)
	}
	if v.Projected != nil {
		setDefault(&v.Projected.DefaultMode, fileMode)
		for _, source := range v.Projected.Sources {
			if source.DownwardAPI != nil {
				defaultDownwardFiles(source.DownwardAPI.Items)
			}
			if source.ServiceAccountToken != nil {
				setDefault(&source.ServiceAccountToken.ExpirationSeconds, tokenSeconds)
			}
		}
	}
	if v.Ephemeral != nil && v.Ephemeral.VolumeClaimTemplate != nil {
		setDefault(&v.Ephemeral.VolumeClaimTemplate.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
	}
	if v.Image != nil && v.Image.PullPolicy == "" {
		v.Image.PullPolicy = pullPolicy(v.Image.Reference)
	}
	if v.ISCSI != nil && v.ISCSI.ISCSIInterface == "" {
		v.ISCSI.ISCSIInterface = "default"
	}
}

func defaultDownwardFiles(files []corev1.DownwardAPIVolumeFile) {
	for i := range files {
		defaultFieldRef(files[i].FieldRef)
	}
}

// pullPolicy is Always for an image that can move under its name: one tagged
// latest, or with neither tag nor digest.
func pullPolicy(image string) corev1.PullPolicy {
	name, _, hasDigest := strings.Cut(image, "@")
	tag := ""
	// A colon before the last slash belongs to the registry's port.
	if i := strings.LastIndex(name, ":"); i > strings.LastIndex(name, "/") {
		tag = name[i+1:]
	}
	if tag == "latest" || tag == "" && name != "" && !hasDigest {
		return corev1.PullAlways
	}
	return corev1.PullIfNotPresent
}

// requestLimits asks for what is limited where nothing was asked for.
func requestLimits(r *corev1.ResourceRequirements) {
	for name, limit := range r.Limits {
		if _, asked := r.Requests[name]; asked {
			continue
		}
		if r.Requests == nil {
			r.Requests = corev1.ResourceList{}
		}
		r.Requests[name] = limit.DeepCopy()
	}
}

// requestPodLimits fills the requests of the pod as a whole: with the sum of
// its containers' where they ask for that resource, with the limit otherwise.
func requestPodLimits(spec *corev1.PodSpec) {
	r := spec.Resources
	containers := ContainerRequests(&corev1.Pod{Spec: *spec})
	for name, limit := range r.Limits {
		if _, asked := r.Requests[name]; asked {
			continue
		}
		if r.Requests == nil {
			r.Requests = corev1.ResourceList{}
		}
		if sum, asked := containers[name]; asked {
			r.Requests[name] = sum
			continue
		}
		r.Requests[name] = limit.DeepCopy()
	}
}

// hostPorts gives ports of a pod on the host's network their host port.
func hostPorts(ports []corev1.ContainerPort) {
	for i := range ports {
		if ports[i].HostPort == 0 {
			ports[i].HostPort = ports[i].ContainerPort
		}
	}
}

// roundResources rounds up to the finest unit the API keeps, a thousandth.
func roundResources(list corev1.ResourceList) {
	for name, quantity := range list {
		quantity.RoundUp(-3)
		list[name] = quantity
	}
}

func setDefault[T any](field **T, value T) {
	if *field == nil {
		*field = ptr.To(value)
	}
}
