package core

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/kind"
	"github.com/clusterd/clusterd/apis/names"
)

// Service is the kind Service. Addresses and node ports are given out by the
// API server, which knows what is taken; here they are only kept and checked.
func Service() kind.Kind {
	return kind.Typed[*corev1.Service]{
		GVK:        corev1.SchemeGroupVersion.WithKind("Service"),
		Resource:   "services",
		Singular:   "service",
		ShortNames: []string{"svc"},
		Categories: []string{"all"},
		Namespaced: true,

		New:     func() runtime.Object { return &corev1.Service{} },
		NewList: func() runtime.Object { return &corev1.ServiceList{} },

		Default:        defaultService,
		PrepareCreate:  func(s *corev1.Service) { s.Status = corev1.ServiceStatus{} },
		PrepareUpdate:  prepareServiceUpdate,
		Warnings:       serviceWarnings,
		Validate:       validateService,
		ValidateUpdate: validateServiceUpdate,

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Type", corev1.ServiceSpec{}.SwaggerDoc()["type"]),
			cells.Text("Cluster-IP", corev1.ServiceSpec{}.SwaggerDoc()["clusterIP"]),
			cells.Text("External-IP", corev1.ServiceSpec{}.SwaggerDoc()["externalIPs"]),
			cells.Text("Port(s)", corev1.ServiceSpec{}.SwaggerDoc()["ports"]),
			cells.Age,
			cells.Wide(cells.Text("Selector", corev1.ServiceSpec{}.SwaggerDoc()["selector"])),
		},
		Row: serviceRow,
		Fields: func(s *corev1.Service) fields.Set {
			return fields.Set{"spec.clusterIP": s.Spec.ClusterIP, "spec.type": string(s.Spec.Type)}
		},

		Status: &kind.TypedStatus[*corev1.Service]{
			PrepareUpdate:  func(s, old *corev1.Service) { s.Spec = old.Spec },
			ValidateUpdate: validateServiceStatusUpdate,
		},
		CreateOnUpdate:      true,
		UnconditionalUpdate: true,
	}.Kind()
}

func defaultService(s *corev1.Service) {
	spec := &s.Spec
	if spec.SessionAffinity == "" {
		spec.SessionAffinity = corev1.ServiceAffinityNone
	}
	switch spec.SessionAffinity {
	case corev1.ServiceAffinityNone:
		spec.SessionAffinityConfig = nil
	case corev1.ServiceAffinityClientIP:
		if spec.SessionAffinityConfig == nil || spec.SessionAffinityConfig.ClientIP == nil || spec.SessionAffinityConfig.ClientIP.TimeoutSeconds == nil {
			seconds := corev1.DefaultClientIPServiceAffinitySeconds
			spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds}}
		}
	}
	if spec.Type == "" {
		spec.Type = corev1.ServiceTypeClusterIP
	}
	for i := range spec.Ports {
		port := &spec.Ports[i]
		if port.Protocol == "" {
			port.Protocol = corev1.ProtocolTCP
		}
		if port.TargetPort == intstr.FromInt32(0) || port.TargetPort == intstr.FromString("") {
			port.TargetPort = intstr.FromInt32(port.Port)
		}
	}
	if reachedFromOutside(spec) && spec.ExternalTrafficPolicy == "" {
		spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	}
	if spec.Type != corev1.ServiceTypeExternalName {
		setDefault(&spec.InternalTrafficPolicy, corev1.ServiceInternalTrafficPolicyCluster)
	}
	if spec.Type == corev1.ServiceTypeLoadBalancer {
		setDefault(&spec.AllocateLoadBalancerNodePorts, true)
		for i := range s.Status.LoadBalancer.Ingress {
			if ingress := &s.Status.LoadBalancer.Ingress[i]; ingress.IP != "" {
				setDefault(&ingress.IPMode, corev1.LoadBalancerIPModeVIP)
			}
		}
	}
	// clusterIP is the older name of the first of clusterIPs.
	switch {
	case spec.ClusterIP != "" && len(spec.ClusterIPs) == 0:
		spec.ClusterIPs = []string{spec.ClusterIP}
	case spec.ClusterIP == "" && len(spec.ClusterIPs) > 0:
		spec.ClusterIP = spec.ClusterIPs[0]
	}
}

// reachedFromOutside tells whether clients outside the cluster have an address
// to reach the service by.
func reachedFromOutside(spec *corev1.ServiceSpec) bool {
	switch spec.Type {
	case corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeNodePort:
		return true
	case corev1.ServiceTypeClusterIP:
		return len(spec.ExternalIPs) > 0
	}
	return false
}

// prepareServiceUpdate keeps what the server gave out and the writer did not
// mention: who wrote the manifest does not know it. What the new type cannot
// have is taken away, if it is unchanged.
func prepareServiceUpdate(s, old *corev1.Service) {
	s.Status = old.Status
	KeepGiven(&s.Spec, &old.Spec)
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		dropClusterIPs(s, old)
	}
	if !mayHaveNodePorts(&s.Spec) {
		dropNodePorts(&s.Spec, &old.Spec)
	}
	if !needsHealthPort(&s.Spec) && s.Spec.HealthCheckNodePort == old.Spec.HealthCheckNodePort {
		s.Spec.HealthCheckNodePort = 0
	}
	if !reachedFromOutside(&s.Spec) && s.Spec.ExternalTrafficPolicy == old.Spec.ExternalTrafficPolicy {
		s.Spec.ExternalTrafficPolicy = ""
	}
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		if ptrEqual(s.Spec.AllocateLoadBalancerNodePorts, old.Spec.AllocateLoadBalancerNodePorts) {
			s.Spec.AllocateLoadBalancerNodePorts = nil
		}
		if ptrEqual(s.Spec.LoadBalancerClass, old.Spec.LoadBalancerClass) {
			s.Spec.LoadBalancerClass = nil
		}
		s.Status.LoadBalancer = corev1.LoadBalancerStatus{}
		s.Status.Conditions = slices.DeleteFunc(slices.Clone(s.Status.Conditions), func(c metav1.Condition) bool { return c.Type == names.LoadBalancerAddress })
	}
}

// KeepGiven puts into an update what the server gave out before and the writer did
// not mention.
func KeepGiven(spec, old *corev1.ServiceSpec) {
	if spec.Type != corev1.ServiceTypeExternalName && old.Type != corev1.ServiceTypeExternalName {
		keepClusterIPs(spec, old)
	}
	if mayHaveNodePorts(spec) && mayHaveNodePorts(old) {
		keepNodePorts(spec, old)
	}
	if needsHealthPort(spec) && needsHealthPort(old) && spec.HealthCheckNodePort == 0 {
		spec.HealthCheckNodePort = old.HealthCheckNodePort
	}
}

func keepClusterIPs(spec, old *corev1.ServiceSpec) {
	if spec.ClusterIP == "" && len(spec.ClusterIPs) == 0 {
		spec.ClusterIP, spec.ClusterIPs = old.ClusterIP, old.ClusterIPs
	}
	if len(spec.IPFamilies) == 0 {
		spec.IPFamilies = old.IPFamilies
	}
	if spec.IPFamilyPolicy == nil {
		spec.IPFamilyPolicy = old.IPFamilyPolicy
	}
}

func dropClusterIPs(s, old *corev1.Service) {
	if s.Spec.ClusterIP == old.Spec.ClusterIP {
		s.Spec.ClusterIP, s.Spec.ClusterIPs = "", nil
	}
	s.Spec.IPFamilies, s.Spec.IPFamilyPolicy, s.Spec.InternalTrafficPolicy = nil, nil, nil
}

// mayHaveNodePorts: a load balancer that is given none keeps those it asks for.
func mayHaveNodePorts(spec *corev1.ServiceSpec) bool {
	return spec.Type == corev1.ServiceTypeNodePort || spec.Type == corev1.ServiceTypeLoadBalancer
}

func needsHealthPort(spec *corev1.ServiceSpec) bool {
	return spec.Type == corev1.ServiceTypeLoadBalancer && spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// portKey is what makes a port of a service the same port after an update.
type portKey struct {
	protocol corev1.Protocol
	port     int32
}

func keepNodePorts(spec, old *corev1.ServiceSpec) {
	given, used := map[portKey]int32{}, map[int32]bool{}
	for _, port := range old.Ports {
		given[portKey{port.Protocol, port.Port}] = port.NodePort
	}
	for _, port := range spec.Ports {
		used[port.NodePort] = true
	}
	for i := range spec.Ports {
		port := &spec.Ports[i]
		if n := given[portKey{port.Protocol, port.Port}]; port.NodePort == 0 && !used[n] {
			port.NodePort = n
			used[n] = true
		}
	}
}

func dropNodePorts(spec, old *corev1.ServiceSpec) {
	given := map[int32]bool{}
	for _, port := range old.Ports {
		given[port.NodePort] = true
	}
	for i := range spec.Ports {
		if given[spec.Ports[i].NodePort] {
			spec.Ports[i].NodePort = 0
		}
	}
}

func ptrEqual[T comparable](a, b *T) bool { return a == b || a != nil && b != nil && *a == *b }

func serviceRow(s *corev1.Service, now time.Time) []any {
	ip := s.Spec.ClusterIP
	if len(s.Spec.ClusterIPs) > 0 {
		ip = s.Spec.ClusterIPs[0]
	}
	return []any{
		s.Name,
		string(s.Spec.Type),
		cells.None(ip),
		externalAddress(s),
		cells.None(servicePorts(s.Spec.Ports)),
		cells.Since(s.CreationTimestamp, now),
		cells.None(labels.FormatLabels(s.Spec.Selector)),
	}
}

func externalAddress(s *corev1.Service) string {
	switch s.Spec.Type {
	case corev1.ServiceTypeExternalName:
		return s.Spec.ExternalName
	case corev1.ServiceTypeLoadBalancer:
		var addresses []string
		for _, ingress := range s.Status.LoadBalancer.Ingress {
			if ingress.IP != "" {
				addresses = append(addresses, ingress.IP)
			} else if ingress.Hostname != "" {
				addresses = append(addresses, ingress.Hostname)
			}
		}
		given := strings.Join(addresses, ",")
		if len(s.Spec.ExternalIPs) > 0 {
			return strings.Join(append(addresses, s.Spec.ExternalIPs...), ",")
		}
		if given == "" {
			return "<pending>"
		}
		return given
	}
	return cells.None(strings.Join(s.Spec.ExternalIPs, ","))
}

func servicePorts(ports []corev1.ServicePort) string {
	texts := make([]string, len(ports))
	for i, port := range ports {
		texts[i] = fmt.Sprintf("%d/%s", port.Port, port.Protocol)
		if port.NodePort > 0 {
			texts[i] = fmt.Sprintf("%d:%d/%s", port.Port, port.NodePort, port.Protocol)
		}
	}
	return strings.Join(texts, ",")
}
