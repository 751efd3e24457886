package storepast

import (
	"context"
	"encoding/json"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/storage"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/clusterd/clusterd/apis/past"
	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// A right in a namespace shows nothing of another one that had the same name before,
// by whichever parameter it is asked for; a right in all namespaces does.
func TestMultiFormerNamespace(t *testing.T) {
	t.Parallel()
	members := raftstoretest.New(t, 1, nil)
	s := apiOver(t, members.Leader())
	ctx := t.Context()
	admin := s.ClientFor(t, "ann", "system:masters").CoreV1()
	const name = "shop"
	found := func() {
		t.Helper()
		members.Wait("the namespace to be made", func() bool {
			_, err := admin.Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
			return err == nil
		})
	}
	put := func(value string) *corev1.ConfigMap {
		t.Helper()
		m, err := admin.ConfigMaps(name).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Data: map[string]string{"k": value}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	found()
	theirs := put("theirs")
	if err := admin.ConfigMaps(name).Delete(ctx, "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	gone(t, admin, name)
	found()
	grants := s.ClientFor(t, "ann", "system:masters").RbacV1()
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "reader"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"configmaps", "namespaces"}, Verbs: []string{"get", "list", "watch", "deletecollection"}},
	}}
	if _, err := grants.Roles(name).Create(ctx, role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	binding := &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "eve"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role.Name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: "eve"}}}
	if _, err := grants.RoleBindings(name).Create(ctx, binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	mine := put("mine")
	token, err := storage.EncodeContinue("/configmaps/"+name+"/\x00", "/configmaps/", revisionOf(t, theirs))
	if err != nil {
		t.Fatal(err)
	}

	const all, one = "/api/v1/namespaces/" + name + "/configmaps", "/api/v1/namespaces/" + name + "/configmaps/a"
	eve, masters := s.ClientConfigFor("eve"), s.LoopbackConfig()
	members.Wait("the binding to be in force", func() bool {
		code, _, _ := ask(t, eve, one, nil)
		return code == 200
	})
	old := theirs.ResourceVersion
	exact := func(rev string) url.Values {
		return url.Values{"resourceVersion": {rev}, "resourceVersionMatch": {"Exact"}}
	}
	for path, queries := range map[string][]url.Values{
		one: {at(old)},
		all: {at(old), exact(old), {"continue": {token}}, {"limit": {"1"}, "resourceVersion": {old}}, {"watch": {"1"}, "resourceVersion": {old}, "timeoutSeconds": {"1"}}},
	} {
		for _, query := range queries {
			if code, _, body := ask(t, eve, path, query); code != 410 {
				t.Errorf("eve: %s?%s: %d %s", path, query.Encode(), code, body)
			}
			if code, _, body := ask(t, masters, path, query); code != 200 {
				t.Errorf("administrator: %s?%s: %d %s", path, query.Encode(), code, body)
			}
		}
	}
	// Deletions of many answer with what they have listed.
	for _, query := range []url.Values{
		{"dryRun": {"All"}, "resourceVersion": {old}}, {"dryRun": {"All"}, "resourceVersion": {old}, "resourceVersionMatch": {"Exact"}}, {"dryRun": {"All"}, "continue": {token}},
	} {
		if code, _, body := askBy(t, eve, "DELETE", all, query); code != 410 {
			t.Errorf("eve: DELETE %s: %d %s", query.Encode(), code, body)
		}
	}
	for _, query := range []url.Values{{"dryRun": {"All"}, "resourceVersion": {mine.ResourceVersion}}, {"dryRun": {"All"}}} {
		if code, _, body := askBy(t, eve, "DELETE", all, query); code != 200 || strings.Contains(string(body), "theirs") {
			t.Errorf("eve: DELETE of what is hers, %s: %d %s", query.Encode(), code, body)
		}
	}
	if code, _, body := ask(t, eve, all, url.Values{"resourceVersion": {old}}); code != 200 || strings.Contains(string(body), "theirs") {
		t.Errorf("eve: a list that is at least as new: %d %s", code, body)
	}
	for _, query := range []url.Values{exact(mine.ResourceVersion), at(mine.ResourceVersion)} {
		if code, _, body := ask(t, eve, all, query); code != 200 {
			t.Errorf("eve: what is hers at %s: %d %s", query.Encode(), code, body)
		}
	}
	history := func(path string, who string) (h past.History) {
		t.Helper()
		config := eve
		if who != "eve" {
			config = masters
		}
		code, _, body := ask(t, config, path, url.Values{past.HistoryParameter: {""}})
		if err := json.Unmarshal(body, &h); err != nil || code != 200 {
			t.Errorf("%s: history of %s: %d %s", who, path, code, body)
		}
		return h
	}
	if h := history(one, "eve"); len(h.Changes) != 1 || strconv.FormatInt(h.Changes[0].Revision, 10) != mine.ResourceVersion {
		t.Errorf("eve sees %+v", h.Changes)
	}
	if h := history(one, "administrator"); len(h.Changes) != 3 {
		t.Errorf("an administrator sees %+v", h.Changes)
	}
	if h := history("/api/v1/namespaces/"+name, "eve"); len(h.Changes) != 1 {
		t.Errorf("eve sees of the namespace %+v", h.Changes)
	}
}

// gone deletes a namespace, as the loop would that empties it.
func gone(t *testing.T, admin corev1client.CoreV1Interface, name string) {
	t.Helper()
	if err := admin.Namespaces().Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	ns, err := admin.Namespaces().Get(t.Context(), name, metav1.GetOptions{})
	if err == nil {
		ns.Spec.Finalizers = nil
		_, err = admin.Namespaces().Finalize(t.Context(), ns, metav1.UpdateOptions{})
	}
	if err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
}

// byName grants eve everything in one namespace, whether there is one of that name or
// not, as a webhook may; administrators everything.
type byName string

// Authorize implements authorizer.Authorizer.
func (n byName) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if slices.Contains(a.GetUser().GetGroups(), "system:masters") || a.GetUser().GetName() == "eve" && a.GetNamespace() == string(n) {
		return authorizer.DecisionAllow, "", nil
	}
	return authorizer.DecisionNoOpinion, "", nil
}

// ConditionsAwareAuthorize implements authorizer.Authorizer.
func (n byName) ConditionsAwareAuthorize(ctx context.Context, a authorizer.Attributes) authorizer.ConditionsAwareDecision {
	return authorizer.ConditionsAwareDecisionFromParts(n.Authorize(ctx, a))
}

// EvaluateConditions implements authorizer.Authorizer.
func (byName) EvaluateConditions(context.Context, authorizer.ConditionsAwareDecision, authorizer.ConditionsData) (authorizer.Decision, string, error) {
	return authorizer.DecisionDeny, "", authorizer.ErrorConditionEvaluationNotSupported
}

// Rights in a namespace that does not exist now show nothing of the last one.
func TestMultiAbsentNamespace(t *testing.T) {
	t.Parallel()
	members := raftstoretest.New(t, 1, nil)
	const name = "shop"
	s := apiOver(t, members.Leader(), func(c *server.Config) { c.Authorizer = byName(name) })
	ctx := t.Context()
	admin := s.ClientFor(t, "ann", "system:masters").CoreV1()
	var theirs *corev1.ConfigMap
	members.Wait("a namespace with something in it", func() bool {
		_, err := admin.Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		if err == nil || apierrors.IsAlreadyExists(err) {
			theirs, err = admin.ConfigMaps(name).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, metav1.CreateOptions{})
		}
		return err == nil
	})
	if err := admin.ConfigMaps(name).Delete(ctx, "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	gone(t, admin, name)
	const all, one = "/api/v1/namespaces/" + name + "/configmaps", "/api/v1/namespaces/" + name + "/configmaps/a"
	eve, old := s.ClientConfigFor("eve"), theirs.ResourceVersion
	for _, test := range []struct {
		path  string
		query url.Values
		want  int
	}{
		{one, at(old), 410}, {all, at(old), 410}, {all, url.Values{"limit": {"1"}, "resourceVersion": {old}}, 410},
		{all, url.Values{"watch": {"1"}, "resourceVersion": {old}, "timeoutSeconds": {"1"}}, 410},
		{one, url.Values{past.HistoryParameter: {""}}, 404},
	} {
		if code, _, body := ask(t, eve, test.path, test.query); code != test.want {
			t.Errorf("eve: %s?%s: %d %s, want %d", test.path, test.query.Encode(), code, body, test.want)
		}
		if code, _, body := ask(t, s.LoopbackConfig(), test.path, test.query); code != 200 {
			t.Errorf("administrator: %s?%s: %d %s", test.path, test.query.Encode(), code, body)
		}
	}
	code, _, body := ask(t, eve, "/api/v1/namespaces/"+name, url.Values{past.HistoryParameter: {""}})
	var h past.History
	if err := json.Unmarshal(body, &h); code != 200 || err != nil || len(h.Changes) != 1 || h.Changes[0].Object != nil {
		t.Errorf("eve: the namespace's own history: %d %s", code, body)
	}
	// She may list, and follow from there: a client that does so is not sent back again and again.
	code, _, body = ask(t, eve, all, nil)
	var list corev1.ConfigMapList
	if err := json.Unmarshal(body, &list); code != 200 || err != nil {
		t.Fatalf("eve: %d %s", code, body)
	}
	if _, err := admin.Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "another"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if code, _, body := ask(t, eve, all, url.Values{"watch": {"1"}, "resourceVersion": {list.ResourceVersion}, "timeoutSeconds": {"1"}}); code != 200 {
		t.Errorf("eve: a watch from now: %d %s", code, body)
	}
}
