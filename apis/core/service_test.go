package core

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

// newService is a sound, defaulted service with one port, after edit.
func newService(edit func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "hello", ResourceVersion: "7"},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
	}
	edit(s)
	defaultService(s)
	return s
}

func TestValidateService(t *testing.T) {
	tests := []struct {
		name string
		edit func(*corev1.Service)
		want []string
	}{
		{"sound", func(*corev1.Service) {}, nil},
		{"headless needs no ports", func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.Ports = "None", nil }, nil},
		{"name starts with a digit", func(s *corev1.Service) { s.Name = "1web" }, []string{`metadata.name: Invalid value: "1web": a DNS-1035 label must consist of`}},
		{"type", func(s *corev1.Service) { s.Spec.Type = "Public" }, []string{`spec.type: Unsupported value: "Public": supported values: "ClusterIP", "ExternalName", "LoadBalancer", "NodePort"`}},
		{"no ports", func(s *corev1.Service) { s.Spec.Ports = nil }, []string{"spec.ports: Required value"}},
		{"ports without names", func(s *corev1.Service) { s.Spec.Ports = []corev1.ServicePort{{Port: 1}, {Port: 2, Name: "a"}} }, []string{"spec.ports[0].name: Required value"}},
		{"port name taken", func(s *corev1.Service) {
			s.Spec.Ports = []corev1.ServicePort{{Port: 1, Name: "a"}, {Port: 2, Name: "a"}}
		}, []string{`spec.ports[1].name: Duplicate value: "a"`}},
		{"port taken", func(s *corev1.Service) {
			s.Spec.Ports = []corev1.ServicePort{{Port: 1, Name: "a"}, {Port: 1, Name: "b"}, {Port: 1, Name: "c", Protocol: "UDP"}}
		}, []string{"spec.ports[1]: Duplicate value: "}},
		{"port and target out of range", func(s *corev1.Service) {
			s.Spec.Ports[0].Port, s.Spec.Ports[0].TargetPort = 0, intstr.FromString("Bad Port")
		}, []string{
			"spec.ports[0].port: Invalid value: 0: must be between 1 and 65535, inclusive",
			`spec.ports[0].targetPort: Invalid value: "Bad Port": must contain only`,
		}},
		{"node port of a cluster service", func(s *corev1.Service) { s.Spec.Ports[0].NodePort = 30000 }, []string{"spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'"}},
		{"affinity", func(s *corev1.Service) { s.Spec.SessionAffinity = "Cookie" }, []string{`spec.sessionAffinity: Unsupported value: "Cookie": supported values: "ClientIP", "None"`}},
		{"affinity too long", func(s *corev1.Service) {
			s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
			s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr.To[int32](86401)}}
		}, []string{"spec.sessionAffinityConfig.clientIP.timeoutSeconds: Invalid value: 86401: must be greater than 0 and less than 86400"}},
		{"bad address", func(s *corev1.Service) { s.Spec.ClusterIP = "10.0.0" }, []string{`spec.clusterIPs[0]: Invalid value: "10.0.0": must be a valid IP address`}},
		{"headless node port", func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.Type = "None", corev1.ServiceTypeNodePort },
			[]string{`spec.clusterIPs[0]: Invalid value: "None": may not be set to 'None' for NodePort services`}},
		{"external name", func(s *corev1.Service) { s.Spec.Type, s.Spec.ClusterIP = corev1.ServiceTypeExternalName, "10.0.0.1" }, []string{
			"spec.clusterIPs: Forbidden: may not be set for ExternalName services", "spec.externalName: Required value",
		}},
		{"external policy of a cluster service", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = "Local" },
			[]string{`spec.externalTrafficPolicy: Invalid value: "Local": may only be set for externally-accessible services`}},
		{"source ranges of a cluster service", func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0/8"} },
			[]string{"spec.loadBalancerSourceRanges: Forbidden: may only be used when `type` is 'LoadBalancer'"}},
		{"external addresses that each node has, or none", func(s *corev1.Service) {
			s.Spec.ExternalIPs = []string{"127.0.0.1", "169.254.169.254", "0.0.0.0", "::1", "192.0.2.1"}
		}, []string{
			`spec.externalIPs[0]: Invalid value: "127.0.0.1": may not be in the loopback range (127.0.0.0/8, ::1/128)`,
			`spec.externalIPs[1]: Invalid value: "169.254.169.254": may not be in the link-local range (169.254.0.0/16, fe80::/10)`,
			`spec.externalIPs[2]: Invalid value: "0.0.0.0": may not be unspecified (0.0.0.0)`,
			`spec.externalIPs[3]: Invalid value: "::1": may not be in the loopback range (127.0.0.0/8, ::1/128)`,
		}},
		{"external addresses in other words", func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"127.000.000.001", "::ffff:127.0.0.1"} }, []string{
			`spec.externalIPs[0]: Invalid value: "127.000.000.001": must not have leading 0s`,
			`spec.externalIPs[1]: Invalid value: "::ffff:127.0.0.1": must not be an IPv4-mapped IPv6 address`,
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) { checktest.Faults(t, validateService(newService(test.edit)), test.want...) })
	}
}

func TestServiceUpdate(t *testing.T) {
	nop := func(*corev1.Service) {}
	given := func(s *corev1.Service) { s.Spec.ClusterIP = "10.43.0.9" }
	nodePort := func(s *corev1.Service) {
		given(s)
		s.Spec.Type, s.Spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, 30001
	}
	balanced := func(s *corev1.Service) {
		nodePort(s)
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Spec.ExternalTrafficPolicy, s.Spec.HealthCheckNodePort = corev1.ServiceExternalTrafficPolicyLocal, 30002
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}
	}
	outside := func(ips ...string) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Spec.ExternalIPs = ips }
	}
	classed := func(class string) func(*corev1.Service) {
		return func(s *corev1.Service) { balanced(s); s.Spec.LoadBalancerClass = &class }
	}
	tests := []struct {
		name     string
		old, new func(*corev1.Service)
		want     []string                   // faults
		then     func(*corev1.Service) bool // holds after PrepareUpdate
	}{
		{"address is kept", given, nop, nil, func(s *corev1.Service) bool { return s.Spec.ClusterIP == "10.43.0.9" && len(s.Spec.ClusterIPs) == 1 }},
		{"address is given", nop, given, nil, nil},
		{"other address", given, func(s *corev1.Service) { s.Spec.ClusterIP = "10.43.0.10" }, []string{"spec.clusterIPs[0]: Invalid value: [\"10.43.0.10\"]: may not change once set"}, nil},
		{"headless now", given, func(s *corev1.Service) { s.Spec.ClusterIP = "None" }, []string{"spec.clusterIPs[0]: Invalid value: [\"None\"]: may not change once set"}, nil},
		{"node port is kept", nodePort, func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort }, nil, func(s *corev1.Service) bool { return s.Spec.Ports[0].NodePort == 30001 }},
		{"node port of another port is not", nodePort, func(s *corev1.Service) { s.Spec.Type, s.Spec.Ports[0].Port = corev1.ServiceTypeNodePort, 81 }, nil, func(s *corev1.Service) bool { return s.Spec.Ports[0].NodePort == 0 }},
		{"type changed, ports sent back", nodePort, func(s *corev1.Service) {
			nodePort(s)
			s.Spec.Type, s.Spec.ExternalTrafficPolicy = corev1.ServiceTypeClusterIP, corev1.ServiceExternalTrafficPolicyCluster
		}, nil, func(s *corev1.Service) bool {
			return s.Spec.Ports[0].NodePort == 0 && s.Spec.ExternalTrafficPolicy == ""
		}},
		{"load balancer no more", balanced, func(s *corev1.Service) { balanced(s); s.Spec.Type = corev1.ServiceTypeClusterIP }, nil, func(s *corev1.Service) bool {
			return s.Spec.HealthCheckNodePort == 0 && s.Spec.AllocateLoadBalancerNodePorts == nil && s.Status.LoadBalancer.Ingress == nil
		}},
		{"external addresses that were let in once", outside("127.0.0.1", "010.1.2.3"), outside("127.0.0.1", "010.1.2.3"), nil, nil},
		{"another external address", outside("127.0.0.1"), outside("127.0.0.1", "127.0.0.2"), []string{`spec.externalIPs[1]: Invalid value: "127.0.0.2": may not be in the loopback range`}, nil},
		{"class given later", balanced, classed("example.com/lb"), []string{`spec.loadBalancerClass: Invalid value: "example.com/lb": may not change once set`}, nil},
		{"another class", classed("example.com/lb"), classed("example.com/other"), []string{`spec.loadBalancerClass: Invalid value: "example.com/other": may not change once set`}, nil},
		{"class taken away", classed("example.com/lb"), balanced, []string{`spec.loadBalancerClass: Invalid value: "": may not change once set`}, nil},
		{"class kept", classed("example.com/lb"), classed("example.com/lb"), nil, nil},
		{"class with the type", given, classed("example.com/lb"), nil, nil},
		{"external name now", given, func(s *corev1.Service) {
			given(s)
			s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "example.com"
		}, nil, func(s *corev1.Service) bool { return s.Spec.ClusterIP == "" && s.Spec.ClusterIPs == nil }},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s, old := newService(test.new), newService(test.old)
			prepareServiceUpdate(s, old)
			checktest.Faults(t, validateServiceUpdate(s, old), test.want...)
			if test.then != nil && !test.then(s) {
				t.Errorf("got %+v", s)
			}
		})
	}
}

// TestNodePortsOfLoadBalancers: one that is given no node ports keeps those that it
// named, whether an update names them or not.
func TestNodePortsOfLoadBalancers(t *testing.T) {
	old := newService(func(s *corev1.Service) {
		s.Spec.Type, s.Spec.AllocateLoadBalancerNodePorts, s.Spec.Ports[0].NodePort = corev1.ServiceTypeLoadBalancer, ptr.To(false), 30080
	})
	for _, named := range []int32{30080, 0} {
		next := old.DeepCopy()
		next.Labels, next.Spec.Ports[0].NodePort = map[string]string{"a": "b"}, named
		Service().PrepareUpdate(next, old)
		if got := next.Spec.Ports[0].NodePort; got != 30080 {
			t.Errorf("an update that names node port %d: it is %d, want 30080", named, got)
		}
	}
}

func TestServiceRow(t *testing.T) {
	tests := []struct {
		edit func(*corev1.Service)
		want string
	}{
		{func(*corev1.Service) {}, "web ClusterIP <none> <none> 80/TCP <unknown> <none>"},
		{func(s *corev1.Service) { s.Spec.ClusterIP = "None"; s.Spec.Ports = nil }, "web ClusterIP None <none> <none> <unknown> <none>"},
		{func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"192.0.2.1", "192.0.2.2"} }, "web ClusterIP <none> 192.0.2.1,192.0.2.2 80/TCP <unknown> <none>"},
		{func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeLoadBalancer }, "web LoadBalancer <none> <pending> 80/TCP <unknown> <none>"},
		{func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "example.com"
		}, "web ExternalName <none> example.com 80/TCP <unknown> <none>"},
	}
	for _, test := range tests {
		row := serviceRow(newService(test.edit), time.Now())
		if got := fmt.Sprintln(row...); got != test.want+"\n" {
			t.Errorf("got  %swant %s", got, test.want)
		}
	}
}

func TestValidateServiceStatusUpdate(t *testing.T) {
	s := newService(func(s *corev1.Service) { s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "x"}} })
	checktest.Faults(t, validateServiceStatusUpdate(s, s.DeepCopy()), "status.loadBalancer.ingress: Forbidden: may only be used when `spec.type` is \"LoadBalancer\"")
	s.Spec.Type = corev1.ServiceTypeLoadBalancer
	checktest.Faults(t, validateServiceStatusUpdate(s, s.DeepCopy())) // what it had
	checktest.Faults(t, validateServiceStatusUpdate(s, newService(func(*corev1.Service) {})), `status.loadBalancer.ingress[0].ip: Invalid value: "x": must be a valid IP address`)
}

func TestServiceIPMode(t *testing.T) {
	for _, test := range []struct {
		name    string
		ingress corev1.LoadBalancerIngress
		want    []string
	}{
		{"virtual", corev1.LoadBalancerIngress{IP: "192.0.2.1", IPMode: ptr.To(corev1.LoadBalancerIPModeVIP)}, nil},
		{"by a proxy", corev1.LoadBalancerIngress{IP: "192.0.2.1", IPMode: ptr.To(corev1.LoadBalancerIPModeProxy)}, nil},
		{"a name alone", corev1.LoadBalancerIngress{Hostname: "lb.example.com"}, nil},
		{"unknown", corev1.LoadBalancerIngress{IP: "192.0.2.1", IPMode: ptr.To(corev1.LoadBalancerIPMode("Magic"))}, []string{`status.loadBalancer.ingress[0].ipMode: Unsupported value: "Magic"`}},
		{"of a name", corev1.LoadBalancerIngress{Hostname: "lb.example.com", IPMode: ptr.To(corev1.LoadBalancerIPModeVIP)}, []string{"status.loadBalancer.ingress[0].ipMode: Forbidden: may not be specified when `ip` is not set"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			balanced := func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeLoadBalancer }
			s := newService(balanced)
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{test.ingress}
			checktest.Faults(t, validateServiceStatusUpdate(s, newService(balanced)), test.want...)
		})
	}
}
