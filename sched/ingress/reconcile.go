package ingress

import (
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/apis/networking"
	"github.com/clusterd/clusterd/sched/loop"
)

// Name is that of the pods' set, their Service and their account, whose rights
// are in the role system:clusterd-ingress.
var Name = loop.Key{Namespace: metav1.NamespaceSystem, Name: "clusterd-ingress"}

// Image is the one that each node makes of its own program.
const Image = "clusterd.local/clusterd:built-in"

const (
	httpPort, httpsPort, adminPort = 8080, 8443, 9090
	// labelAgent is on machines that hold nothing of the cluster.
	labelAgent = "node-role.kubernetes.io/agent"
	user       = 65532
	// grace is longer than the proxy takes to end: 5 s until no client sends it new
	// connections, and 20 s for what is under way.
	grace = 30
)

// PodPorts are the ports at which the proxies listen for Ingresses, and for
// health checks.
var PodPorts = []int32{httpPort, httpsPort, adminPort}

// ours reports whether the Ingress is of a class that our proxy serves.
func ours(i *networkingv1.Ingress, classes []*networkingv1.IngressClass) bool {
	name := networking.ClassOf(i)
	return slices.ContainsFunc(classes, func(c *networkingv1.IngressClass) bool {
		return c.Name == name && c.Spec.Controller == names.IngressController
	})
}

// Addresses are those under which the Service is reached from outside.
func Addresses(s *corev1.Service) (out []networkingv1.IngressLoadBalancerIngress) {
	for _, in := range s.Status.LoadBalancer.Ingress {
		out = append(out, networkingv1.IngressLoadBalancerIngress{IP: in.IP, Hostname: in.Hostname})
	}
	for _, ip := range s.Spec.ExternalIPs {
		if !slices.ContainsFunc(out, func(o networkingv1.IngressLoadBalancerIngress) bool { return o.IP == ip }) {
			out = append(out, networkingv1.IngressLoadBalancerIngress{IP: ip})
		}
	}
	return out
}

func newClass() *networkingv1.IngressClass {
	return &networkingv1.IngressClass{
		ObjectMeta: metav1.ObjectMeta{Name: "clusterd", Annotations: map[string]string{networking.DefaultIngressClass: "true"}},
		Spec:       networkingv1.IngressClassSpec{Controller: names.IngressController},
	}
}

func meta() metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: Name.Namespace, Name: Name.Name, Labels: map[string]string{"app.kubernetes.io/name": Name.Name}}
}

func newAccount() *corev1.ServiceAccount { return &corev1.ServiceAccount{ObjectMeta: meta()} }

func newService() *corev1.Service {
	return &corev1.Service{ObjectMeta: meta(), Spec: ServiceSpec([]corev1.ServicePort{
		{Name: "http", Port: 80, TargetPort: intstr.FromString("http")},
		{Name: "https", Port: 443, TargetPort: intstr.FromString("https")},
	})}
}

// ServiceSpec is that of a Service in front of the proxies. Connections stay on the
// node they come to, so that the proxy sees the client's address.
func ServiceSpec(ports []corev1.ServicePort) corev1.ServiceSpec {
	return corev1.ServiceSpec{
		Type:                  corev1.ServiceTypeLoadBalancer,
		ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
		Selector:              meta().Labels,
		Ports:                 ports,
	}
}

func newDaemonSet() *appsv1.DaemonSet {
	probe := func(path string, period, failures int32) *corev1.Probe {
		return &corev1.Probe{
			ProbeHandler:  corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: path, Port: intstr.FromString("admin")}},
			PeriodSeconds: period, FailureThreshold: failures, TimeoutSeconds: 3,
		}
	}
	return &appsv1.DaemonSet{ObjectMeta: meta(), Spec: appsv1.DaemonSetSpec{
		Selector: &metav1.LabelSelector{MatchLabels: meta().Labels},
		Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: meta().Labels, Annotations: map[string]string{
				"prometheus.io/scrape": "true", "prometheus.io/port": "9090",
			}},
			Spec: corev1.PodSpec{
				ServiceAccountName:            Name.Name,
				PriorityClassName:             "system-cluster-critical",
				EnableServiceLinks:            ptr.To(false),
				Affinity:                      serversOnly(),
				TerminationGracePeriodSeconds: ptr.To[int64](grace),
				SecurityContext: &corev1.PodSecurityContext{
					RunAsNonRoot: ptr.To(true), RunAsUser: ptr.To[int64](user), RunAsGroup: ptr.To[int64](user),
					SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
				},
				Containers: []corev1.Container{{
					Name: "proxy", Image: Image, ImagePullPolicy: corev1.PullIfNotPresent, Args: []string{"ingress"},
					Ports: []corev1.ContainerPort{
						{Name: "http", ContainerPort: httpPort}, {Name: "https", ContainerPort: httpsPort}, {Name: "admin", ContainerPort: adminPort},
					},
					StartupProbe:   probe("/healthz", 1, 120),
					ReadinessProbe: probe("/readyz", 2, 2),
					LivenessProbe:  probe("/healthz", 10, 6),
					Resources: corev1.ResourceRequirements{
						Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("20m"), corev1.ResourceMemory: resource.MustParse("64Mi")},
						Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("512Mi")},
					},
					SecurityContext: &corev1.SecurityContext{
						AllowPrivilegeEscalation: ptr.To(false), ReadOnlyRootFilesystem: ptr.To(true),
						Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
					},
				}},
			},
		},
	}}
}

// serversOnly keeps the pods off agents: a node can have a token of each account
// whose pods it runs, and this one may read the Secrets of the whole cluster.
// Servers hold them anyway.
func serversOnly() *corev1.Affinity {
	return &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
			{Key: labelAgent, Operator: corev1.NodeSelectorOpDoesNotExist},
		}}},
	}}}
}
