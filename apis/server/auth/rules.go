package auth

import (
	"slices"
	"strings"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// Rule permits verbs, either on resources of API groups or on paths. "*"
// stands for any.
type Rule struct {
	Verbs     []string
	Groups    []string
	Resources []string // "pods", "pods/status", "*", "*/scale"
	Names     []string // empty: any
	// Namespace restricts the rule to one namespace; empty: everywhere.
	Namespace string
	// Paths are non-resource URLs; a trailing "*" matches any rest.
	Paths []string
}

// Grant gives rules to a user, or to everyone in a group.
type Grant struct {
	User  string
	Group string
	Rules []Rule
}

// identities of this system's own parts.
const (
	// ControllerManager is who the controllers are.
	ControllerManager = user.KubeControllerManager
	// Scheduler is who binds pods.
	Scheduler = user.KubeScheduler
	// NodeUserPrefix and the name of a node make the node's user.
	NodeUserPrefix = "system:node:"
)

var (
	read  = []string{"get", "list", "watch"}
	write = []string{"create", "update", "patch", "delete", "deletecollection"}
	any_  = []string{"*"}
	core  = []string{""}
)

// grants is who may do what, beside system:masters, who may do anything, and
// nodes (node.go). It stands where RBAC objects will stand.
var grants = []Grant{
	{
		Group: user.AllAuthenticated,
		Rules: []Rule{
			{Verbs: []string{"get"}, Paths: []string{
				"/healthz", "/healthz/*", "/livez", "/livez/*", "/readyz", "/readyz/*", "/version", "/version/",
				"/api", "/api/*", "/apis", "/apis/*", "/openapi", "/openapi/*",
			}},
			{Verbs: []string{"list"}, Groups: []string{"apiextensions.k8s.io"}, Resources: []string{"customresourcedefinitions"}},
			{Verbs: []string{"create"}, Groups: []string{"authentication.k8s.io"}, Resources: []string{"selfsubjectreviews"}},
			{Verbs: []string{"create"}, Groups: []string{"authorization.k8s.io"}, Resources: []string{"selfsubjectaccessreviews", "selfsubjectrulesreviews"}},
		},
	},
	{
		Group: user.AllUnauthenticated,
		Rules: []Rule{{Verbs: []string{"get"}, Paths: PublicPaths}},
	},
	{
		// Controllers keep every kind in order; they have no business inside
		// containers, and may not act as somebody else.
		User: ControllerManager,
		Rules: []Rule{
			{Verbs: slices.Concat(read, write), Groups: any_, Resources: any_},
			{Verbs: []string{"get", "update", "patch"}, Groups: any_, Resources: []string{"*/status", "*/scale", "*/finalize"}},
			{Verbs: []string{"create"}, Groups: core, Resources: []string{"pods/eviction", "serviceaccounts/token"}},
			{Verbs: []string{"update"}, Groups: any_, Resources: []string{"*/finalizers"}},
		},
	},
	{
		User: Scheduler,
		Rules: []Rule{
			{Verbs: read, Groups: any_, Resources: any_},
			{Verbs: []string{"create"}, Groups: core, Resources: []string{"pods/binding", "bindings"}},
			{Verbs: []string{"update", "patch"}, Groups: core, Resources: []string{"pods/status"}},
			{Verbs: []string{"delete"}, Groups: core, Resources: []string{"pods"}},
			{Verbs: []string{"create", "update", "patch"}, Groups: []string{"", "events.k8s.io"}, Resources: []string{"events"}},
			{Verbs: []string{"create", "update", "patch"}, Groups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Namespace: "kube-system"},
		},
	},
}

// rulesOf lists the rules that grants gives to u.
func rulesOf(u user.Info) []Rule {
	if u == nil {
		return nil
	}
	var rules []Rule
	for _, grant := range grants {
		if grant.User != "" && grant.User == u.GetName() || grant.Group != "" && slices.Contains(u.GetGroups(), grant.Group) {
			rules = append(rules, grant.Rules...)
		}
	}
	return rules
}

// allows reports whether r permits what a asks.
func (r Rule) allows(a authorizer.Attributes) bool {
	if !contains(r.Verbs, a.GetVerb()) {
		return false
	}
	if !a.IsResourceRequest() {
		return slices.ContainsFunc(r.Paths, func(pattern string) bool { return matchPath(pattern, a.GetPath()) })
	}
	return contains(r.Groups, a.GetAPIGroup()) &&
		r.hasResource(a.GetResource(), a.GetSubresource()) &&
		(len(r.Names) == 0 || slices.Contains(r.Names, a.GetName())) &&
		(r.Namespace == "" || r.Namespace == a.GetNamespace())
}

// hasResource: "*" is every resource but no subresource; those are powers of
// their own and have to be named.
func (r Rule) hasResource(resource, subresource string) bool {
	if subresource == "" {
		return contains(r.Resources, resource)
	}
	return slices.Contains(r.Resources, resource+"/"+subresource) || slices.Contains(r.Resources, "*/"+subresource)
}

func contains(list []string, value string) bool {
	return slices.Contains(list, "*") || slices.Contains(list, value)
}

func matchPath(pattern, path string) bool {
	if prefix, ok := strings.CutSuffix(pattern, "*"); ok {
		return strings.HasPrefix(path, prefix)
	}
	return pattern == path
}
