package podstate

import (
	"errors"
	"net/netip"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// ErrNetworkNotReady is wrapped by what Network.Attach returns while the node has
// no pod range yet, or its bridge cannot be made. The pod is tried again as soon as Manager.PokeAll is called.
var ErrNetworkNotReady = errors.New("network is not ready")

// HostPort is a port of the node that leads to one of a pod. It is stored by
// the network: its fields' names never change.
type HostPort struct {
	Protocol string     `json:"protocol"`        // "tcp", "udp" or "sctp"
	HostIP   netip.Addr `json:"hostIP,omitzero"` // invalid: every address of the node
	HostPort uint16     `json:"hostPort"`
	Port     uint16     `json:"port"`
}

// HostPorts are the ports of the node that a pod asks for.
func HostPorts(pod *v1.Pod) []HostPort {
	var out []HostPort
	for _, c := range AllContainers(&pod.Spec) {
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
	for _, p := range HostPorts(a) {
		for _, q := range HostPorts(b) {
			if p.Protocol == q.Protocol && p.HostPort == q.HostPort && (p.HostIP == q.HostIP || !p.HostIP.IsValid() || !q.HostIP.IsValid()) {
				return true
			}
		}
	}
	return false
}
