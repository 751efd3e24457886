package pod_test

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/podstate"
)

// TestHostPorts: they lead to the pod as long as it is there, and no second
// pod of the node gets one that is taken.
func TestHostPorts(t *testing.T) {
	inBubble(t, func(n *node) {
		with := func(name string, ports ...v1.ContainerPort) *v1.Pod {
			c := ctr("app")
			c.Ports = ports
			return testPod(name, v1.RestartPolicyAlways, c)
		}
		n.create(with("web", v1.ContainerPort{ContainerPort: 80}, v1.ContainerPort{ContainerPort: 80, HostPort: 8080},
			v1.ContainerPort{ContainerPort: 53, HostPort: 5353, Protocol: v1.ProtocolUDP, HostIP: "127.0.0.1"}))
		n.after(time.Second)
		want := []podstate.HostPort{
			{Protocol: "tcp", HostPort: 8080, Port: 80},
			{Protocol: "udp", HostIP: netip.MustParseAddr("127.0.0.1"), HostPort: 5353, Port: 53},
		}
		if got := n.network.Published("uid-web"); !slices.Equal(got, want) {
			t.Errorf("published %+v, want %+v", got, want)
		}
		// Another protocol or address is another port.
		n.create(with("other", v1.ContainerPort{ContainerPort: 80, HostPort: 8080, Protocol: v1.ProtocolUDP},
			v1.ContainerPort{ContainerPort: 53, HostPort: 5353, Protocol: v1.ProtocolUDP, HostIP: "192.0.2.1"}))
		n.create(with("late", v1.ContainerPort{ContainerPort: 81, HostPort: 8080, HostIP: "192.0.2.1"}))
		n.after(time.Second)
		if p := n.get("other"); p.Status.Phase != v1.PodRunning {
			t.Errorf("other: %+v", p.Status)
		}
		if p := n.get("late"); p.Status.Phase != v1.PodFailed || p.Status.Reason != "NodePorts" {
			t.Errorf("late: %+v", p.Status)
		}
		n.delete("web", 1)
		n.after(5 * time.Second)
		if got := n.network.Published("uid-web"); len(got) > 0 {
			t.Errorf("still published: %+v", got)
		}
	})
}
