package server_test

import (
	"bufio"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// eventsIn are the audit events in a file, but for a line that is half written.
func eventsIn(path string) []auditv1.Event {
	file, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer file.Close()
	var events []auditv1.Event
	lines := bufio.NewScanner(file)
	for lines.Buffer(nil, 8<<20); lines.Scan(); {
		var e auditv1.Event
		if json.Unmarshal(lines.Bytes(), &e) == nil {
			events = append(events, e)
		}
	}
	return events
}

func audited(t *testing.T, rules string) (policy, log string) {
	t.Helper()
	dir := t.TempDir()
	policy, log = filepath.Join(dir, "policy.yaml"), filepath.Join(dir, "audit.log")
	if err := os.WriteFile(policy, []byte("apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules:\n"+rules), 0o600); err != nil {
		t.Fatal(err)
	}
	return policy, log
}

// TestImpersonationOfAll: user, group, uid and extra at once, each with a right of
// its own; the audit log names both who asks and as whom.
func TestImpersonationOfAll(t *testing.T) {
	policy, log := audited(t, "- {level: Metadata, users: [boss]}\n")
	s := servertest.Start(t, func(c *server.Config) { c.Access.AuditPolicy, c.Access.AuditLog = policy, log })
	ctx := t.Context()
	rules := []rbacv1.PolicyRule{
		{Verbs: []string{"impersonate"}, APIGroups: []string{""}, Resources: []string{"users", "groups"}},
		{Verbs: []string{"impersonate"}, APIGroups: []string{"authentication.k8s.io"}, Resources: []string{"userextras/floor"}},
	}
	role := must[*rbacv1.ClusterRole](t)(s.Client.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: roleMeta("boss"), Rules: rules}, metav1.CreateOptions{}))
	must[*rbacv1.ClusterRoleBinding](t)(s.Client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{ObjectMeta: roleMeta("boss"),
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "boss"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "boss"}}}, metav1.CreateOptions{}))
	as := func(change func(*rest.ImpersonationConfig)) (authenticationv1.UserInfo, error) {
		config := s.ClientConfigFor("boss")
		config.Impersonate = rest.ImpersonationConfig{UserName: "jane", UID: "jane-1", Groups: []string{"devs", "ops"}, Extra: map[string][]string{"floor": {"3", "4"}}}
		if change != nil {
			change(&config.Impersonate)
		}
		client := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(config))
		review, err := client.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
		if err != nil {
			return authenticationv1.UserInfo{}, err
		}
		return review.Status.UserInfo, nil
	}
	soon(t, "the right to impersonate users", func() bool {
		_, err := as(func(c *rest.ImpersonationConfig) { c.UID = "" })
		return err == nil
	})
	if _, err := as(nil); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "uids") {
		t.Errorf("a uid without the right: %v", err)
	}
	if _, err := as(func(c *rest.ImpersonationConfig) { c.UID, c.Extra = "", map[string][]string{"wing": {"west"}} }); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "userextras") {
		t.Errorf("another extra: %v", err)
	}
	role.Rules = append(role.Rules, rbacv1.PolicyRule{Verbs: []string{"impersonate"}, APIGroups: []string{"authentication.k8s.io"}, Resources: []string{"uids"}})
	must[*rbacv1.ClusterRole](t)(s.Client.RbacV1().ClusterRoles().Update(ctx, role, metav1.UpdateOptions{}))
	var who authenticationv1.UserInfo
	soon(t, "the right to impersonate uids", func() (ok bool) {
		var err error
		who, err = as(nil)
		return err == nil
	})
	if who.Username != "jane" || who.UID != "jane-1" || !slices.Equal(who.Groups, []string{"devs", "ops", "system:authenticated"}) || !slices.Equal(who.Extra["floor"], []string{"3", "4"}) {
		t.Errorf("%+v", who)
	}
	soon(t, "the audit log names both", func() bool {
		return slices.ContainsFunc(eventsIn(log), func(e auditv1.Event) bool {
			i := e.ImpersonatedUser
			return e.User.Username == "boss" && i != nil && i.Username == "jane" && i.UID == "jane-1" && slices.Contains(i.Groups, "devs") && slices.Equal(i.Extra["floor"], []string{"3", "4"}) &&
				e.ResponseStatus != nil && e.ResponseStatus.Code == http.StatusCreated
		})
	})
}

// TestAuditBackends: bodies of requests and responses, files that are begun again
// and of which so many are kept, and a service that gets the events too.
func TestAuditBackends(t *testing.T) {
	var mu sync.Mutex
	var received []auditv1.Event
	sink := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		var list auditv1.EventList
		if err := json.NewDecoder(req.Body).Decode(&list); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		received = append(received, list.Items...)
	}))
	t.Cleanup(sink.Close)
	policy, log := audited(t, `- {level: RequestResponse, users: [writer], resources: [{group: "", resources: [configmaps]}]}
- {level: None}
`)
	kubeconfig := filepath.Join(filepath.Dir(log), "sink.kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte("apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: '"+sink.URL+"'}}]\n"+
		"users: [{name: u, user: {}}]\ncontexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := servertest.Start(t, func(c *server.Config) {
		c.Access.AuditPolicy, c.Access.AuditLog, c.Access.AuditWebhook = policy, log, kubeconfig
		c.Access.AuditMaxSize, c.Access.AuditMaxBackups = 1, 2
	})
	writer := s.ClientFor(t, "writer", "system:masters").CoreV1().ConfigMaps("default")
	made := must[*corev1.ConfigMap](t)(writer.Create(t.Context(), configMap("told", map[string]string{"k": "v"}), metav1.CreateOptions{}))
	isWhole := func(e auditv1.Event) bool {
		if e.Level != auditv1.LevelRequestResponse || e.Verb != "create" || e.ObjectRef == nil || e.ObjectRef.Name != "told" || e.RequestObject == nil || e.ResponseObject == nil {
			return false
		}
		var asked, answered corev1.ConfigMap
		return json.Unmarshal(e.RequestObject.Raw, &asked) == nil && json.Unmarshal(e.ResponseObject.Raw, &answered) == nil &&
			asked.UID == "" && asked.Data["k"] == "v" && answered.UID == made.UID && answered.Data["k"] == "v"
	}
	soon(t, "the file has request and response", func() bool { return slices.ContainsFunc(eventsIn(log), isWhole) })
	// They are sent together, half a minute after the first.
	has := func() bool {
		mu.Lock()
		defer mu.Unlock()
		return slices.ContainsFunc(received, isWhole)
	}
	for end := time.Now().Add(3 * time.Minute); !has(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the service did not get request and response")
		}
	}

	// Each of these is more than half a file.
	for _, name := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
		must[*corev1.ConfigMap](t)(writer.Create(t.Context(), configMap(name, map[string]string{"k": strings.Repeat(name, 300<<10)}), metav1.CreateOptions{}))
	}
	soon(t, "two old files are kept", func() bool {
		old, err := filepath.Glob(filepath.Join(filepath.Dir(log), "audit-*.log"))
		if err != nil {
			t.Fatal(err)
		}
		return len(old) == 2 && slices.ContainsFunc(eventsIn(log), func(e auditv1.Event) bool { return e.ObjectRef.Name == "h" })
	})
	if info := must[os.FileInfo](t)(os.Stat(log)); info.Size() > 1<<20 {
		t.Errorf("the file has %d bytes, more than a MB", info.Size())
	}
}
