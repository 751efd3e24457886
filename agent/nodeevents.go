package agent

import (
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"

	"github.com/clusterd/clusterd/agent/runtime"
)

// nodeRef is what events of the node are about; its UID is its name by
// convention.
func nodeRef(name string) *v1.ObjectReference {
	return &v1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: name, UID: types.UID(name)}
}

// PodNetworkBlocked records an event that pods get no network, and why. It does not
// block, and has the node look at its state.
func (a *Agent) PodNetworkBlocked(reason, why string) {
	a.recorder.Event(nodeRef(a.cfg.NodeName), v1.EventTypeWarning, reason, "Pods get no network: "+why)
	a.node.Poke()
}

// RulesRepaired records an event that another program changed rules of the
// packet filter that are this program's, and that they were put right. It does
// not block.
func (a *Agent) RulesRepaired(table, what string) {
	a.recorder.Eventf(nodeRef(a.cfg.NodeName), v1.EventTypeWarning, "PacketFilterRepaired",
		"The packet filter's table %s was changed by another program and is put right: %s", table, what)
}

// tellUpgrade tells the node's readers that podmon was replaced, or why not.
func tellUpgrade(recorder record.EventRecorder, node *v1.ObjectReference, u runtime.Upgrade) {
	switch {
	case !u.Needed():
	case u.Err == nil:
		recorder.Event(node, v1.EventTypeNormal, "RuntimeUpgraded", "The container supervisor was replaced by this clusterd's; containers run on")
	default:
		recorder.Eventf(node, v1.EventTypeWarning, "RuntimeNotUpgraded", "The container supervisor of a former clusterd goes on: %v", u.Err)
	}
}
