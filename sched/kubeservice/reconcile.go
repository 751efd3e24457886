package kubeservice

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
)

const (
	managedBy = "clusterd"
	portName  = "https"
	// labelServer is on the nodes that run an API server, where not all do.
	labelServer = "node-role.kubernetes.io/control-plane"
)

// newService is the Service as it begins.
func newService(address netip.Addr) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Name: the.Name, Namespace: the.Namespace,
			Labels: map[string]string{"component": "apiserver", "provider": "kubernetes"},
		},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: address.String(),
			SessionAffinity: corev1.ServiceAffinityNone,
			Ports:           []corev1.ServicePort{{Name: portName, Port: 443, Protocol: corev1.ProtocolTCP, TargetPort: intstr.FromInt32(443)}},
		},
	}
}

// fix returns the corrected Service; nil: it is correct. The port's name must be that of
// the slices, and with a selector its endpoints would be other pods.
func fix(s *corev1.Service) *corev1.Service {
	want := s.DeepCopy()
	want.Spec.Selector = nil
	if len(want.Spec.Ports) != 1 || want.Spec.Ports[0].Port != 443 || want.Spec.Ports[0].Name != portName || want.Spec.Ports[0].Protocol != corev1.ProtocolTCP {
		want.Spec.Ports = newService(netip.Addr{}).Spec.Ports
	}
	if apiequality.Semantic.DeepEqual(s.Spec, want.Spec) {
		return nil
	}
	return want
}

// server is the API server of a node, as its Node object describes it.
type server struct {
	name  string
	addr  netip.AddrPort
	lives bool
	marks bool // it says that it is one
}

// tells reads a node. One whose agent reports is alive, ready or not: the agent
// is a part of the same program.
func tells(n *corev1.Node) server {
	s := server{name: n.Name}
	_, s.marks = n.Labels[labelServer]
	for _, a := range n.Status.Addresses {
		if a.Type != corev1.NodeInternalIP {
			continue
		}
		if ip, err := netip.ParseAddr(a.Address); err == nil {
			if port := n.Status.DaemonEndpoints.KubeletEndpoint.Port; port > 0 && port <= 65535 {
				s.addr = netip.AddrPortFrom(ip, uint16(port))
			}
			break
		}
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			s.lives = c.Status != corev1.ConditionUnknown
		}
	}
	return s
}

// Decide gives the slices of all API servers that live: one for each port that
// they listen on. Every node has one, unless some say that they do.
func Decide(nodes []*corev1.Node) []*discoveryv1.EndpointSlice {
	var servers []server
	some := false
	for _, n := range nodes {
		s := tells(n)
		if s.addr.IsValid() && n.DeletionTimestamp == nil {
			servers = append(servers, s)
			some = some || s.marks
		}
	}
	slices.SortFunc(servers, func(a, b server) int { return a.addr.Compare(b.addr) })
	var out []*discoveryv1.EndpointSlice
	for _, s := range servers {
		if !s.lives || some && !s.marks {
			continue
		}
		family := discoveryv1.AddressTypeIPv6
		if s.addr.Addr().Is4() {
			family = discoveryv1.AddressTypeIPv4
		}
		i := slices.IndexFunc(out, func(e *discoveryv1.EndpointSlice) bool {
			return *e.Ports[0].Port == int32(s.addr.Port()) && e.AddressType == family
		})
		if i < 0 {
			name := the.Name
			if len(out) > 0 {
				name = fmt.Sprintf("%s-%d", the.Name, s.addr.Port())
			}
			if slices.ContainsFunc(out, func(e *discoveryv1.EndpointSlice) bool { return e.Name == name }) {
				name += "-6"
			}
			i = len(out)
			out = append(out, &discoveryv1.EndpointSlice{
				ObjectMeta: metav1.ObjectMeta{
					Name: name, Namespace: the.Namespace,
					Labels: map[string]string{discoveryv1.LabelServiceName: the.Name, discoveryv1.LabelManagedBy: managedBy},
				},
				AddressType: family,
				Ports:       []discoveryv1.EndpointPort{{Name: ptr.To(portName), Port: ptr.To(int32(s.addr.Port())), Protocol: ptr.To(corev1.ProtocolTCP)}},
			})
		}
		out[i].Endpoints = append(out[i].Endpoints, discoveryv1.Endpoint{
			Addresses: []string{s.addr.Addr().String()}, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)}, NodeName: ptr.To(s.name),
		})
	}
	return out
}
