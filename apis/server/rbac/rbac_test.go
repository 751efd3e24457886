package rbac

import (
	"slices"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"github.com/clusterd/clusterd/apis"
)

func TestAllows(t *testing.T) {
	ask := func(verb, group, resource, sub, name string) authorizer.AttributesRecord {
		return authorizer.AttributesRecord{ResourceRequest: true, Verb: verb, APIGroup: group, Resource: resource, Subresource: sub, Name: name}
	}
	path := func(verb, path string) authorizer.AttributesRecord {
		return authorizer.AttributesRecord{Verb: verb, Path: path}
	}
	for _, test := range []struct {
		name string
		rule rbacv1.PolicyRule
		asks authorizer.AttributesRecord
		want bool
	}{
		{"as written", on("core", "pods", read), ask("get", "", "pods", "", "p"), true},
		{"another verb", on("core", "pods", read), ask("delete", "", "pods", "", "p"), false},
		{"another group", on("apps", "pods", read), ask("get", "", "pods", "", "p"), false},
		{"another resource", on("core", "pods", read), ask("get", "", "secrets", "", "p"), false},
		{"a resource is not its subresources", on("core", "pods", all), ask("create", "", "pods", "exec", "p"), false},
		{"nor a subresource its resource", on("core", "pods/exec", all), ask("get", "", "pods", "", "p"), false},
		{"a subresource", on("core", "pods/exec", all), ask("create", "", "pods", "exec", "p"), true},
		{"a subresource of all", on("*", "*/scale", all), ask("update", "apps", "deployments", "scale", "d"), true},
		{"but no other", on("*", "*/scale", all), ask("update", "apps", "deployments", "status", "d"), false},
		{"nor the resource", on("*", "*/scale", all), ask("update", "apps", "deployments", "", "d"), false},
		{"all means subresources, too", on("core", "*", all), ask("create", "", "pods", "exec", "p"), true},
		{"by name", called(on("core", "pods", all), "p"), ask("get", "", "pods", "", "p"), true},
		{"another name", called(on("core", "pods", all), "p"), ask("get", "", "pods", "", "q"), false},
		{"no name where one is needed", called(on("core", "pods", all), "p"), ask("list", "", "pods", "", ""), false},
		{"path", paths("/metrics", do("get")), path("get", "/metrics"), true},
		{"path below", paths("/metrics", do("get")), path("get", "/metrics/slis"), false},
		{"paths", paths("/api/*", do("get")), path("get", "/api/v1"), true},
		{"paths, not their head", paths("/api/*", do("get")), path("get", "/api"), false},
		{"all paths", paths("*", all), path("post", "/x"), true},
		{"resources are no paths", on("*", "*", all), path("get", "/metrics"), false},
		{"paths are no resources", paths("*", all), ask("get", "", "pods", "", "p"), false},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := Allows(test.asks, &test.rule); got != test.want {
				t.Errorf("allowed: %t", got)
			}
		})
	}
}

func TestSubjectKeys(t *testing.T) {
	for _, test := range []struct {
		subject   rbacv1.Subject
		namespace string
		want      string
	}{
		{toUser("jane"), "", "User:jane"},
		{toGroup("devs"), "", "Group:devs"},
		{rbacv1.Subject{Kind: "ServiceAccount", Name: "web"}, "team", "User:system:serviceaccount:team:web"},
		{rbacv1.Subject{Kind: "ServiceAccount", Name: "web", Namespace: "other"}, "team", "User:system:serviceaccount:other:web"},
		{rbacv1.Subject{Kind: "ServiceAccount", Name: "web"}, "", ""},
		{rbacv1.Subject{Kind: "ServiceAccount", Name: "a:b", Namespace: "team"}, "", ""},
		{rbacv1.Subject{Kind: "Robot", Name: "r"}, "team", ""},
	} {
		if got := keyOf(test.subject, test.namespace); got != test.want {
			t.Errorf("%v in %q: %q, want %q", test.subject, test.namespace, got, test.want)
		}
	}
}

// TestDefaultRolesAreSound: what the server writes at its start it would also
// take from others.
func TestDefaultRolesAreSound(t *testing.T) {
	kinds := map[string]apis.Kind{}
	for _, kind := range apis.Kinds() {
		kinds[kind.GVK.Kind] = kind
	}
	check := func(kind string, obj runtime.Object, name string) {
		t.Helper()
		for _, fault := range kinds[kind].Validate(obj) {
			t.Errorf("%s %s: %v", kind, name, fault)
		}
	}
	roles := map[string]bool{}
	for _, role := range ClusterRoles() {
		if roles[role.Name] {
			t.Errorf("ClusterRole %s is there twice", role.Name)
		}
		roles[role.Name] = true
		check("ClusterRole", &role, role.Name)
	}
	for _, binding := range ClusterRoleBindings() {
		check("ClusterRoleBinding", &binding, binding.Name)
		if !roles[binding.RoleRef.Name] {
			t.Errorf("ClusterRoleBinding %s: no role %s", binding.Name, binding.RoleRef.Name)
		}
	}
}

// TestLoopsHoldNoMore: no loop is a master, and those without a name of their
// own can neither grant rights nor act as somebody else nor enter containers.
func TestLoopsHoldNoMore(t *testing.T) {
	for _, loop := range []string{"", "deployment", "scheduler", "gc", "namespace", "clusterroleaggregation", "gateway", "storagemigration"} {
		name, groups := LoopIdentity(loop)
		if name == "" {
			t.Errorf("loop %q is nobody", loop)
		}
		for _, group := range groups {
			if group == user.SystemPrivilegedGroup {
				t.Errorf("loop %q is a master", loop)
			}
		}
	}
	for _, test := range []struct {
		verb, group, resource, sub string
		want                       bool
	}{
		{"create", "apps", "replicasets", "", true},
		{"update", "apps", "deployments", "status", true},
		{"create", "", "pods", "", true},
		{"create", "", "pods", "exec", false},
		{"get", "", "pods", "exec", false},
		{"get", "", "nodes", "proxy", false},
		{"list", "example.com", "things", "", true},
		{"create", "", "pods", "binding", false},
		{"create", "", "pods", "eviction", true},                         // rebalance
		{"patch", "resource.k8s.io", "devicetaintrules", "status", true}, // devicetaint
		{"patch", "resource.k8s.io", "resourceclaims", "status", false},
		{"create", "rbac.authorization.k8s.io", "clusterrolebindings", "", false},
		{"update", "rbac.authorization.k8s.io", "clusterroles", "", false},
		{"escalate", "rbac.authorization.k8s.io", "clusterroles", "", false},
		{"impersonate", "", "users", "", false},
		{"create", "admissionregistration.k8s.io", "validatingwebhookconfigurations", "", false},
	} {
		asks := authorizer.AttributesRecord{ResourceRequest: true, Verb: test.verb, APIGroup: test.group, Resource: test.resource, Subresource: test.sub}
		got := false
		for _, rule := range managerRules() {
			got = got || Allows(asks, &rule)
		}
		if got != test.want {
			t.Errorf("%s %s/%s/%s: allowed %t", test.verb, test.group, test.resource, test.sub, got)
		}
	}
}

// TestPeopleReachWhatNamespacesHold: a kind that is added joins view and edit,
// or is named here.
func TestPeopleReachWhatNamespacesHold(t *testing.T) {
	// Upstream leaves these out: Secrets and roles would let a reader become
	// more; the rest is of controllers and drivers.
	unseen := map[string]bool{"podcertificaterequests": true, "secrets": true, "roles": true, "rolebindings": true, "leases": true, "podtemplates": true, "csistoragecapacities": true}
	// Nor may these be edited: they bound the namespace, or are made by controllers.
	kept := map[string]bool{"podcertificaterequests": true, "limitranges": true, "resourcequotas": true, "endpoints": true, "endpointslices": true, "controllerrevisions": true,
		"roles": true, "rolebindings": true, "podtemplates": true, "csistoragecapacities": true}
	rules := map[string][]rbacv1.PolicyRule{}
	for _, role := range ClusterRoles() {
		rules[role.Name] = role.Rules
	}
	may := func(role, verb string, kind apis.Kind) bool {
		return slices.ContainsFunc(rules["system:aggregate-to-"+role], func(rule rbacv1.PolicyRule) bool {
			return Allows(authorizer.AttributesRecord{ResourceRequest: true, Verb: verb, APIGroup: kind.GVK.Group, Resource: kind.Resource}, &rule)
		})
	}
	for _, kind := range apis.Kinds() {
		if !kind.Namespaced {
			continue
		}
		for _, verb := range read {
			if got, want := may("view", verb, kind), !unseen[kind.Resource]; got != want {
				t.Errorf("view may %s %s: %t, want %t", verb, kind.Resource, got, want)
			}
		}
		for _, verb := range write {
			if got, want := may("edit", verb, kind), !kept[kind.Resource]; got != want {
				t.Errorf("edit may %s %s: %t, want %t", verb, kind.Resource, got, want)
			}
		}
	}
}
