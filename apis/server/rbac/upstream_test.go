package rbac

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/util/sets"
)

// grant is one verb on one thing: "core get pods", "path get /healthz".
type grant struct{ group, verb, resource, name string }

func (g grant) String() string {
	if g.name != "" {
		return g.group + " " + g.verb + " " + g.resource + "=" + g.name
	}
	return g.group + " " + g.verb + " " + g.resource
}

// covers reports whether who holds g may also do other.
func (g grant) covers(other grant) bool {
	is := func(a, b string) bool { return a == b || a == "*" }
	return (g.group == "path") == (other.group == "path") && is(g.group, other.group) && is(g.verb, other.verb) && is(g.resource, other.resource) && (g.name == "" || g.name == other.name)
}

// grantsOf takes rules apart.
func grantsOf(rules []rbacv1.PolicyRule) sets.Set[grant] {
	all := sets.New[grant]()
	for _, rule := range rules {
		for _, verb := range rule.Verbs {
			for _, path := range rule.NonResourceURLs {
				all.Insert(grant{"path", verb, path, ""})
			}
			for _, group := range rule.APIGroups {
				if group == "" {
					group = "core"
				}
				for _, resource := range rule.Resources {
					if len(rule.ResourceNames) == 0 {
						all.Insert(grant{group, verb, resource, ""})
					}
					for _, name := range rule.ResourceNames {
						all.Insert(grant{group, verb, resource, name})
					}
				}
			}
		}
	}
	return all
}

// readGrants reads a line "GROUP VERBS: RESOURCE[=NAME] …".
func readGrants(t *testing.T, line string) sets.Set[grant] {
	t.Helper()
	head, resources, ok := strings.Cut(line, ":")
	fields := strings.Fields(head)
	if !ok || len(fields) != 2 {
		t.Fatalf("line %q: want GROUP VERBS: RESOURCE …", line)
	}
	verbs := map[string][]string{"read": read, "write": write, "rw": readWrite, "any": all}[fields[1]]
	if verbs == nil {
		verbs = strings.Split(fields[1], ",")
	}
	out := sets.New[grant]()
	for _, verb := range verbs {
		for resource := range strings.FieldsSeq(resources) {
			resource, name, _ := strings.Cut(resource, "=")
			out.Insert(grant{fields[0], verb, resource, name})
		}
	}
	return out
}

// upstreamRole is a role as testdata/upstream.txt has it.
type upstreamRole struct {
	// listed: only its name is known, not what it permits.
	listed     bool
	into, sums string
	grants     sets.Set[grant]
}

// readUpstream reads testdata/upstream.txt: roles, and the subjects that each is bound to.
func readUpstream(t *testing.T) (map[string]*upstreamRole, map[string][]string) {
	t.Helper()
	text, err := os.ReadFile("testdata/upstream.txt")
	if err != nil {
		t.Fatal(err)
	}
	roles, bindings := map[string]*upstreamRole{}, map[string][]string{}
	var role *upstreamRole
	listed := false
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		switch {
		case len(fields) == 0:
		case line[0] == '#':
			listed = listed || strings.Contains(line, "not spelled out")
		case fields[0] == "bind":
			name, subjects, _ := strings.Cut(strings.TrimSpace(strings.TrimPrefix(line, "bind ")), ": ")
			name = strings.TrimSuffix(name, ":")
			bindings[name] = strings.Fields(subjects)
		case line[0] == ' ':
			role.grants = role.grants.Union(readGrants(t, line))
		default:
			role = &upstreamRole{listed: listed, grants: sets.New[grant]()}
			for i := 1; i+1 < len(fields); i += 2 {
				*map[string]*string{"into": &role.into, "sums": &role.sums}[fields[i]] = fields[i+1]
			}
			roles[fields[0]] = role
		}
	}
	if len(roles) < 60 || len(bindings) < 13 {
		t.Fatalf("read %d roles and %d bindings: testdata/upstream.txt is not whole", len(roles), len(bindings))
	}
	return roles, bindings
}

// absent are upstream's roles that no cluster of ours has, and why. Those of
// controllers at the end of upstream.txt are absent for one reason: loops that need
// nothing of their own share system:kube-controller-manager.
var absent = map[string]string{
	"system:heapster": "Heapster has been retired since 2018; usage is served by the server itself",
}

// differences are where a role of ours permits other things than upstream's.
var differences = map[string]struct {
	why string
	// less is what upstream's permits alone, more what ours does alone. wider:
	// ours permits all of upstream's and more that is not listed.
	less, more []string
	wider      bool
}{
	"system:kube-controller-manager": {
		why:   "upstream's controllers have an account and a role each; ours, but for those with a role above, share this one",
		wider: true,
	},
	"system:controller:horizontal-pod-autoscaler": {
		why: "the loop caches nothing of its own, and watches no metrics",
		less: []string{
			"autoscaling get: horizontalpodautoscalers", "core watch: pods", "metrics.k8s.io watch: pods",
			"custom.metrics.k8s.io watch: *", "external.metrics.k8s.io watch: *",
		},
	},
	"system:kube-scheduler": {
		why:  "upstream's has these with the gate GenericWorkload, beta and off by default; PodGroups are served here",
		more: []string{"scheduling.k8s.io read: podgroups", "scheduling.k8s.io patch,update: podgroups/status"},
	},
	"system:aggregate-to-edit": {
		why:  "PodGroups and Workloads are served, and are for whoever writes the pods",
		more: []string{"scheduling.k8s.io write: podgroups workloads"},
	},
	"system:aggregate-to-view": {
		why:  "PodGroups and Workloads are served",
		more: []string{"scheduling.k8s.io read: podgroups podgroups/status workloads"},
	},
	"system:controller:namespace-controller": {
		why:  "the loop lists what a namespace holds, and watches none of it",
		less: []string{"* watch: *"},
	},
}

// own are roles that upstream does not have.
var own = map[string]string{
	"system:aggregated-metrics-reader":     "comes with metrics-server elsewhere; usage is served by the server itself",
	"system:clusterd-ingress":              "the proxy of Ingresses and Gateways",
	"system:controller:gateway-controller": "the loop that keeps Gateways",
	NodeNetwork:                            "the part of a node that names and guards pods",
	nodeNetworkUser:                        "nodes act as that part",
}

// TestRolesAsUpstream compares the default roles with upstream's. A difference is
// mended, or written down above with its reason.
func TestRolesAsUpstream(t *testing.T) {
	upstream, bindings := readUpstream(t)
	ours := map[string]rbacv1.ClusterRole{}
	for _, role := range ClusterRoles() {
		ours[role.Name] = role
		if upstream[role.Name] == nil && own[role.Name] == "" {
			t.Errorf("%s: upstream has no such role; say in own why there is one", role.Name)
		}
	}
	for name := range own {
		if _, ok := ours[name]; !ok || upstream[name] != nil {
			t.Errorf("%s is listed as our own, which it is not", name)
		}
	}
	for name, want := range upstream {
		role, ok := ours[name]
		if !ok {
			if absent[name] == "" && !want.listed {
				t.Errorf("%s: missing; say in absent why", name)
			}
			continue
		}
		if want.listed || absent[name] != "" {
			t.Errorf("%s is there, but listed as absent: spell out what upstream's permits", name)
			continue
		}
		compareRole(t, role, want)
	}
	for name := range differences {
		if _, ok := ours[name]; !ok {
			t.Errorf("differences of %s, which does not exist", name)
		}
	}

	bound := map[string][]string{}
	for _, binding := range ClusterRoleBindings() {
		for _, s := range binding.Subjects {
			subject := s.Kind + "/" + s.Name
			if s.Namespace != "" {
				subject = s.Kind + "/" + s.Namespace + "/" + s.Name
			}
			bound[binding.RoleRef.Name] = append(bound[binding.RoleRef.Name], subject)
		}
		if _, ok := bindings[binding.RoleRef.Name]; !ok && own[binding.RoleRef.Name] == "" && !strings.HasPrefix(binding.RoleRef.Name, controllerPrefix) {
			t.Errorf("%s is bound, which upstream does not", binding.RoleRef.Name)
		}
	}
	for role, subjects := range bindings {
		slices.Sort(subjects)
		slices.Sort(bound[role])
		if !slices.Equal(subjects, bound[role]) {
			t.Errorf("%s is bound to %v, upstream's to %v", role, bound[role], subjects)
		}
	}
}

func compareRole(t *testing.T, role rbacv1.ClusterRole, want *upstreamRole) {
	t.Helper()
	have, except := grantsOf(role.Rules), differences[role.Name]
	less, more := sets.New[grant](), sets.New[grant]()
	for _, line := range except.less {
		less = less.Union(readGrants(t, line))
	}
	for _, line := range except.more {
		more = more.Union(readGrants(t, line))
	}
	missing := sets.New[grant]()
	for g := range want.grants {
		if !slices.ContainsFunc(have.UnsortedList(), func(h grant) bool { return h.covers(g) }) {
			missing.Insert(g)
		}
	}
	if diff := cmp.Diff(texts(less), texts(missing)); diff != "" {
		t.Errorf("%s: what it permits less than upstream's (-written down +found):\n%s", role.Name, diff)
	}
	if extra := have.Difference(want.grants); !except.wider {
		if diff := cmp.Diff(texts(more), texts(extra)); diff != "" {
			t.Errorf("%s: what it permits more than upstream's (-written down +found):\n%s", role.Name, diff)
		}
	}
	if into := labelled(role); into != want.into {
		t.Errorf("%s flows into %q, upstream's into %q", role.Name, into, want.into)
	}
	sums := ""
	if role.AggregationRule != nil {
		for label := range role.AggregationRule.ClusterRoleSelectors[0].MatchLabels {
			sums = strings.TrimPrefix(label, aggregatePrefix)
		}
	}
	if sums != want.sums {
		t.Errorf("%s is the sum of %q, upstream's of %q", role.Name, sums, want.sums)
	}
}

// labelled is the role that another flows into.
func labelled(role rbacv1.ClusterRole) string {
	for label, value := range role.Labels {
		if target, ok := strings.CutPrefix(label, aggregatePrefix); ok && value == "true" {
			return target
		}
	}
	return ""
}

func texts(grants sets.Set[grant]) []string {
	var all []string
	for g := range grants {
		all = append(all, g.String())
	}
	slices.Sort(all)
	return all
}

// TestNamespacedRolesAsUpstream: of upstream's roles in namespaces one is for users.
func TestNamespacedRolesAsUpstream(t *testing.T) {
	want := readGrants(t, "core read: configmaps=extension-apiserver-authentication")
	roles := Roles()
	if len(roles) != 1 || roles[0].Namespace != "kube-system" || roles[0].Name != "extension-apiserver-authentication-reader" {
		// The others are for leader election by Leases, which raft does here, and for
		// bootstrap-signer, cloud-provider and token-cleaner, whose loops have no accounts.
		t.Fatalf("roles in namespaces: %v", roles)
	}
	if diff := cmp.Diff(texts(want), texts(grantsOf(roles[0].Rules))); diff != "" {
		t.Errorf("%s (-want +got):\n%s", roles[0].Name, diff)
	}
}
