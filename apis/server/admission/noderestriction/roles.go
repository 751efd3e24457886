package noderestriction

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/clusterd/clusterd/apis/server/auth"
)

const roleLabels = "node-role.kubernetes.io"

// Labels of a Node's role, as `kubectl get nodes` shows them.
const (
	ServerLabel = roleLabels + "/control-plane"
	AgentLabel  = roleLabels + "/agent"
)

// roleLabel is the label of the role that a node's credentials prove.
func roleLabel(u user.Info) (own, other string) {
	if slices.Contains(u.GetGroups(), auth.ServersGroup) {
		return ServerLabel, AgentLabel
	}
	return AgentLabel, ServerLabel
}

var _ admission.MutationInterface = &plugin{}

// Admit labels a Node with the role that its own credentials prove, whenever
// it writes the Node.
func (p *plugin) Admit(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	node, ok := auth.NodeName(a.GetUserInfo())
	obj, isNode := a.GetObject().(*corev1.Node)
	if !ok || !isNode || a.GetSubresource() != "" || obj.Name != node {
		return nil
	}
	own, other := roleLabel(a.GetUserInfo())
	if obj.Labels == nil {
		obj.Labels = map[string]string{}
	}
	obj.Labels[own] = ""
	// What it had before a promotion or demotion goes; to claim it is refused.
	if old, ok := a.GetOldObject().(*corev1.Node); ok {
		if _, had := old.Labels[other]; had {
			delete(obj.Labels, other)
		}
	}
	return nil
}

// itsRole reports whether a changed label says no more than the role that the
// node's credentials prove.
func itsRole(u user.Info, obj *corev1.Node, key string) bool {
	own, other := roleLabel(u)
	value, has := obj.Labels[key]
	return key == own && has && value == "" || key == other && !has
}
