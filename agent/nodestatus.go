package agent

import (
	"context"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/node"
)

// faults are the reasons for which the node is not ready.
func (a *Agent) faults() []node.Fault {
	var out []node.Fault
	if ok, why := a.cfg.Network.Ready(); !ok {
		out = append(out, node.Fault{Reason: "NetworkNotReady", Message: "pod network is not ready: " + why})
	}
	if why := a.pods.RuntimeFault(); why != "" {
		out = append(out, node.Fault{Reason: "RuntimeNotReady", Message: "container runtime is not ready: " + why})
	}
	if a.down != nil && a.down.Down() {
		out = append(out, node.Fault{Reason: nodeShutdown, Message: "node is shutting down"})
	}
	return out
}

// nodeShutdown is the kubelet's reason of events about a machine that goes down.
const nodeShutdown = "NodeShutdown"

// shutdownChanged tells that the machine goes down, or does not after all.
func (a *Agent) shutdownChanged(message string) {
	a.recorder.Event(nodeRef(a.cfg.NodeName), v1.EventTypeNormal, nodeShutdown, message)
	a.node.Poke()
}

// conditions are those of the node besides a kubelet's.
func (a *Agent) conditions() []v1.NodeCondition {
	if a.paths == nil {
		return nil
	}
	return a.paths.conditions()
}

// nodeImages lists the images for the Node's status.
func (a *Agent) nodeImages(ctx context.Context) ([]v1.ContainerImage, error) {
	list, err := a.cfg.Images.List(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]v1.ContainerImage, 0, len(list))
	for _, i := range list {
		names := append(append([]string{}, i.RepoDigests...), i.Refs...)
		if len(names) == 0 {
			names = []string{i.ID}
		}
		out = append(out, v1.ContainerImage{Names: names, SizeBytes: i.Size})
	}
	return out, nil
}
