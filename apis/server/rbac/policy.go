package rbac

import (
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/user"
)

// Labels and annotations of the roles that every cluster has.
const (
	bootstrapLabel   = "kubernetes.io/bootstrapping"
	bootstrapValue   = "rbac-defaults"
	aggregatePrefix  = "rbac.authorization.k8s.io/aggregate-to-"
	autoUpdate       = rbacv1.AutoUpdateAnnotationKey
	systemNamespace  = metav1.NamespaceSystem
	serviceAccounts  = "system:serviceaccounts"
	controllerPrefix = "system:controller:"
)

// Verbs, as one writes them in a sentence.
var (
	read      = []string{"get", "list", "watch"}
	listWatch = []string{"list", "watch"}
	write     = []string{"create", "delete", "deletecollection", "patch", "update"}
	readWrite = []string{"create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"}
	all       = []string{"*"}
)

func do(verbs ...string) []string { return verbs }

// on is a rule about resources of API groups, each list separated by spaces;
// "core" is the group without a name.
func on(groups, resources string, verbs []string) rbacv1.PolicyRule {
	rule := rbacv1.PolicyRule{Resources: strings.Fields(resources), Verbs: verbs}
	for _, group := range strings.Fields(groups) {
		if group == "core" {
			group = ""
		}
		rule.APIGroups = append(rule.APIGroups, group)
	}
	return rule
}

// called restricts a rule to objects of these names.
func called(rule rbacv1.PolicyRule, names ...string) rbacv1.PolicyRule {
	rule.ResourceNames = names
	return rule
}

// paths is a rule about URLs that are no resources.
func paths(urls string, verbs []string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{NonResourceURLs: strings.Fields(urls), Verbs: verbs}
}

var events = on("core events.k8s.io", "events", do("create", "patch", "update"))

func clusterRole(name string, rules ...rbacv1.PolicyRule) rbacv1.ClusterRole {
	return rbacv1.ClusterRole{ObjectMeta: bootstrapMeta("", name), Rules: rules}
}

func bootstrapMeta(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: namespace, Name: name,
		Labels:      map[string]string{bootstrapLabel: bootstrapValue},
		Annotations: map[string]string{autoUpdate: "true"},
	}
}

// into makes the rules of role flow into the role of that name.
func into(target string, role rbacv1.ClusterRole) rbacv1.ClusterRole {
	role.Labels[aggregatePrefix+target] = "true"
	return role
}

// sum is a role whose rules are those of the roles that flow into it.
func sum(name string) rbacv1.ClusterRole {
	role := clusterRole(name)
	role.AggregationRule = &rbacv1.AggregationRule{ClusterRoleSelectors: []metav1.LabelSelector{
		{MatchLabels: map[string]string{aggregatePrefix + name: "true"}},
	}}
	return role
}

func bind(role string, subjects ...rbacv1.Subject) rbacv1.ClusterRoleBinding {
	return rbacv1.ClusterRoleBinding{
		ObjectMeta: bootstrapMeta("", role),
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   subjects,
	}
}

func toUser(name string) rbacv1.Subject {
	return rbacv1.Subject{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: name}
}

func toGroup(name string) rbacv1.Subject {
	return rbacv1.Subject{Kind: rbacv1.GroupKind, APIGroup: rbacv1.GroupName, Name: name}
}

func toAccount(name string) rbacv1.Subject {
	return rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: systemNamespace, Name: name}
}

// NodeNetwork is the user, and the role, of the part of a node that names and
// guards pods.
const NodeNetwork = "system:node-network"

// nodeNetworkUser is the role by which a node acts as NodeNetwork. A node's own
// identity reads its own pods alone; which pods there are at all is read under
// a name that says what for, in the audit log too.
const nodeNetworkUser = "system:node-network-user"

// ClusterRoles are the roles that every cluster has.
func ClusterRoles() []rbacv1.ClusterRole {
	roles := append(userRoles(), systemRoles()...)
	for _, c := range controllers {
		if c.account != "" {
			roles = append(roles, clusterRole(controllerPrefix+c.account, c.rules...))
		}
	}
	return roles
}

// trustReader reads by whom aggregated APIs know that a request comes from a
// server of the cluster. Who runs one binds the role to its account.
const trustReader = "extension-apiserver-authentication-reader"

// Roles are the roles that every cluster has in a namespace.
func Roles() []rbacv1.Role {
	role := clusterRole(trustReader, called(on("core", "configmaps", read), "extension-apiserver-authentication"))
	role.Namespace = systemNamespace
	return []rbacv1.Role{{ObjectMeta: role.ObjectMeta, Rules: role.Rules}}
}

// ClusterRoleBindings are the bindings that every cluster has.
func ClusterRoleBindings() []rbacv1.ClusterRoleBinding {
	bindings := []rbacv1.ClusterRoleBinding{
		bind("cluster-admin", toGroup(user.SystemPrivilegedGroup)),
		bind("system:monitoring", toGroup(user.MonitoringGroup)),
		bind("system:discovery", toGroup(user.AllAuthenticated)),
		bind("system:basic-user", toGroup(user.AllAuthenticated)),
		bind("system:public-info-viewer", toGroup(user.AllAuthenticated), toGroup(user.AllUnauthenticated)),
		bind("system:service-account-issuer-discovery", toGroup(serviceAccounts)),
		bind("system:cluster-trust-bundle-discovery", toGroup(serviceAccounts)),
		bind("system:node-proxier", toUser(user.KubeProxy)),
		bind("system:kube-controller-manager", toUser(user.KubeControllerManager)),
		bind("system:kube-dns", toAccount("kube-dns")),
		bind("system:clusterd-ingress", toAccount("clusterd-ingress")),
		bind("system:kube-scheduler", toUser(user.KubeScheduler)),
		bind("system:volume-scheduler", toUser(user.KubeScheduler)),
		bind(NodeNetwork, toUser(NodeNetwork)),
		bind(nodeNetworkUser, toGroup(user.NodesGroup)),
		// Nodes have an authorizer of their own, which looks at their pods.
		bind("system:node"),
	}
	for _, c := range controllers {
		if c.account != "" {
			bindings = append(bindings, bind(controllerPrefix+c.account, toAccount(c.account)))
		}
	}
	return bindings
}
