package pod

import (
	"net/netip"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// hostPorts are the ports of the node that a pod asks for.
func hostPorts(pod *v1.Pod) []HostPort {
	var out []HostPort
	for _, c := range allContainers(&pod.Spec) {
		for _, p := range c.Ports {
			if p.HostPort == 0 {
				continue
			}
			h := HostPort{Protocol: "tcp", HostPort: uint16(p.HostPort), Port: uint16(p.ContainerPort)}
			if p.Protocol != "" {
				h.Protocol = strings.ToLower(string(p.Protocol))
			}
			if ip, err := netip.ParseAddr(p.HostIP); err == nil && !ip.IsUnspecified() {
				h.HostIP = ip
			}
			out = append(out, h)
		}
	}
	return out
}

// portsClash tells whether two pods want the same port of the node. Ports of
// pods on the host's network count too: their programs listen on them.
func portsClash(a, b *v1.Pod) bool {
	for _, p := range hostPorts(a) {
		for _, q := range hostPorts(b) {
			if p.Protocol == q.Protocol && p.HostPort == q.HostPort && (p.HostIP == q.HostIP || !p.HostIP.IsValid() || !q.HostIP.IsValid()) {
				return true
			}
		}
	}
	return false
}
