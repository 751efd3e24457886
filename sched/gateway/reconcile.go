package gateway

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/clusterd/clusterd/sched/ingress"
)

// portPrefix begins the names of the Service's ports that are listeners'. Others
// are the administrator's.
const portPrefix = "gateway-"

// firstLocal is the first port at which proxies listen for one that they may not
// or cannot have themselves. It is below those that connections go out from.
const firstLocal = 10000

// servicePorts is what the proxies' Service should have, and whether that is
// other than what it has. Each port of a listener has a port of the pods, which
// stays as long as the listener does.
func servicePorts(has []corev1.ServicePort, want []int32) (_ []corev1.ServicePort, differ bool) {
	var out []corev1.ServicePort
	there := map[int32]bool{}
	local := map[int32]bool{}
	for _, p := range ingress.PodPorts {
		local[p] = true
	}
	for _, p := range has {
		if strings.HasPrefix(p.Name, portPrefix) && !slices.Contains(want, p.Port) {
			differ = true
			continue
		}
		out = append(out, p)
		there[p.Port] = true
		local[p.TargetPort.IntVal] = true
	}
	for _, port := range want {
		if there[port] {
			continue
		}
		at := port
		if at < 1024 || local[at] {
			for at = firstLocal; local[at]; at++ {
			}
		}
		local[at] = true
		out = append(out, corev1.ServicePort{Name: fmt.Sprint(portPrefix, port), Port: port, Protocol: corev1.ProtocolTCP, TargetPort: intstr.FromInt32(at)})
		differ = true
	}
	return out, differ
}

// addresses are those of the Service, as a Gateway's status has them.
func addresses(s *corev1.Service) (out []gatewayv1.GatewayStatusAddress) {
	for _, a := range ingress.Addresses(s) {
		one := gatewayv1.GatewayStatusAddress{Type: ptr.To(gatewayv1.IPAddressType), Value: a.IP}
		if a.IP == "" {
			one = gatewayv1.GatewayStatusAddress{Type: ptr.To(gatewayv1.HostnameAddressType), Value: a.Hostname}
		}
		if len(out) < 16 { // the most that a status may have
			out = append(out, one)
		}
	}
	return out
}
