package core

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

// newPod is a sound, defaulted pod with one container, after edits.
func newPod(edits ...func(*corev1.Pod)) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "hello", ResourceVersion: "7"},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "web", Image: "web:1"}}},
	}
	for _, edit := range edits {
		edit(pod)
	}
	defaultPod(pod)
	return pod
}

// inContainer edits the first container.
func inContainer(edit func(*corev1.Container)) func(*corev1.Pod) {
	return func(pod *corev1.Pod) { edit(&pod.Spec.Containers[0]) }
}

// withVolume adds a volume named v.
func withVolume(source corev1.VolumeSource) func(*corev1.Pod) {
	return func(pod *corev1.Pod) {
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: "v", VolumeSource: source})
	}
}

func TestPullPolicy(t *testing.T) {
	for image, want := range map[string]corev1.PullPolicy{
		"web":                           corev1.PullAlways,
		"web:latest":                    corev1.PullAlways,
		"web:1":                         corev1.PullIfNotPresent,
		"example.com:5000/web":          corev1.PullAlways,
		"example.com:5000/web:1":        corev1.PullIfNotPresent,
		"example.com:5000/web@sha256:a": corev1.PullIfNotPresent,
		"web:latest@sha256:a":           corev1.PullAlways,
		"":                              corev1.PullIfNotPresent,
	} {
		if got := pullPolicy(image); got != want {
			t.Errorf("%q: %s, want %s", image, got, want)
		}
	}
}

func TestPodDefaults(t *testing.T) {
	tests := []struct {
		name string
		edit func(*corev1.Pod)
		want func(*corev1.Pod) bool
	}{
		{"old name of the service account", func(p *corev1.Pod) { p.Spec.DeprecatedServiceAccount = "a" },
			func(p *corev1.Pod) bool { return p.Spec.ServiceAccountName == "a" }},
		{"new name of the service account wins", func(p *corev1.Pod) { p.Spec.DeprecatedServiceAccount, p.Spec.ServiceAccountName = "a", "b" },
			func(p *corev1.Pod) bool { return p.Spec.DeprecatedServiceAccount == "b" }},
		{"what is set stays", func(p *corev1.Pod) {
			p.Spec.TerminationGracePeriodSeconds, p.Spec.RestartPolicy, p.Spec.DNSPolicy = ptr.To[int64](0), corev1.RestartPolicyNever, corev1.DNSDefault
		}, func(p *corev1.Pod) bool {
			return *p.Spec.TerminationGracePeriodSeconds == 0 && p.Spec.RestartPolicy == corev1.RestartPolicyNever && p.Spec.DNSPolicy == corev1.DNSDefault
		}},
		{"host port of init containers too", func(p *corev1.Pod) {
			p.Spec.HostNetwork = true
			p.Spec.InitContainers = []corev1.Container{{Ports: []corev1.ContainerPort{{ContainerPort: 80}}}}
		}, func(p *corev1.Pod) bool { return p.Spec.InitContainers[0].Ports[0].HostPort == 80 }},
		{"quantities are rounded up to a thousandth", inContainer(func(c *corev1.Container) {
			c.Resources.Requests = corev1.ResourceList{"cpu": resource.MustParse("100u")}
		}), func(p *corev1.Pod) bool { return p.Spec.Containers[0].Resources.Requests.Cpu().String() == "1m" }},
		{"first of the addresses", func(p *corev1.Pod) { p.Status.PodIP = "10.0.0.1" },
			func(p *corev1.Pod) bool { return len(p.Status.PodIPs) == 1 && p.Status.PodIPs[0].IP == "10.0.0.1" }},
		{"pod requests: from containers, else from limits", func(p *corev1.Pod) {
			p.Spec.Resources = &corev1.ResourceRequirements{Limits: corev1.ResourceList{"cpu": resource.MustParse("2"), "memory": resource.MustParse("1Gi")}}
			p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"cpu": resource.MustParse("1")}
			p.Spec.InitContainers = []corev1.Container{
				{Name: "side", RestartPolicy: ptr.To(corev1.ContainerRestartPolicyAlways), Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": resource.MustParse("200m")}}},
				{Name: "init", Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": resource.MustParse("1100m")}}},
			}
		}, func(p *corev1.Pod) bool {
			return p.Spec.Resources.Requests.Cpu().String() == "1300m" && p.Spec.Resources.Requests.Memory().String() == "1Gi"
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if pod := newPod(test.edit); !test.want(pod) {
				t.Errorf("got %+v", pod.Spec)
			}
		})
	}
}

func TestTemplatesKeepPodOnlyFieldsEmpty(t *testing.T) {
	template := &corev1.PodTemplateSpec{Spec: corev1.PodSpec{
		HostNetwork: true,
		Containers: []corev1.Container{{
			Ports:     []corev1.ContainerPort{{ContainerPort: 80}},
			Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"cpu": resource.MustParse("1")}},
		}},
	}}
	DefaultPodTemplate(template)
	c := template.Spec.Containers[0]
	if c.Ports[0].HostPort != 0 || c.Resources.Requests != nil || template.Spec.EnableServiceLinks != nil {
		t.Errorf("template got what only pods get: %+v", template.Spec)
	}
}

func TestValidatePod(t *testing.T) {
	tests := []struct {
		name string
		edit func(*corev1.Pod)
		want []string
	}{
		{"sound", func(*corev1.Pod) {}, nil},
		{"bad name", func(p *corev1.Pod) { p.Name = "Web" }, []string{`metadata.name: Invalid value: "Web": a lowercase RFC 1123 subdomain must consist of`}},
		{"no namespace", func(p *corev1.Pod) { p.Namespace = "" }, []string{"metadata.namespace: Required value"}},
		{"a group", func(p *corev1.Pod) {
			p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: ptr.To("workers")}
		}, nil},
		{"a group without a name", func(p *corev1.Pod) { p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{} }, []string{"spec.schedulingGroup.podGroupName: Required value"}},
		{"a bad name of a group", func(p *corev1.Pod) { p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: ptr.To("A")} }, []string{`spec.schedulingGroup.podGroupName: Invalid value: "A"`}},
		{"bad label", func(p *corev1.Pod) { p.Labels = map[string]string{"a": "b c"} }, []string{`metadata.labels: Invalid value: "b c": a valid label must be`}},
		{"no containers", func(p *corev1.Pod) { p.Spec.Containers = nil }, []string{"spec.containers: Required value"}},
		{"container without name and image", func(p *corev1.Pod) { p.Spec.Containers = []corev1.Container{{}} },
			[]string{"spec.containers[0].name: Required value", "spec.containers[0].image: Required value"}},
		{"image with space", inContainer(func(c *corev1.Container) { c.Image = " web" }),
			[]string{`spec.containers[0].image: Invalid value: " web": must not have leading or trailing whitespace`}},
		{"container name taken by an init container", func(p *corev1.Pod) { p.Spec.InitContainers = []corev1.Container{{Name: "web", Image: "a"}} },
			[]string{`spec.containers[0].name: Duplicate value: "web"`}},
		{"container name is no label", inContainer(func(c *corev1.Container) { c.Name = "a.b" }),
			[]string{`spec.containers[0].name: Invalid value: "a.b": must not contain dots`}},
		{"init container with probe", func(p *corev1.Pod) {
			p.Spec.InitContainers = []corev1.Container{{Name: "i", Image: "a", ReadinessProbe: &corev1.Probe{}}}
		}, []string{"spec.initContainers[0].readinessProbe: Forbidden: may not be set for init containers without restartPolicy=Always"}},
		{"sidecar with probe", func(p *corev1.Pod) {
			p.Spec.InitContainers = []corev1.Container{{Name: "i", Image: "a", RestartPolicy: ptr.To(corev1.ContainerRestartPolicyAlways),
				ReadinessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(1)}}}}}
		}, nil},
		{"ephemeral containers at creation", func(p *corev1.Pod) {
			p.Spec.EphemeralContainers = []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "debug", Image: "a"}}}
		}, []string{"spec.ephemeralContainers: Forbidden: cannot be set on create"}},

		{"port out of range", inContainer(func(c *corev1.Container) { c.Ports = []corev1.ContainerPort{{ContainerPort: 70000}, {}} }),
			[]string{"spec.containers[0].ports[0].containerPort: Invalid value: 70000: must be between 1 and 65535, inclusive", "spec.containers[0].ports[1].containerPort: Required value"}},
		{"port name taken", inContainer(func(c *corev1.Container) {
			c.Ports = []corev1.ContainerPort{{Name: "http", ContainerPort: 1}, {Name: "http", ContainerPort: 2}}
		}), []string{`spec.containers[0].ports[1].name: Duplicate value: "http"`}},
		{"port protocol", inContainer(func(c *corev1.Container) { c.Ports = []corev1.ContainerPort{{ContainerPort: 1, Protocol: "tcp"}} }),
			[]string{`spec.containers[0].ports[0].protocol: Unsupported value: "tcp": supported values: "SCTP", "TCP", "UDP"`}},
		{"host port taken", inContainer(func(c *corev1.Container) {
			c.Ports = []corev1.ContainerPort{{ContainerPort: 1, HostPort: 80}, {ContainerPort: 2, HostPort: 80}}
		}), []string{`spec.containers[0].ports[1].hostPort: Duplicate value: "TCP//80"`}},
		{"other host port on the host's network", func(p *corev1.Pod) {
			p.Spec.HostNetwork = true
			p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 1, HostPort: 80}}
		}, []string{"spec.containers[0].ports[0].containerPort: Invalid value: 1: must match `hostPort` when `hostNetwork` is true"}},

		{"environment without name", inContainer(func(c *corev1.Container) { c.Env = []corev1.EnvVar{{}} }), []string{"spec.containers[0].env[0].name: Required value"}},
		{"environment name with =", inContainer(func(c *corev1.Container) { c.Env = []corev1.EnvVar{{Name: "a=b"}} }), []string{`spec.containers[0].env[0].name: Invalid value: "a=b": `}},
		{"environment from nothing", inContainer(func(c *corev1.Container) { c.Env = []corev1.EnvVar{{Name: "A", ValueFrom: &corev1.EnvVarSource{}}} }),
			[]string{`spec.containers[0].env[0].valueFrom: Invalid value: "": must specify one of: `}},
		{"environment from value and field", inContainer(func(c *corev1.Container) {
			c.Env = []corev1.EnvVar{{Name: "A", Value: "a", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}}}
		}), []string{`spec.containers[0].env[0].valueFrom: Invalid value: "": may not be specified when ` + "`value` is not empty"}},
		{"environment from two", inContainer(func(c *corev1.Container) {
			c.Env = []corev1.EnvVar{{Name: "A", ValueFrom: &corev1.EnvVarSource{
				FieldRef:        &corev1.ObjectFieldSelector{FieldPath: "metadata.labels['app']"},
				ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "c"}, Key: "k"},
			}}}
		}), []string{`spec.containers[0].env[0].valueFrom: Invalid value: "": may not have more than one field specified at a time`}},
		{"environment from an unknown field", inContainer(func(c *corev1.Container) {
			c.Env = []corev1.EnvVar{{Name: "A", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "spec.color"}}}}
		}), []string{`spec.containers[0].env[0].valueFrom.fieldRef.fieldPath: Invalid value: "spec.color": error converting fieldPath: field label not supported: spec.color`}},
		{"environment from a field of volumes", inContainer(func(c *corev1.Container) {
			c.Env = []corev1.EnvVar{{Name: "A", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.labels"}}}}
		}), []string{`spec.containers[0].env[0].valueFrom.fieldRef.fieldPath: Unsupported value: "metadata.labels": supported values: "metadata.name"`}},
		{"environment from an unknown resource", inContainer(func(c *corev1.Container) {
			c.Env = []corev1.EnvVar{{Name: "A", ValueFrom: &corev1.EnvVarSource{ResourceFieldRef: &corev1.ResourceFieldSelector{Resource: "limits.gpu"}}}}
		}), []string{`spec.containers[0].env[0].valueFrom.resourceFieldRef.resource: Unsupported value: "limits.gpu"`}},
		{"divisor of cpu", inContainer(func(c *corev1.Container) {
			c.Env = []corev1.EnvVar{{Name: "A", ValueFrom: &corev1.EnvVarSource{ResourceFieldRef: &corev1.ResourceFieldSelector{Resource: "limits.cpu", Divisor: resource.MustParse("1Mi")}}}}
		}), []string{`spec.containers[0].env[0].valueFrom.resourceFieldRef.divisor: Invalid value: "1Mi": only divisor's values 1m, 1 are supported with the cpu resource`}},
		{"environment from nowhere", inContainer(func(c *corev1.Container) { c.EnvFrom = []corev1.EnvFromSource{{}} }),
			[]string{`spec.containers[0].envFrom[0]: Invalid value: "": must specify one of: ` + "`configMapRef` or `secretRef`"}},

		{"request above limit", inContainer(func(c *corev1.Container) {
			c.Resources = corev1.ResourceRequirements{Limits: corev1.ResourceList{"cpu": resource.MustParse("1")}, Requests: corev1.ResourceList{"cpu": resource.MustParse("2")}}
		}), []string{`spec.containers[0].resources.requests: Invalid value: "2": must be less than or equal to cpu limit of 1`}},
		{"negative limit", inContainer(func(c *corev1.Container) {
			c.Resources.Limits = corev1.ResourceList{"memory": resource.MustParse("-1")}
		}), []string{
			`spec.containers[0].resources.limits[memory]: Invalid value: "-1": must be greater than or equal to 0`,
			`spec.containers[0].resources.requests[memory]: Invalid value: "-1": must be greater than or equal to 0`,
		}},
		{"unknown resource", inContainer(func(c *corev1.Container) {
			c.Resources.Requests = corev1.ResourceList{"cpus": resource.MustParse("1")}
		}), []string{`spec.containers[0].resources.requests[cpus]: Invalid value: "cpus": must be a standard resource for containers`}},
		{"half a device", inContainer(func(c *corev1.Container) {
			c.Resources.Limits = corev1.ResourceList{"example.com/gpu": resource.MustParse("500m")}
		}), []string{
			`spec.containers[0].resources.limits[example.com/gpu]: Invalid value: "500m": must be an integer`,
			`spec.containers[0].resources.requests[example.com/gpu]: Invalid value: "500m": must be an integer`,
		}},
		{"device requested but not limited", inContainer(func(c *corev1.Container) {
			c.Resources.Requests = corev1.ResourceList{"example.com/gpu": resource.MustParse("1")}
		}), []string{`spec.containers[0].resources.limits: Required value: Limit must be set for non overcommitable resources`}},
		{"huge pages alone", inContainer(func(c *corev1.Container) {
			c.Resources.Limits = corev1.ResourceList{"hugepages-2Mi": resource.MustParse("2Mi")}
		}), []string{`spec.containers[0].resources: Forbidden: HugePages require cpu or memory`}},
		{"container limit above the pod's", func(p *corev1.Pod) {
			p.Spec.Resources = &corev1.ResourceRequirements{Limits: corev1.ResourceList{"cpu": resource.MustParse("1")}}
			p.Spec.Containers[0].Resources = corev1.ResourceRequirements{Limits: corev1.ResourceList{"cpu": resource.MustParse("2")}, Requests: corev1.ResourceList{"cpu": resource.MustParse("1")}}
		}, []string{`spec.containers[0].resources.limits[cpu]: Invalid value: "2": must be less than or equal to pod limits of 1`}},

		{"volume of two sources", withVolume(corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}, HostPath: &corev1.HostPathVolumeSource{Path: "/a"}}),
			[]string{"spec.volumes[0].emptyDir: Forbidden: may not specify more than 1 volume type"}},
		{"volume name taken", func(p *corev1.Pod) { p.Spec.Volumes = []corev1.Volume{{Name: "a"}, {Name: "a"}, {}} },
			[]string{`spec.volumes[1].name: Duplicate value: "a"`, "spec.volumes[2].name: Required value"}},
		{"host path", withVolume(corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/a/../b", Type: ptr.To(corev1.HostPathType("Folder"))}}),
			[]string{`spec.volumes[0].hostPath.path: Invalid value: "/a/../b": must not contain '..'`, `spec.volumes[0].hostPath.type: Unsupported value: "Folder"`}},
		{"secret volume", withVolume(corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{DefaultMode: ptr.To[int32](0o1000), Items: []corev1.KeyToPath{{Key: "k", Path: "/abs"}, {Path: "..x"}}}}),
			[]string{
				"spec.volumes[0].secret.secretName: Required value",
				"spec.volumes[0].secret.defaultMode: Invalid value: 512: must be a number between 0 and 0777 (octal), both inclusive",
				`spec.volumes[0].secret.items[0].path: Invalid value: "/abs": must be a relative path`,
				"spec.volumes[0].secret.items[1].key: Required value",
				`spec.volumes[0].secret.items[1].path: Invalid value: "..x": must not start with '..'`,
			}},
		{"downward file of nothing", withVolume(corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: []corev1.DownwardAPIVolumeFile{{Path: "a"}}}}),
			[]string{"spec.volumes[0].downwardAPI.items[0]: Required value: one of fieldRef and resourceFieldRef is required"}},
		{"bundles of trust", withVolume(corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
			{ClusterTrustBundle: &corev1.ClusterTrustBundleProjection{Name: ptr.To("example.com:lab:1"), Path: "a"}},
			{ClusterTrustBundle: &corev1.ClusterTrustBundleProjection{SignerName: ptr.To("example.com/lab"), LabelSelector: &metav1.LabelSelector{}, Path: "b"}},
			{ClusterTrustBundle: &corev1.ClusterTrustBundleProjection{Path: "c"}},
			{ClusterTrustBundle: &corev1.ClusterTrustBundleProjection{Name: ptr.To("x"), SignerName: ptr.To("example.com/lab"), Path: "d"}},
			{ClusterTrustBundle: &corev1.ClusterTrustBundleProjection{Name: ptr.To("x"), LabelSelector: &metav1.LabelSelector{}, Path: "../e"}},
			{ClusterTrustBundle: &corev1.ClusterTrustBundleProjection{SignerName: ptr.To("lab"), Path: "f"}},
		}}}), []string{
			"spec.volumes[0].projected.sources[2].clusterTrustBundle: Required value: either name or signerName must be specified",
			`spec.volumes[0].projected.sources[3].clusterTrustBundle: Invalid value: "x": only one of name and signerName may be used`,
			`spec.volumes[0].projected.sources[4].clusterTrustBundle.path: Invalid value`,
			"spec.volumes[0].projected.sources[4].clusterTrustBundle.labelSelector: Invalid value",
			`spec.volumes[0].projected.sources[5].clusterTrustBundle.signerName: Invalid value: "lab"`,
		}},
		{"certificates of the pod", withVolume(corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
			{PodCertificate: &corev1.PodCertificateProjection{SignerName: "example.com/lab", KeyType: "ED25519", CredentialBundlePath: "a", MaxExpirationSeconds: ptr.To(int32(3600)), UserAnnotations: map[string]string{"example.com/A": "b"}}},
			{PodCertificate: &corev1.PodCertificateProjection{SignerName: "lab", KeyType: "DSA"}},
			{PodCertificate: &corev1.PodCertificateProjection{SignerName: "example.com/lab", KeyType: "RSA3072", KeyPath: "b", CertificateChainPath: "../c", MaxExpirationSeconds: ptr.To(int32(3599))}},
			{PodCertificate: &corev1.PodCertificateProjection{SignerName: "example.com/lab", KeyType: "ECDSAP521", KeyPath: "d", CertificateChainPath: "d", MaxExpirationSeconds: ptr.To(int32(7862401))}},
			{PodCertificate: &corev1.PodCertificateProjection{SignerName: "kubernetes.io/x", KeyPath: "e", MaxExpirationSeconds: ptr.To(int32(86401)), UserAnnotations: map[string]string{"plain": "b"}}},
		}}}), []string{
			`spec.volumes[0].projected.sources[1].podCertificate.signerName: Invalid value: "lab"`,
			`spec.volumes[0].projected.sources[1].podCertificate.keyType: Unsupported value: "DSA"`,
			"spec.volumes[0].projected.sources[1].podCertificate: Required value: specify at least one of credentialBundlePath, keyPath, and certificateChainPath",
			"spec.volumes[0].projected.sources[2].podCertificate.maxExpirationSeconds: Invalid value: 3599: if provided, maxExpirationSeconds must be >= 3600",
			"spec.volumes[0].projected.sources[2].podCertificate.certificateChainPath: Invalid value",
			"spec.volumes[0].projected.sources[3].podCertificate.maxExpirationSeconds: Invalid value: 7862401: if provided, maxExpirationSeconds must be <= 7862400",
			`spec.volumes[0].projected.sources[3].podCertificate: Invalid value: "d": conflicting duplicate paths`,
			"spec.volumes[0].projected.sources[4].podCertificate.keyType: Required value",
			"spec.volumes[0].projected.sources[4].podCertificate.maxExpirationSeconds: Invalid value: 86401: if provided, maxExpirationSeconds must be <= 86400",
			`spec.volumes[0].projected.sources[4].podCertificate.userAnnotations: Invalid value: "plain"`,
		}},
		{"projected twice to one path, token too short", withVolume(corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
			{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "t", ExpirationSeconds: ptr.To[int64](60)}},
			{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "t"}},
			{},
		}}}), []string{
			"spec.volumes[0].projected.sources[0].serviceAccountToken.expirationSeconds: Invalid value: 60: may not specify a duration less than 10 minutes",
			`spec.volumes[0].projected.sources[1].serviceAccountToken: Invalid value: "t": conflicting duplicate paths`,
			"spec.volumes[0].projected.sources[2]: Required value: must specify a volume type",
		}},
		{"image volume of nothing, policy", withVolume(corev1.VolumeSource{Image: &corev1.ImageVolumeSource{PullPolicy: "Sometimes"}}), []string{
			"spec.volumes[0].image.reference: Required value",
			`spec.volumes[0].image.pullPolicy: Unsupported value: "Sometimes": supported values: "Always", "IfNotPresent", "Never"`,
		}},
		{"mount of no volume", inContainer(func(c *corev1.Container) { c.VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/v"}} }),
			[]string{`spec.containers[0].volumeMounts[0].name: Not found: "v"`}},
		{"mounts in one place", func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "v"}}
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/v"}, {Name: "v", MountPath: "/v"}, {Name: "v", SubPath: "../up"}}
		}, []string{
			`spec.containers[0].volumeMounts[1].mountPath: Invalid value: "/v": must be unique`,
			"spec.containers[0].volumeMounts[2].mountPath: Required value",
			`spec.containers[0].volumeMounts[2].subPath: Invalid value: "../up": must not contain '..'`,
		}},
		{"bidirectional mount", func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "v"}}
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/v", MountPropagation: ptr.To(corev1.MountPropagationBidirectional)}}
		}, []string{"spec.containers[0].volumeMounts[0].mountPropagation: Forbidden: Bidirectional mount propagation is available only to privileged containers"}},

		{"probe of nothing", inContainer(func(c *corev1.Container) { c.LivenessProbe = &corev1.Probe{PeriodSeconds: -1, SuccessThreshold: 2} }), []string{
			"spec.containers[0].livenessProbe: Required value: must specify a handler type",
			"spec.containers[0].livenessProbe.periodSeconds: Invalid value: -1: must be greater than or equal to 0",
			"spec.containers[0].livenessProbe.successThreshold: Invalid value: 2: must be 1",
		}},
		{"probe of two sorts", inContainer(func(c *corev1.Container) {
			c.ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{}, TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(1)}}}
		}), []string{
			"spec.containers[0].readinessProbe.exec.command: Required value",
			"spec.containers[0].readinessProbe.tcpSocket: Forbidden: may not specify more than 1 handler type",
		}},
		{"probe of a port named wrongly", inContainer(func(c *corev1.Container) {
			c.StartupProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromString("http_"), Scheme: "ftp"}}}
		}), []string{
			`spec.containers[0].startupProbe.httpGet.port: Invalid value: "http_": must contain only alpha-numeric characters`,
			`spec.containers[0].startupProbe.httpGet.scheme: Unsupported value: "ftp": supported values: "HTTP", "HTTPS"`,
		}},
		{"sleep longer than the grace", inContainer(func(c *corev1.Container) {
			c.Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 31}}}
		}), []string{"spec.containers[0].lifecycle.preStop.sleep.seconds: Invalid value: 31: must be non-negative and less than terminationGracePeriodSeconds (30)"}},

		{"policies", func(p *corev1.Pod) {
			p.Spec.RestartPolicy, p.Spec.DNSPolicy, p.Spec.Containers[0].ImagePullPolicy = "Sometimes", "Mine", "Maybe"
		}, []string{
			`spec.restartPolicy: Unsupported value: "Sometimes": supported values: "Always", "Never", "OnFailure"`,
			`spec.dnsPolicy: Unsupported value: "Mine": supported values: "ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"`,
			`spec.containers[0].imagePullPolicy: Unsupported value: "Maybe": supported values: "Always", "IfNotPresent", "Never"`,
		}},
		{"no DNS and no nameserver", func(p *corev1.Pod) { p.Spec.DNSPolicy = corev1.DNSNone },
			[]string{"spec.dnsConfig: Required value: must provide at least one DNS nameserver when `dnsPolicy` is None"}},
		{"times", func(p *corev1.Pod) {
			p.Spec.TerminationGracePeriodSeconds, p.Spec.ActiveDeadlineSeconds = ptr.To[int64](-1), ptr.To[int64](0)
		}, []string{
			"spec.terminationGracePeriodSeconds: Invalid value: -1: must be greater than or equal to 0",
			"spec.activeDeadlineSeconds: Invalid value: 0: must be between 1 and 2147483647, inclusive",
		}},
		{"stop signal without a system", inContainer(func(c *corev1.Container) { c.Lifecycle = &corev1.Lifecycle{StopSignal: ptr.To(corev1.SIGUSR1)} }),
			[]string{"spec.containers[0].lifecycle.stopSignal: Forbidden: may not be set for containers with empty `spec.os.name`"}},
		{"stop signal that is none", func(p *corev1.Pod) {
			p.Spec.OS = &corev1.PodOS{Name: corev1.Linux}
			p.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{StopSignal: ptr.To(corev1.Signal("SIGHALT"))}
		}, []string{`spec.containers[0].lifecycle.stopSignal: Unsupported value: "SIGHALT": supported values: "SIGABRT"`}},
		{"stop signal", func(p *corev1.Pod) {
			p.Spec.OS = &corev1.PodOS{Name: corev1.Linux}
			p.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{StopSignal: ptr.To(corev1.SIGRTMINPLUS15)}
		}, nil},
		{"host name overridden and more", func(p *corev1.Pod) {
			p.Spec.HostnameOverride, p.Spec.SetHostnameAsFQDN, p.Spec.HostNetwork = ptr.To("A"+strings.Repeat("a", 64)), ptr.To(true), true
		}, []string{
			`spec.hostnameOverride: Invalid value: "A` + strings.Repeat("a", 64) + `": a lowercase RFC 1123 subdomain`,
			"spec.hostnameOverride: Too long: may not be more than 64 bytes",
			`spec.hostnameOverride: Invalid value: "A` + strings.Repeat("a", 64) + "\": may not be specified when `setHostnameAsFQDN` is true",
			`spec.hostnameOverride: Invalid value: "A` + strings.Repeat("a", 64) + "\": may not be specified when `hostNetwork` is true",
		}},
		{"host name overridden", func(p *corev1.Pod) { p.Spec.HostnameOverride = ptr.To("a.b.example") }, nil},
		{"names", func(p *corev1.Pod) { p.Spec.Hostname, p.Spec.NodeName = "a.b", "N1" }, []string{
			`spec.hostname: Invalid value: "a.b": must not contain dots`,
			`spec.nodeName: Invalid value: "N1": a lowercase RFC 1123 subdomain`,
		}},

		{"privileged without escalation", inContainer(func(c *corev1.Container) {
			c.SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true), AllowPrivilegeEscalation: ptr.To(false), RunAsUser: ptr.To[int64](-1)}
		}), []string{
			"spec.containers[0].securityContext.runAsUser: Invalid value: -1: must be between 0 and",
			"spec.containers[0].securityContext: Invalid value: ",
		}},
		{"all of /proc for the host's root", inContainer(func(c *corev1.Container) {
			c.SecurityContext = &corev1.SecurityContext{ProcMount: ptr.To(corev1.UnmaskedProcMount)}
		}), []string{`spec.containers[0].securityContext.procMount: Invalid value: "Unmasked": ` + "`hostUsers` must be false to use `Unmasked`"}},
		{"all of /proc in a user namespace", func(p *corev1.Pod) {
			p.Spec.HostUsers = ptr.To(false)
			p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{ProcMount: ptr.To(corev1.UnmaskedProcMount)}
		}, nil},
		{"a proc mount of no kind", inContainer(func(c *corev1.Container) {
			c.SecurityContext = &corev1.SecurityContext{ProcMount: ptr.To(corev1.ProcMountType("Half"))}
		}), []string{`spec.containers[0].securityContext.procMount: Unsupported value: "Half"`}},
		{"a user namespace on the host's", func(p *corev1.Pod) {
			p.Spec.HostUsers, p.Spec.HostNetwork, p.Spec.HostPID, p.Spec.HostIPC = ptr.To(false), true, true, true
		}, []string{
			"spec.hostNetwork: Forbidden: when `hostUsers` is false", "spec.hostPID: Forbidden: when `hostUsers` is false",
			"spec.hostIPC: Forbidden: when `hostUsers` is false",
		}},
		{"seccomp", func(p *corev1.Pod) {
			p.Spec.SecurityContext = &corev1.PodSecurityContext{SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeLocalhost}}
		}, []string{"spec.securityContext.seccompProfile.localhostProfile: Required value: must be set when seccomp type is Localhost"}},
		{"sysctl", func(p *corev1.Pod) {
			p.Spec.SecurityContext = &corev1.PodSecurityContext{Sysctls: []corev1.Sysctl{{Name: "net.core.a"}, {Name: "net.core.a"}, {Name: "Bad!"}}}
		}, []string{`spec.securityContext.sysctls[1].name: Duplicate value: "net.core.a"`, `spec.securityContext.sysctls[2].name: Invalid value: "Bad!": must have at most 253 characters and match regex`}},
		{"pid namespaces of host and pod", func(p *corev1.Pod) { p.Spec.HostPID, p.Spec.ShareProcessNamespace = true, ptr.To(true) },
			[]string{"spec.shareProcessNamespace: Invalid value: true: ShareProcessNamespace and HostPID cannot both be enabled"}},

		{"tolerations", func(p *corev1.Pod) {
			p.Spec.Tolerations = []corev1.Toleration{
				{Operator: corev1.TolerationOpEqual},
				{Key: "a", Operator: "Like"},
				{Key: "a", Operator: corev1.TolerationOpExists, Value: "b"},
				{Key: "a", TolerationSeconds: ptr.To[int64](1)},
				{Key: "a", Effect: "Never"},
			}
		}, []string{
			`spec.tolerations[0].operator: Invalid value: "Equal": operator must be Exists when ` + "`key` is empty",
			`spec.tolerations[1].operator: Unsupported value: "Like": supported values: "Equal", "Exists"`,
			"spec.tolerations[2].operator: Invalid value: ",
			`spec.tolerations[3].effect: Invalid value: "": effect must be 'NoExecute' when ` + "`tolerationSeconds` is set",
			`spec.tolerations[4].effect: Unsupported value: "Never"`,
		}},
		{"node affinity", func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
					{Key: "a", Operator: corev1.NodeSelectorOpIn}, {Key: "a", Operator: corev1.NodeSelectorOpGt, Values: []string{"x"}},
				}}}},
				PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{{Weight: 101}},
			}}
		}, []string{
			"spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0].values: Required value: must be specified when `operator` is 'In' or 'NotIn'",
			"spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[1].values[0]: Invalid value: \"x\": must be an integer",
			"spec.affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight: Invalid value: 101: must be in the range 1-100",
		}},
		{"pod affinity", func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{PodAffinity: &corev1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{}}}}
		}, []string{"spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey: Required value: can not be empty"}},
		{"spread", func(p *corev1.Pod) {
			p.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{WhenUnsatisfiable: "Cry"}}
		}, []string{
			"spec.topologySpreadConstraints[0].maxSkew: Invalid value: 0: must be greater than zero",
			"spec.topologySpreadConstraints[0].topologyKey: Required value: can not be empty",
			`spec.topologySpreadConstraints[0].whenUnsatisfiable: Unsupported value: "Cry": supported values: "DoNotSchedule", "ScheduleAnyway"`,
		}},
		{"no pull secret, a scheduler with an underscore", func(p *corev1.Pod) {
			p.Spec.ImagePullSecrets, p.Spec.SchedulerName = []corev1.LocalObjectReference{{}}, "my_scheduler"
		}, nil},
		{"a claim with too long a name", func(p *corev1.Pod) {
			p.Name = strings.Repeat("p", 240)
			p.Spec.Volumes = []corev1.Volume{{Name: strings.Repeat("v", 60), VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{
				VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: corev1.PersistentVolumeClaimSpec{
					AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
					Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{"storage": resource.MustParse("1")}},
				}}}}}}
		}, []string{"spec.volumes[0].name: Invalid value: "}},
		{"a cost", func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.PodDeletionCost: "-7"} }, nil},
		{"a cost that is no number", func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.PodDeletionCost: "+7"} },
			[]string{`metadata.annotations[controller.kubernetes.io/pod-deletion-cost]: Invalid value: "+7": must be a 32bit integer`}},
		{"preferences that no node has", func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{{Weight: 1, Preference: corev1.NodeSelectorTerm{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "a", Operator: corev1.NodeSelectorOpIn, Values: []string{"not a value"}}, {Key: "b", Operator: corev1.NodeSelectorOpGt, Values: []string{"many"}}},
			}}}}}
		}, nil},
		{"requirements that no node has", func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "b", Operator: corev1.NodeSelectorOpGt, Values: []string{"many"}}},
			}}}}}
		}, []string{`spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0].values[0]: Invalid value: "many": must be an integer`}},
		{"half a huge page", inContainer(func(c *corev1.Container) {
			c.Resources.Limits = corev1.ResourceList{"hugepages-2Mi": resource.MustParse("3Mi"), "cpu": resource.MustParse("1")}
			c.Resources.Requests = c.Resources.Limits
		}), []string{
			`spec.containers[0].resources.limits[hugepages-2Mi]: Invalid value: "3Mi": is not positive integer multiple of hugepages-2Mi`,
			`spec.containers[0].resources.requests[hugepages-2Mi]: Invalid value: "3Mi": is not positive integer multiple of hugepages-2Mi`,
		}},
		{"pages of a size that nothing can compute with", inContainer(func(c *corev1.Container) {
			c.Resources.Limits = corev1.ResourceList{"hugepages-1e-2000000000": resource.MustParse("1"), "cpu": resource.MustParse("1")}
			c.Resources.Requests = c.Resources.Limits
		}), []string{
			`spec.containers[0].resources.limits[hugepages-1e-2000000000]: Invalid value: "hugepages-1e-2000000000": the size of the pages: "1e-2000000000": the exponent has to be between -99 and 99, in two digits`,
			`spec.containers[0].resources.requests[hugepages-1e-2000000000]: Invalid value: "hugepages-1e-2000000000": the size of the pages: "1e-2000000000": the exponent has to be between -99 and 99, in two digits`,
		}},
		{"a padded profile", func(p *corev1.Pod) {
			p.Spec.SecurityContext = &corev1.PodSecurityContext{AppArmorProfile: &corev1.AppArmorProfile{Type: corev1.AppArmorProfileTypeLocalhost, LocalhostProfile: ptr.To(" p")}}
		}, []string{`spec.securityContext.appArmorProfile.localhostProfile: Invalid value: " p": must not be padded with whitespace`}},
		{"an image with blanks", inContainer(func(c *corev1.Container) { c.Image = " web" }),
			[]string{`spec.containers[0].image: Invalid value: " web": must not have leading or trailing whitespace`}},
		{"gated and placed", func(p *corev1.Pod) {
			p.Spec.NodeName, p.Spec.SchedulingGates = "n1", []corev1.PodSchedulingGate{{Name: "a"}}
		}, []string{"spec.nodeName: Forbidden: cannot be set until all schedulingGates have been cleared"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			checktest.Faults(t, validatePodCreate(newPod(test.edit)), test.want...)
		})
	}
}

func TestValidatePodStatusUpdate(t *testing.T) {
	ended := func(code int32) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "web", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code}}}}
		}
	}
	tests := []struct {
		name     string
		policy   corev1.RestartPolicy
		old, new func(*corev1.Pod)
		want     []string
	}{
		{"restarts", corev1.RestartPolicyAlways, ended(0), func(p *corev1.Pod) { p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "web"}} }, nil},
		{"restarts after failure", corev1.RestartPolicyOnFailure, ended(1), func(p *corev1.Pod) { p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "web"}} }, nil},
		{"restarts after success", corev1.RestartPolicyOnFailure, ended(0), func(p *corev1.Pod) { p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "web"}} },
			[]string{"status.containerStatuses[0].state: Forbidden: may not be transitioned to non-terminated state"}},
		{"restarts though it never should", corev1.RestartPolicyNever, ended(1), func(p *corev1.Pod) { p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "web"}} },
			[]string{"status.containerStatuses[0].state: Forbidden: may not be transitioned to non-terminated state"}},
		{"bad address", corev1.RestartPolicyAlways, func(*corev1.Pod) {}, func(p *corev1.Pod) { p.Status.PodIP = "10.0.0" },
			[]string{`status.podIPs[0]: Invalid value: "10.0.0": must be a valid IP address`}},
		{"bad nominated node", corev1.RestartPolicyAlways, func(*corev1.Pod) {}, func(p *corev1.Pod) { p.Status.NominatedNodeName = "N" },
			[]string{`status.nominatedNodeName: Invalid value: "N": `}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			set := func(p *corev1.Pod) { p.Spec.RestartPolicy = test.policy }
			checktest.Faults(t, validatePodStatusUpdate(newPod(set, test.new), newPod(set, test.old)), test.want...)
		})
	}
}

func TestPodPrepare(t *testing.T) {
	pod := newPod(func(p *corev1.Pod) {
		p.Labels = map[string]string{"app": "web"}
		p.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.1"}
		p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "a"}}
		p.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{LabelSelector: &metav1.LabelSelector{}, MatchLabelKeys: []string{"app", "none"}}}
	})
	preparePodCreate(pod)
	want := corev1.PodStatus{Phase: corev1.PodPending, QOSClass: corev1.PodQOSBestEffort, Conditions: []corev1.PodCondition{{
		Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonSchedulingGated, Message: "Scheduling is blocked due to non-empty scheduling gates",
	}}}
	if diff := cmp.Diff(want, pod.Status); diff != "" {
		t.Errorf("status at creation (-want +got):\n%s", diff)
	}
	if pod.Generation != 1 {
		t.Errorf("generation %d, want 1", pod.Generation)
	}
	selector := pod.Spec.TopologySpreadConstraints[0].LabelSelector
	if got := metav1.FormatLabelSelector(selector); got != "app in (web)" {
		t.Errorf("selector %q, want the pod's own label", got)
	}

	updated := pod.DeepCopy()
	updated.Status = corev1.PodStatus{Phase: corev1.PodFailed}
	updated.Labels = nil
	preparePodUpdate(updated, pod)
	if updated.Status.Phase != corev1.PodPending || updated.Generation != 1 {
		t.Errorf("an update of labels made phase %s, generation %d", updated.Status.Phase, updated.Generation)
	}
	updated.Spec.Containers[0].Image = "web:2"
	preparePodUpdate(updated, pod)
	if updated.Generation != 2 {
		t.Errorf("generation %d after a new image, want 2", updated.Generation)
	}

	status := pod.DeepCopy()
	status.Spec.Containers[0].Image = "evil"
	status.Status.Phase, status.Status.QOSClass = corev1.PodRunning, corev1.PodQOSGuaranteed
	preparePodStatusUpdate(status, pod)
	if status.Spec.Containers[0].Image != "web:1" || status.Status.Phase != corev1.PodRunning || status.Status.QOSClass != corev1.PodQOSBestEffort {
		t.Errorf("a status update made %+v", status)
	}
}

func TestPodGrace(t *testing.T) {
	running := func(p *corev1.Pod) { p.Spec.NodeName, p.Status.Phase = "n1", corev1.PodRunning }
	tests := []struct {
		name  string
		edit  func(*corev1.Pod)
		asked *int64
		want  int64
	}{
		{"the pod's own", running, nil, 30},
		{"asked for", running, ptr.To[int64](5), 5},
		{"at once", running, ptr.To[int64](0), 0},
		{"negative", running, ptr.To[int64](-3), 1},
		{"not scheduled", func(*corev1.Pod) {}, ptr.To[int64](5), 0},
		{"finished", func(p *corev1.Pod) { p.Spec.NodeName, p.Status.Phase = "n1", corev1.PodSucceeded }, nil, 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			options := &metav1.DeleteOptions{GracePeriodSeconds: test.asked}
			if !podGrace(newPod(test.edit), options) {
				t.Fatal("pods are deleted gracefully")
			}
			if *options.GracePeriodSeconds != test.want {
				t.Errorf("%d s, want %d", *options.GracePeriodSeconds, test.want)
			}
		})
	}
	if podGrace(newPod(), nil) {
		t.Error("graceful without options")
	}
}
