package scheduler

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/apis/core"
)

// hostPort is a port that a pod takes on its node.
type hostPort struct {
	ip       string // "" is every address
	protocol corev1.Protocol
	port     int32
}

func hostPorts(pod *corev1.Pod) []hostPort {
	var out []hostPort
	add := func(c *corev1.Container) {
		for _, p := range c.Ports {
			if p.HostPort <= 0 {
				continue
			}
			ip := p.HostIP
			if ip == "0.0.0.0" || ip == "::" {
				ip = ""
			}
			protocol := p.Protocol
			if protocol == "" {
				protocol = corev1.ProtocolTCP
			}
			out = append(out, hostPort{ip: ip, protocol: protocol, port: p.HostPort})
		}
	}
	for i := range pod.Spec.Containers {
		add(&pod.Spec.Containers[i])
	}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		if core.IsSidecar(c) {
			add(c)
		}
	}
	return out
}

func (a hostPort) conflicts(b hostPort) bool {
	return a.port == b.port && a.protocol == b.protocol && (a.ip == b.ip || a.ip == "" || b.ip == "")
}

// filterPorts refuses nodes on which another pod holds a wanted host port.
func filterPorts(_ *snapshot, p *podInfo) func(*nodeInfo) []string {
	if len(p.ports) == 0 {
		return nil
	}
	return func(n *nodeInfo) []string {
		for _, other := range n.pods {
			for _, have := range other.ports {
				for _, want := range p.ports {
					if want.conflicts(have) {
						return []string{"node(s) didn't have free ports for the requested pod ports"}
					}
				}
			}
		}
		return nil
	}
}
