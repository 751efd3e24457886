package auth

import (
	"slices"

	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// Rule permits verbs on resources of API groups.
type Rule struct {
	Verbs     []string
	Groups    []string
	Resources []string // "pods", "pods/status"
	Names     []string // empty: any
	// Namespace restricts the rule to one namespace; empty: everywhere.
	Namespace string
}

// NodeUserPrefix and the name of a node make the node's user.
const NodeUserPrefix = "system:node:"

var (
	read = []string{"get", "list", "watch"}
	core = []string{""}
)

// allows reports whether r permits what a asks.
func (r Rule) allows(a authorizer.Attributes) bool {
	resource := a.GetResource()
	if a.GetSubresource() != "" {
		resource += "/" + a.GetSubresource()
	}
	return a.IsResourceRequest() &&
		slices.Contains(r.Verbs, a.GetVerb()) &&
		slices.Contains(r.Groups, a.GetAPIGroup()) &&
		slices.Contains(r.Resources, resource) &&
		(len(r.Names) == 0 || slices.Contains(r.Names, a.GetName())) &&
		(r.Namespace == "" || r.Namespace == a.GetNamespace())
}
