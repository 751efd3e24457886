package chain

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// fixed is a Part that allows one user everything.
type fixed struct {
	unconditional
	name string
}

func newFixed(name string) *fixed {
	f := &fixed{name: name}
	f.z = f
	return f
}

func (f *fixed) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if a.GetUser().GetName() == f.name {
		return authorizer.DecisionAllow, "", nil
	}
	return authorizer.DecisionNoOpinion, "", nil
}

func (f *fixed) RulesFor(context.Context, user.Info, string) ([]authorizer.ResourceRuleInfo, []authorizer.NonResourceRuleInfo, bool, error) {
	return nil, nil, false, nil
}

func parts() Parts { return Parts{Node: newFixed("node"), RBAC: newFixed("rbac")} }

func write(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func decide(t *testing.T, z authorizer.UnconditionalAuthorizer, name, verb string) authorizer.Decision {
	t.Helper()
	decision, _, _ := z.Authorize(t.Context(), authorizer.AttributesRecord{
		User: &user.DefaultInfo{Name: name}, Verb: verb, Namespace: "shop", Resource: "pods", ResourceRequest: true})
	return decision
}

// oracle answers SubjectAccessReviews by the user's name: the ends of
// "may-VERB" and "never".
func oracle(t *testing.T) (kubeconfig string, asked *atomic.Int32) {
	t.Helper()
	asked = &atomic.Int32{}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		asked.Add(1)
		var review authorizationv1.SubjectAccessReview
		if err := json.NewDecoder(req.Body).Decode(&review); err != nil || review.Spec.ResourceAttributes == nil {
			http.Error(w, "no review", http.StatusBadRequest)
			return
		}
		switch name := review.Spec.User; {
		case strings.HasSuffix(name, "may-"+review.Spec.ResourceAttributes.Verb):
			review.Status.Allowed = true
		case strings.HasSuffix(name, "never"):
			review.Status.Denied = true
		case strings.HasSuffix(name, "broken"):
			http.Error(w, "out of order", http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(review)
	}))
	t.Cleanup(s.Close)
	return write(t, "kubeconfig", `
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "`+s.URL+`"}}]
users: [{name: u, user: {}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`), asked
}

func configuration(authorizers string) string {
	return "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\nauthorizers:\n" + authorizers
}

func hook(name, kubeconfig, policy, more string) string {
	return `- {type: Webhook, name: ` + name + `, webhook: {timeout: 30s, authorizedTTL: 1s, unauthorizedTTL: 1s, subjectAccessReviewVersion: v1, failurePolicy: ` + policy + `,
    matchConditionSubjectAccessReviewVersion: v1, connectionInfo: {type: KubeConfigFile, kubeConfigFile: ` + kubeconfig + `}` + more + `}}
`
}

const nodeAndRBAC = "- {type: Node, name: node}\n- {type: RBAC, name: rbac}\n"

func TestModes(t *testing.T) {
	kubeconfig, asked := oracle(t)
	policy := write(t, "abac.jsonl", `{"apiVersion":"abac.authorization.kubernetes.io/v1beta1","kind":"Policy","spec":{"user":"bob","namespace":"shop","resource":"pods","readonly":true}}`)
	c, err := New(Options{Modes: []string{Node, ABAC, RBAC, Webhook}, PolicyFile: policy, WebhookKubeconfig: kubeconfig}, parts())
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		user, verb string
		want       authorizer.Decision
		asked      int32
	}{
		{"node", "delete", authorizer.DecisionAllow, 0},
		{"rbac", "delete", authorizer.DecisionAllow, 0},
		{"bob", "list", authorizer.DecisionAllow, 0},
		{"bob", "delete", authorizer.DecisionNoOpinion, 1},
		{"may-delete", "delete", authorizer.DecisionAllow, 1},
		{"never", "delete", authorizer.DecisionDeny, 1},
		{"broken", "delete", authorizer.DecisionNoOpinion, 1},
	} {
		asked.Store(0)
		if got := decide(t, c, test.user, test.verb); got != test.want || asked.Load() != test.asked {
			t.Errorf("%s %s: %v after %d questions, want %v after %d", test.user, test.verb, got, asked.Load(), test.want, test.asked)
		}
	}
	_, _, incomplete, _ := c.RulesFor(t.Context(), &user.DefaultInfo{Name: "bob"}, "shop")
	if !incomplete {
		t.Error("the list of rules is complete though a webhook decides too")
	}
}

func TestConfigurationIsReadAgain(t *testing.T) {
	kubeconfig, asked := oracle(t)
	file := write(t, "authz.yaml", configuration(nodeAndRBAC))
	c, err := New(Options{File: file}, parts())
	if err != nil {
		t.Fatal(err)
	}
	change := func(content string) (bool, error) {
		t.Helper()
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return c.reload()
	}
	if changed, err := c.reload(); changed || err != nil {
		t.Errorf("nothing has changed: %v %v", changed, err)
	}
	// The hook's failure refuses, and it is not asked about whom the condition leaves out.
	condition := `, matchConditions: [{expression: "request.user != 'spared-never'"}]`
	if changed, err := change(configuration(hook("first", kubeconfig, "Deny", condition) + nodeAndRBAC)); !changed || err != nil {
		t.Fatalf("%v %v", changed, err)
	}
	for name, want := range map[string]authorizer.Decision{
		"never": authorizer.DecisionDeny, "broken": authorizer.DecisionDeny, "rbac": authorizer.DecisionAllow,
		"may-list": authorizer.DecisionAllow, "spared-never": authorizer.DecisionNoOpinion, "else": authorizer.DecisionNoOpinion,
	} {
		if got := decide(t, c, name, "list"); got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
	for name, content := range map[string]string{
		"RBAC is gone":   configuration("- {type: Node, name: node}\n" + hook("h", kubeconfig, "Deny", "")),
		"ABAC is new":    configuration(nodeAndRBAC + "- {type: ABAC, name: abac}\n"),
		"no yaml":        "{",
		"a bad duration": configuration(nodeAndRBAC + strings.Replace(hook("h", kubeconfig, "Deny", ""), "timeout: 30s", "timeout: 300s", 1)),
	} {
		if changed, err := change(content); changed || err == nil {
			t.Errorf("%s: taken over", name)
		}
		if changed, err := c.reload(); changed || err != nil {
			t.Errorf("%s: reported twice: %v", name, err)
		}
		if got := decide(t, c, "never", "list"); got != authorizer.DecisionDeny {
			t.Errorf("%s: the order before does not hold: %v", name, got)
		}
	}
	asked.Store(0)
	if changed, err := change(configuration(nodeAndRBAC)); !changed || err != nil {
		t.Fatalf("%v %v", changed, err)
	}
	if got := decide(t, c, "may-get", "get"); got != authorizer.DecisionNoOpinion || asked.Load() != 0 {
		t.Errorf("a hook that was removed: %v after %d questions", got, asked.Load())
	}
}

func TestWrongOptions(t *testing.T) {
	kubeconfig, _ := oracle(t)
	good := write(t, "authz.yaml", configuration(nodeAndRBAC))
	policy := write(t, "abac.jsonl", "# no policy\n")
	for want, options := range map[string]Options{
		`"AlwaysAllow"`:         {Modes: []string{Node, RBAC, "AlwaysAllow"}},
		"type RBAC":             {Modes: []string{Node}},
		"type Node":             {Modes: []string{RBAC}},
		"Duplicate":             {Modes: []string{Node, RBAC, RBAC}},
		"kubeconfig":            {Modes: []string{Node, RBAC, Webhook}},
		"among the modes":       {WebhookKubeconfig: kubeconfig},
		"needs a policy file":   {Modes: []string{Node, RBAC, ABAC}},
		"among the authorizers": {PolicyFile: policy},
		"says all":              {File: good, Modes: []string{Node, RBAC}},
		"no such file":          {File: good + ".not"},
		"is not a pod":          {File: write(t, "in.yaml", configuration(nodeAndRBAC+strings.Replace(hook("h", kubeconfig, "Deny", ""), "type: KubeConfigFile, kubeConfigFile: "+kubeconfig, "type: InClusterConfig", 1)))},
		"abac.jsonl:2":          {Modes: []string{Node, RBAC, ABAC}, PolicyFile: write(t, "abac.jsonl", "\n{\"apiVersion\":\"v9\",\"user\":\"bob\"}\n")},
		"spec.user":             {Modes: []string{Node, RBAC, ABAC}, PolicyFile: write(t, "abac2.jsonl", `{"apiVersion":"abac.authorization.kubernetes.io/v1beta1","kind":"Policy","spec":{}}`)},
	} {
		if _, err := New(options, parts()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want an error about %s", err, want)
		}
	}
}

func TestABAC(t *testing.T) {
	z, err := readABAC(write(t, "policy.jsonl", `
# comments and empty lines are nothing
{"apiVersion":"abac.authorization.kubernetes.io/v1beta1","kind":"Policy","spec":{"user":"reader","namespace":"shop","resource":"pods","readonly":true}}
{"apiVersion":"abac.authorization.kubernetes.io/v1beta1","kind":"Policy","spec":{"group":"ops","namespace":"*","resource":"*","apiGroup":"*"}}
{"apiVersion":"abac.authorization.kubernetes.io/v1beta1","kind":"Policy","spec":{"user":"both","group":"devs","namespace":"shop","resource":"pods"}}
{"apiVersion":"abac.authorization.kubernetes.io/v1beta1","kind":"Policy","spec":{"user":"*","nonResourcePath":"/docs*","readonly":true}}
{"user":"old","resource":"pods","readonly":true}
{"group":"elders"}
{"namespace":"open","resource":"events"}
`))
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name, group, verb, namespace, apiGroup, resource, path string
		want                                                   bool
	}{
		{name: "reader", verb: "list", namespace: "shop", resource: "pods", want: true},
		{name: "reader", verb: "delete", namespace: "shop", resource: "pods"},
		{name: "reader", verb: "list", namespace: "other", resource: "pods"},
		{name: "reader", verb: "list", resource: "pods"},
		{name: "reader", verb: "list", namespace: "shop", resource: "secrets"},
		{name: "reader", verb: "list", namespace: "shop", resource: "pods", apiGroup: "metrics.k8s.io"},
		{name: "anna", group: "ops", verb: "delete", apiGroup: "apps", resource: "deployments", namespace: "x", want: true},
		{name: "anna", group: "ops", verb: "post", path: "/docs/1"},
		{name: "both", group: "devs", verb: "create", namespace: "shop", resource: "pods", want: true},
		{name: "both", verb: "create", namespace: "shop", resource: "pods"},
		{name: "anybody", group: "system:authenticated", verb: "get", path: "/docs/1", want: true},
		{name: "anybody", group: "system:authenticated", verb: "get", path: "/doc"},
		{name: "system:anonymous", group: "system:unauthenticated", verb: "get", path: "/docs/1"},
		// Lines without a version.
		{name: "old", verb: "list", namespace: "any", resource: "pods", want: true},
		{name: "old", verb: "delete", namespace: "any", resource: "pods"},
		{name: "old", verb: "get", path: "/docs"},
		{name: "x", group: "elders", verb: "delete", apiGroup: "apps", resource: "deployments", namespace: "any", want: true},
		{name: "x", group: "elders", verb: "post", path: "/anything", want: true},
		{name: "anybody", group: "system:authenticated", verb: "create", namespace: "open", resource: "events", want: true},
		{name: "anybody", group: "system:authenticated", verb: "create", namespace: "shop", resource: "events"},
		{name: "system:anonymous", group: "system:unauthenticated", verb: "create", namespace: "open", resource: "events"},
	} {
		a := authorizer.AttributesRecord{User: &user.DefaultInfo{Name: test.name, Groups: []string{test.group}}, Verb: test.verb, Namespace: test.namespace,
			APIGroup: test.apiGroup, Resource: test.resource, ResourceRequest: test.path == "", Path: test.path}
		if decision, _, _ := z.Authorize(t.Context(), a); (decision == authorizer.DecisionAllow) != test.want {
			t.Errorf("%+v: %v", test, decision)
		}
	}
	resources, paths, incomplete, err := z.RulesFor(t.Context(), &user.DefaultInfo{Name: "reader", Groups: []string{user.AllAuthenticated}}, "shop")
	if len(resources) != 1 || len(paths) != 1 || incomplete || err != nil {
		t.Errorf("rules: %d resources, %d paths, incomplete %v, %v", len(resources), len(paths), incomplete, err)
	}
}
