package server_test

import (
	"strings"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/features"
)

// soon waits until what names it holds: what a role grants counts a moment
// after it was written.
func soon(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for until := time.Now().Add(time.Minute); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("never came true: %s", what)
		}
	}
}

func grants(verbs string, resources ...string) []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: resources, Verbs: strings.Fields(verbs)}}
}

func roleMeta(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Name: name} }

// mayList reports whether client may list pods in a namespace, by doing it.
func mayList(t *testing.T, client kubernetes.Interface, namespace string) bool {
	t.Helper()
	_, err := client.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil && !apierrors.IsForbidden(err) {
		t.Fatal(err)
	}
	return err == nil
}

func TestRolesGrant(t *testing.T) {
	features.Shows(t, 58, 59)
	features.Conforms(t, 178)
	s := servertest.Start(t, nil)
	ctx, rbac := t.Context(), s.Client.RbacV1()
	must[*corev1.Namespace](t)(s.Client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: roleMeta("team")}, metav1.CreateOptions{}))
	jane, dev := s.ClientFor(t, "jane"), s.ClientFor(t, "joe", "developers")
	robot := s.ClientFor(t, "system:serviceaccount:team:robot", "system:serviceaccounts", "system:serviceaccounts:team")

	must[*rbacv1.Role](t)(rbac.Roles("team").Create(ctx, &rbacv1.Role{ObjectMeta: roleMeta("reader"), Rules: grants("get list watch", "pods")}, metav1.CreateOptions{}))
	binding := must[*rbacv1.RoleBinding](t)(rbac.RoleBindings("team").Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: roleMeta("readers"), RoleRef: rbacv1.RoleRef{Kind: "Role", Name: "reader"},
		Subjects: []rbacv1.Subject{{Kind: "User", Name: "jane"}, {Kind: "Group", Name: "developers"}, {Kind: "ServiceAccount", Name: "robot"}},
	}, metav1.CreateOptions{}))
	for name, client := range map[string]kubernetes.Interface{"user": jane, "group": dev, "service account": robot} {
		soon(t, name+" may list in the namespace", func() bool { return mayList(t, client, "team") })
		if mayList(t, client, "default") || mayList(t, client, "") {
			t.Errorf("%s: the binding reaches beyond its namespace", name)
		}
		err := client.CoreV1().Pods("team").Delete(ctx, "p", metav1.DeleteOptions{})
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), `cannot delete resource "pods" in API group "" in the namespace "team"`) {
			t.Errorf("%s: %v", name, err)
		}
	}
	review := must[*authorizationv1.SubjectAccessReview](t)(s.Client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{User: "joe", Groups: []string{"developers"}, ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: "team", Verb: "list", Resource: "pods"}},
	}, metav1.CreateOptions{}))
	if want := `RBAC: allowed by RoleBinding "readers/team" of Role "reader" to Group "developers"`; !review.Status.Allowed || review.Status.Reason != want {
		t.Errorf("%+v, want %s", review.Status, want)
	}
	rules := must[*authorizationv1.SelfSubjectRulesReview](t)(jane.AuthorizationV1().SelfSubjectRulesReviews().Create(ctx, &authorizationv1.SelfSubjectRulesReview{
		Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: "team"},
	}, metav1.CreateOptions{}))
	found := false
	for _, rule := range rules.Status.ResourceRules {
		found = found || strings.Join(rule.Resources, " ") == "pods" && strings.Join(rule.Verbs, " ") == "get list watch"
	}
	if !found || rules.Status.Incomplete {
		t.Errorf("rules of jane: %+v", rules.Status)
	}

	// A binding of a role that is not there grants nothing and says why.
	must[*rbacv1.RoleBinding](t)(rbac.RoleBindings("default").Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: roleMeta("dangling"), RoleRef: rbacv1.RoleRef{Kind: "ClusterRole", Name: "ghost"},
		Subjects: []rbacv1.Subject{{Kind: "User", Name: "jane"}},
	}, metav1.CreateOptions{}))
	soon(t, "the reason is reported", func() bool {
		_, err := jane.CoreV1().Pods("default").List(ctx, metav1.ListOptions{})
		return apierrors.IsForbidden(err) && strings.Contains(err.Error(), `clusterrole.rbac.authorization.k8s.io "ghost" not found`)
	})

	if err := rbac.RoleBindings("team").Delete(ctx, binding.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	soon(t, "without the binding jane may nothing", func() bool { return !mayList(t, jane, "team") })
}

// TestNobodyGrantsMoreThanTheyHold: the writer of roles and bindings of a
// namespace stays within what they have.
func TestNobodyGrantsMoreThanTheyHold(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx, admin := t.Context(), s.Client.RbacV1()
	subjects := []rbacv1.Subject{{Kind: "User", Name: "lead"}}
	must[*rbacv1.ClusterRole](t)(admin.ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: roleMeta("lead"), Rules: append(grants("get list", "pods"),
		rbacv1.PolicyRule{APIGroups: []string{rbacv1.GroupName}, Resources: []string{"*"}, Verbs: []string{"create", "update", "patch", "get"}},
		rbacv1.PolicyRule{APIGroups: []string{rbacv1.GroupName}, Resources: []string{"clusterroles"}, ResourceNames: []string{"view"}, Verbs: []string{"bind"}},
	)}, metav1.CreateOptions{}))
	must[*rbacv1.ClusterRoleBinding](t)(admin.ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: roleMeta("lead"), RoleRef: rbacv1.RoleRef{Kind: "ClusterRole", Name: "lead"}, Subjects: subjects}, metav1.CreateOptions{}))
	client := s.ClientFor(t, "lead")
	soon(t, "lead may list pods", func() bool { return mayList(t, client, "default") })
	own := client.RbacV1()

	role := func(name string, rules []rbacv1.PolicyRule) *rbacv1.Role {
		return &rbacv1.Role{ObjectMeta: roleMeta(name), Rules: rules}
	}
	bound := func(name, kind, to string) *rbacv1.RoleBinding {
		return &rbacv1.RoleBinding{ObjectMeta: roleMeta(name), RoleRef: rbacv1.RoleRef{Kind: kind, Name: to}, Subjects: subjects}
	}
	must[*rbacv1.Role](t)(own.Roles("default").Create(ctx, role("within", grants("get", "pods")), metav1.CreateOptions{}))
	must[*rbacv1.RoleBinding](t)(own.RoleBindings("default").Create(ctx, bound("view", "ClusterRole", "view"), metav1.CreateOptions{}))
	soon(t, "the role may be bound", func() bool {
		_, err := own.RoleBindings("default").Create(ctx, bound("within", "Role", "within"), metav1.CreateOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			t.Fatal(err)
		}
		return err == nil
	})
	const secret = "is attempting to grant RBAC permissions not currently held:\n" + `{APIGroups:[""], Resources:["secrets"], Verbs:["get"]}`
	for name, test := range map[string]struct {
		try  func() error
		want string
	}{
		"a role": {func() error {
			_, err := own.Roles("default").Create(ctx, role("beyond", grants("get", "secrets")), metav1.CreateOptions{})
			return err
		}, `user "lead" (groups=["system:authenticated"]) ` + secret},
		"an update": {func() error {
			_, err := own.Roles("default").Update(ctx, role("within", grants("get", "pods", "secrets")), metav1.UpdateOptions{})
			return err
		}, secret},
		"a patch": {func() error {
			_, err := own.Roles("default").Patch(ctx, "within", types.MergePatchType, []byte(`{"rules":[{"apiGroups":[""],"resources":["secrets"],"verbs":["get"]}]}`), metav1.PatchOptions{})
			return err
		}, secret},
		"an apply": {func() error {
			_, err := own.Roles("default").Patch(ctx, "applied", types.ApplyPatchType, []byte(`{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"Role","metadata":{"name":"applied"},"rules":[{"apiGroups":[""],"resources":["secrets"],"verbs":["get"]}]}`), metav1.PatchOptions{FieldManager: "me"})
			return err
		}, secret},
		"a cluster role": {func() error {
			_, err := own.ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: roleMeta("beyond"), Rules: grants("get", "secrets")}, metav1.CreateOptions{})
			return err
		}, secret},
		"a sum": {func() error {
			_, err := own.ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: roleMeta("sum"), AggregationRule: &rbacv1.AggregationRule{
				ClusterRoleSelectors: []metav1.LabelSelector{{MatchLabels: map[string]string{"a": "b"}}}}}, metav1.CreateOptions{})
			return err
		}, "must have cluster-admin privileges to use an aggregationRule"},
		"a binding": {func() error {
			_, err := own.RoleBindings("default").Create(ctx, bound("admin", "ClusterRole", "cluster-admin"), metav1.CreateOptions{})
			return err
		}, "attempting to grant RBAC permissions not currently held"},
		"a cluster binding": {func() error {
			_, err := own.ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{ObjectMeta: roleMeta("me"), RoleRef: rbacv1.RoleRef{Kind: "ClusterRole", Name: "cluster-admin"}, Subjects: subjects}, metav1.CreateOptions{})
			return err
		}, "attempting to grant RBAC permissions not currently held"},
	} {
		if err := test.try(); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want Forbidden: %s", name, err, test.want)
		}
	}
	if _, err := own.RoleBindings("default").Create(ctx, bound("ghost", "ClusterRole", "ghost"), metav1.CreateOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("binding of a role that is not there: %v, want NotFound", err)
	}
	// Labels may be written by a user who holds no right of it.
	if _, err := own.ClusterRoles().Patch(ctx, "cluster-admin", types.MergePatchType, []byte(`{"metadata":{"labels":{"seen":"yes"}}}`), metav1.PatchOptions{}); err != nil {
		t.Error(err)
	}
}

// TestDefaultRolesComeBack: a server restores what was taken out of the default
// roles at its start, and leaves alone what was added and what says so.
func TestDefaultRolesComeBack(t *testing.T) {
	first := servertest.Start(t, nil)
	ctx, rbac := t.Context(), first.Client.RbacV1()
	edit := func(name string, change func(*rbacv1.ClusterRole)) {
		role := must[*rbacv1.ClusterRole](t)(rbac.ClusterRoles().Get(ctx, name, metav1.GetOptions{}))
		change(role)
		must[*rbacv1.ClusterRole](t)(rbac.ClusterRoles().Update(ctx, role, metav1.UpdateOptions{}))
	}
	edit("system:discovery", func(r *rbacv1.ClusterRole) {
		r.Rules = []rbacv1.PolicyRule{{NonResourceURLs: []string{"/extra"}, Verbs: []string{"get"}}}
	})
	edit("system:basic-user", func(r *rbacv1.ClusterRole) {
		r.Rules, r.Annotations = nil, map[string]string{rbacv1.AutoUpdateAnnotationKey: "false"}
	})
	if err := rbac.ClusterRoleBindings().Delete(ctx, "system:kube-scheduler", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	second := servertest.Start(t, func(c *server.Config) { c.Storage = first.Memory.Decorator() })
	get := func(name string) *rbacv1.ClusterRole {
		return must[*rbacv1.ClusterRole](t)(second.Client.RbacV1().ClusterRoles().Get(ctx, name, metav1.GetOptions{}))
	}
	var paths []string
	for _, rule := range get("system:discovery").Rules {
		paths = append(paths, rule.NonResourceURLs...)
	}
	if all := strings.Join(paths, " "); !strings.Contains(all, "/extra") || !strings.Contains(all, "/openapi/*") {
		t.Errorf("system:discovery: %s", all)
	}
	if rules := get("system:basic-user").Rules; len(rules) != 0 {
		t.Errorf("system:basic-user was written though it said no: %v", rules)
	}
	must[*rbacv1.ClusterRoleBinding](t)(second.Client.RbacV1().ClusterRoleBindings().Get(ctx, "system:kube-scheduler", metav1.GetOptions{}))
}
