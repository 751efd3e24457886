package gateway

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/clusterd/clusterd/apis/gateway"
	"github.com/clusterd/clusterd/sched/ingress"
)

// portPrefix begins the names of the Service's ports that are listeners'. Others
// are the administrator's.
const portPrefix = "gateway-"

// firstLocal is the first port at which proxies listen for one that they may not
// or cannot have themselves. lastLocal is below those that connections go out from.
const firstLocal, lastLocal = 10000, 32767

// managedBy and manager are the label of Services that Gateways have to themselves.
const managedBy, manager = "app.kubernetes.io/managed-by", "clusterd-gateway"

// own reports whether a Service was made for a Gateway alone.
func own(s *corev1.Service) bool {
	return s != nil && s.Namespace == gateway.ServiceNamespace && s.Labels[managedBy] == manager
}

// todo is what is to be done with Services in front of the proxies.
type todo struct{ create, update, remove []*corev1.Service }

// plan compares the Services that there are, the shared one among them, with what
// they should have, by their names. A Service keeps its ports while its
// Gateway has none that can be served, as it has to have one; those of kept are not
// removed. Two that were given one port of the pods, as a cache lagged, are parted: the
// younger gets another.
func plan(has []*corev1.Service, wanted map[string]gateway.Service, kept map[string]bool) (out todo, _ error) {
	local := map[int32]bool{}
	for _, p := range ingress.PodPorts {
		local[p] = true
	}
	byName := map[string]*corev1.Service{}
	holder := map[int32]string{} // which Service has a port of the pods: the oldest
	slices.SortFunc(has, func(a, b *corev1.Service) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
	})
	for _, s := range has {
		byName[s.Name] = s
		for _, p := range s.Spec.Ports {
			at := p.TargetPort.IntVal
			if local[at] = true; holder[at] == "" {
				holder[at] = s.Name
			}
		}
	}
	for _, s := range has {
		want, ok := wanted[s.Name]
		switch {
		case own(s) && !ok:
			if s.DeletionTimestamp == nil && !kept[s.Name] {
				out.remove = append(out.remove, s)
			}
			continue
		case own(s) && len(want.Ports) == 0:
			continue
		}
		mine := slices.DeleteFunc(slices.Clone(s.Spec.Ports), func(p corev1.ServicePort) bool {
			return own(s) && p.TargetPort.IntVal > 0 && holder[p.TargetPort.IntVal] != s.Name
		})
		ports, differ, err := servicePorts(mine, want.Ports, local)
		if err != nil {
			return out, err
		}
		pinned := own(s) && s.Spec.LoadBalancerIP != want.Address
		if differ || pinned || len(mine) < len(s.Spec.Ports) {
			next := s.DeepCopy()
			next.Spec.Ports = ports
			if pinned {
				next.Spec.LoadBalancerIP = want.Address
			}
			out.update = append(out.update, next)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		if byName[name] != nil || name == gateway.SharedService || len(wanted[name].Ports) == 0 {
			continue
		}
		ports, _, err := servicePorts(nil, wanted[name].Ports, local)
		if err != nil {
			return out, err
		}
		s := &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: gateway.ServiceNamespace, Name: name, Labels: map[string]string{managedBy: manager}},
			Spec:       ingress.ServiceSpec(ports),
		}
		s.Spec.LoadBalancerIP = wanted[name].Address
		out.create = append(out.create, s)
	}
	return out, nil
}

// servicePorts is what a Service should have, and whether that is other than what
// it has. Each port of a listener has a port of the pods, which stays as long as the
// listener does; local are those that are taken.
func servicePorts(has []corev1.ServicePort, want []int32, local map[int32]bool) (_ []corev1.ServicePort, differ bool, _ error) {
	var out []corev1.ServicePort
	there := map[int32]bool{}
	for _, p := range has {
		if strings.HasPrefix(p.Name, portPrefix) && !slices.Contains(want, p.Port) {
			differ = true
			continue
		}
		out = append(out, p)
		there[p.Port] = true
	}
	for _, port := range want {
		if there[port] {
			continue
		}
		at := port
		if at < 1024 || local[at] {
			for at = firstLocal; local[at]; at++ {
			}
			if at > lastLocal {
				return nil, false, fmt.Errorf("port %d: the proxies have no free port from %d to %d for it; take listeners away that are not needed", port, firstLocal, lastLocal)
			}
		}
		local[at] = true
		out = append(out, corev1.ServicePort{Name: fmt.Sprint(portPrefix, port), Port: port, Protocol: corev1.ProtocolTCP, TargetPort: intstr.FromInt32(at)})
		differ = true
	}
	return out, differ, nil
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
