package agent

import (
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"

	"github.com/clusterd/clusterd/agent/runtime"
)

// EventSource is what a node's events name as their source: Kubernetes' name for the
// agent of a node, by which tools select them.
const EventSource = "kubelet"

// eventSink writes events. The recorder of client-go gives an event up when the server
// refuses it; here it tries again where the refusal is of the moment: a server
// that has just begun may lack the namespace of the node's events, or the node's
// rights.
type eventSink struct{ record.EventSink }

// Create implements record.EventSink.
func (s eventSink) Create(e *v1.Event) (*v1.Event, error) {
	made, err := s.EventSink.Create(e)
	early := e.Namespace == metav1.NamespaceDefault && (apierrors.IsNotFound(err) || apierrors.IsForbidden(err))
	if early || apierrors.IsServiceUnavailable(err) || apierrors.IsTooManyRequests(err) || apierrors.IsServerTimeout(err) {
		return made, fmt.Errorf("write the event: %w", err) // not a Status: that is what the recorder goes by
	}
	return made, err
}

// nodeRef is what events of the node are about; its UID is its name by
// convention.
func nodeRef(name string) *v1.ObjectReference {
	return &v1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: name, UID: types.UID(name)}
}

// PodNetworkBlocked records an event that pods get no network, and why. It does not
// block, and has the node look at its state.
func (a *Agent) PodNetworkBlocked(reason, why string) {
	a.recorder.Event(nodeRef(a.cfg.NodeName), v1.EventTypeWarning, reason, "Pod network unavailable: "+why)
	a.node.Poke()
}

// Fresh is as node.Node says it.
func (a *Agent) Fresh() uint64 { return a.node.Fresh() }

// RulesRepaired records an event that another program changed rules of the
// packet filter that are this program's, and that they were put right. It does
// not block.
func (a *Agent) RulesRepaired(table, what string) {
	a.recorder.Eventf(nodeRef(a.cfg.NodeName), v1.EventTypeWarning, "PacketFilterRepaired",
		"The packet filter's table %s was changed by another program and is put right: %s", table, what)
}

// mostNames is how many policies an event names.
const mostNames = 10

// PoliciesFault records an event that the rules of network policies could not be put
// into force, with the names of those that changed, or with a nil error that they are
// again. It does not block.
func (a *Agent) PoliciesFault(changed []string, err error) {
	eventtype, reason, message := policiesEvent(changed, err)
	a.recorder.Event(nodeRef(a.cfg.NodeName), eventtype, reason, message)
}

func policiesEvent(changed []string, err error) (eventtype, reason, message string) {
	if err == nil {
		return v1.EventTypeNormal, "NetworkPoliciesInForce", "All network policies are in force on this node again"
	}
	what := "what they select changed"
	if n := len(changed); n > mostNames {
		what = fmt.Sprintf("changed were %s and %d more", strings.Join(changed[:mostNames], ", "), n-mostNames)
	} else if n > 0 {
		what = "changed were " + strings.Join(changed, ", ")
	}
	return v1.EventTypeWarning, "NetworkPoliciesNotInForce", fmt.Sprintf("Network policies are not enforced as they say on this node (changed: %s); it is tried again: %v", what, err)
}

// emitUpgradeEvent tells the node's readers that podmon was replaced, or why not.
func emitUpgradeEvent(recorder record.EventRecorder, node *v1.ObjectReference, u runtime.Upgrade) {
	switch {
	case !u.Needed():
	case u.Err == nil:
		recorder.Event(node, v1.EventTypeNormal, "RuntimeUpgraded", "The container supervisor was replaced by this clusterd's; containers run on")
	default:
		recorder.Eventf(node, v1.EventTypeWarning, "RuntimeNotUpgraded", "The container supervisor of a former clusterd goes on: %v", u.Err)
	}
}
