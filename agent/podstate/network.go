package podstate

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/apis/quantity"
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

// The annotations that bound a pod's network, in bits a second: "10M".
const (
	AnnotationIngressBandwidth = "kubernetes.io/ingress-bandwidth"
	AnnotationEgressBandwidth  = "kubernetes.io/egress-bandwidth"
)

// Bandwidth is how much a pod may receive and send, in bits a second; 0: as much
// as it can. A pod of the host's network has no network of its own to bound.
func Bandwidth(pod *v1.Pod) (in, out uint64, err error) {
	if pod.Spec.HostNetwork {
		return 0, 0, nil
	}
	read := func(name string) (uint64, error) {
		text, ok := pod.Annotations[name]
		if !ok {
			return 0, nil
		}
		const least, most = 1_000, 1_000_000_000_000_000 // upstream's
		q, err := quantity.Parse(text)
		if err != nil || q.Value() < least || q.Value() > most {
			return 0, fmt.Errorf("annotation %s: %q: must be bits a second from 1k to 1P, like 10M", name, text)
		}
		return uint64(q.Value()), nil
	}
	if in, err = read(AnnotationIngressBandwidth); err != nil {
		return 0, 0, err
	}
	out, err = read(AnnotationEgressBandwidth)
	return in, out, err
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
