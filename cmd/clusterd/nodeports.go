package main

import (
	"fmt"

	utilnet "k8s.io/apimachinery/pkg/util/net"
)

// checkNodePorts refuses a range of ports that Services cannot be given.
func (c *Config) checkNodePorts() error {
	const flag, example = "--service-node-port-range", "give FIRST-LAST, such as 30000-32767"
	ports, err := utilnet.ParsePortRange(c.ServiceNodePortRange)
	if err != nil || ports.Base < 1 || ports.Size < 1 {
		return fmt.Errorf("%s %q: it is no range of ports: %s", flag, c.ServiceNodePortRange, example)
	}
	for name, port := range map[string]uint16{"--port": c.Port, "--kubelet-port": c.KubeletPort, "--read-only-port": c.ReadOnlyPort} {
		if port != 0 && ports.Contains(int(port)) {
			return fmt.Errorf("%s %s: %s %d is among them, and a Service would take it from the node: %s", flag, c.ServiceNodePortRange, name, port, example)
		}
	}
	return nil
}

// nodePorts are the ports of nodes that Services are given.
func (c *Config) nodePorts() utilnet.PortRange {
	ports, _ := utilnet.ParsePortRange(c.ServiceNodePortRange) // checked by complete
	return *ports
}
