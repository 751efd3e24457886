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
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/chain"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/features"
)

// warned collects the warnings of a client's requests.
type warned struct{ said []string }

// HandleWarningHeader implements rest.WarningHandler.
func (w *warned) HandleWarningHeader(_ int, _, text string) { w.said = append(w.said, text) }

func TestPodSecurity(t *testing.T) {
	features.Shows(t, 66)
	s := servertest.Start(t, nil)
	ctx := t.Context()
	must[*corev1.Namespace](t)(s.Client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: "tight", Labels: map[string]string{"pod-security.kubernetes.io/enforce": "baseline", "pod-security.kubernetes.io/warn": "restricted"},
	}}, metav1.CreateOptions{}))
	heard := &warned{}
	config := s.LoopbackConfig()
	config.WarningHandler = heard
	client := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(config))

	privileged := pod("privileged")
	privileged.Namespace = "tight"
	privileged.Spec.HostPID = true
	privileged.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true)}
	_, err := client.CoreV1().Pods("tight").Create(ctx, privileged, metav1.CreateOptions{})
	if want := `pods "privileged" is forbidden: violates PodSecurity "baseline:latest": host namespaces (hostPID=true), privileged`; !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	heard.said = nil
	plain := pod("plain")
	plain.Namespace = "tight"
	must[*corev1.Pod](t)(client.CoreV1().Pods("tight").Create(ctx, plain, metav1.CreateOptions{}))
	if all := strings.Join(heard.said, "\n"); !strings.Contains(all, `would violate PodSecurity "restricted:latest": allowPrivilegeEscalation != false`) {
		t.Errorf("warnings: %q", all)
	}
	// A label that would refuse what runs says so.
	heard.said = nil
	must[*corev1.Namespace](t)(client.CoreV1().Namespaces().Patch(ctx, "tight", types.MergePatchType, []byte(`{"metadata":{"labels":{"pod-security.kubernetes.io/enforce":"restricted"}}}`), metav1.PatchOptions{}))
	if all := strings.Join(heard.said, "\n"); !strings.Contains(all, `existing pods in namespace "tight" violate the new PodSecurity enforce level "restricted:latest"`) {
		t.Errorf("warnings about running pods: %q", all)
	}
	if _, err := client.CoreV1().Namespaces().Patch(ctx, "tight", types.MergePatchType, []byte(`{"metadata":{"labels":{"pod-security.kubernetes.io/enforce":"tightest"}}}`), metav1.PatchOptions{}); err == nil {
		t.Error("a level that does not exist was taken")
	}
}

func TestLimitRanges(t *testing.T) {
	features.Shows(t, 69)
	s := servertest.Start(t, nil)
	ctx := t.Context()
	list := func(pairs ...string) corev1.ResourceList {
		l := corev1.ResourceList{}
		for i := 0; i < len(pairs); i += 2 {
			l[corev1.ResourceName(pairs[i])] = apiresource.MustParse(pairs[i+1])
		}
		return l
	}
	must[*corev1.LimitRange](t)(s.Client.CoreV1().LimitRanges("default").Create(ctx, &corev1.LimitRange{ObjectMeta: roleMeta("bounds"), Spec: corev1.LimitRangeSpec{Limits: []corev1.LimitRangeItem{
		{Type: corev1.LimitTypeContainer, Min: list("cpu", "50m"), Max: list("cpu", "1"), Default: list("cpu", "300m", "memory", "200Mi"), DefaultRequest: list("cpu", "100m", "memory", "100Mi"), MaxLimitRequestRatio: list("memory", "4")},
		{Type: corev1.LimitTypePod, Max: list("cpu", "2")},
	}}}, metav1.CreateOptions{}))
	with := func(name string, requests, limits corev1.ResourceList, times int) *corev1.Pod {
		p := pod(name)
		p.Spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: requests, Limits: limits}
		for len(p.Spec.Containers) < times {
			c := p.Spec.Containers[0].DeepCopy()
			c.Name += "x" + strings.Repeat("x", len(p.Spec.Containers))
			p.Spec.Containers = append(p.Spec.Containers, *c)
		}
		return p
	}
	bare := createPod(t, s.Client, with("bare", nil, nil, 1), "")
	got := bare.Spec.Containers[0].Resources
	name := bare.Spec.Containers[0].Name
	if said, want := bare.Annotations["kubernetes.io/limit-ranger"], "LimitRanger plugin set: cpu, memory request for container "+name+"; cpu, memory limit for container "+name; said != want {
		t.Errorf("the annotation says %q, want %q", said, want)
	}
	if got.Requests.Cpu().String() != "100m" || got.Requests.Memory().String() != "100Mi" || got.Limits.Cpu().String() != "300m" || got.Limits.Memory().String() != "200Mi" {
		t.Errorf("defaults: %v", got)
	}
	for want, p := range map[string]*corev1.Pod{
		"maximum cpu usage per Container is 1, but limit is 2":                                  with("big", nil, list("cpu", "2"), 1),
		"minimum cpu usage per Container is 50m, but request is 10m":                            with("small", list("cpu", "10m"), nil, 1),
		"memory max limit to request ratio per Container is 4, but provided ratio is 10.000000": with("steep", list("memory", "100Mi"), list("memory", "1000Mi"), 1),
		"maximum cpu usage per Pod is 2, but limit is 3":                                        with("many", nil, list("cpu", "1"), 3),
	} {
		if _, err := s.Client.CoreV1().Pods("default").Create(ctx, p, metav1.CreateOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want Forbidden: %s", err, want)
		}
	}
}

// accessHook serves an authorizer and returns its address: bob may create
// ConfigMaps and must not delete them.
func accessHook(t *testing.T) string {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		var review authorizationv1.SubjectAccessReview
		if err := json.NewDecoder(req.Body).Decode(&review); err != nil {
			http.Error(w, "no review", http.StatusBadRequest)
			return
		}
		if a := review.Spec.ResourceAttributes; a != nil && review.Spec.User == "bob" && a.Resource == "configmaps" {
			switch a.Verb {
			case "create":
				review.Status.Allowed = true
			case "delete":
				review.Status = authorizationv1.SubjectAccessReviewStatus{Denied: true, Reason: "bob keeps what he made"}
			}
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(review)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// TestAccessFiles: tokens from a file, and what is written down about who used
// them.
func TestAccessFiles(t *testing.T) {
	features.Shows(t, 51, 52, 55, 56, 57, 74)
	dir := t.TempDir()
	write := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	log := filepath.Join(dir, "audit.log")
	s := servertest.Start(t, func(c *server.Config) {
		c.Access = server.Access{
			TokenFile: write("tokens.csv", "s3cr3t,jane,uid-1,\"devs,ops\"\nb0b,bob,uid-2\n"),
			Authorization: chain.Options{
				Modes:      []string{chain.Node, chain.RBAC, chain.ABAC, chain.Webhook},
				PolicyFile: write("abac.jsonl", `{"apiVersion":"abac.authorization.kubernetes.io/v1beta1","kind":"Policy","spec":{"user":"bob","namespace":"*","resource":"pods","readonly":true}}`),
				WebhookKubeconfig: write("authz.kubeconfig", "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: '"+accessHook(t)+"'}}]\n"+
					"users: [{name: u, user: {}}]\ncontexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n"),
			},
			AuditPolicy: write("policy.yaml", `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: None, userGroups: ["system:masters"]}
- {level: Request, resources: [{group: "", resources: [configmaps]}]}
- {level: Metadata}
`),
			AuditLog: log,
		}
	})
	ctx, admin := t.Context(), s.Listen(t)
	jane := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(bearer(admin, "s3cr3t")))
	who := must[*authenticationv1.SelfSubjectReview](t)(jane.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})).Status.UserInfo
	if who.Username != "jane" || who.UID != "uid-1" || strings.Join(who.Groups, ",") != "devs,ops,system:authenticated" {
		t.Errorf("%+v", who)
	}
	if code, _, _ := raw(t, bearer(admin, "s3cr3"), "GET", "/api", ""); code != http.StatusUnauthorized {
		t.Errorf("another token: %d", code)
	}
	bob := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(bearer(admin, "b0b")))
	if _, err := bob.CoreV1().Pods("default").List(ctx, metav1.ListOptions{}); err != nil {
		t.Errorf("what the ABAC policy permits: %v", err)
	}
	if err := bob.CoreV1().Pods("default").Delete(ctx, "p", metav1.DeleteOptions{}); !apierrors.IsForbidden(err) ||
		!strings.Contains(err.Error(), `User "bob" cannot delete resource "pods"`) {
		t.Errorf("what it does not permit: %v", err)
	}
	if _, err := bob.CoreV1().ConfigMaps("default").Create(ctx, configMap("asked", nil), metav1.CreateOptions{}); err != nil {
		t.Errorf("what the webhook permits: %v", err)
	}
	if err := bob.CoreV1().ConfigMaps("default").Delete(ctx, "asked", metav1.DeleteOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "bob keeps what he made") {
		t.Errorf("what the webhook refuses: %v", err)
	}
	about := must[*authorizationv1.SelfSubjectAccessReview](t)(bob.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, &authorizationv1.SelfSubjectAccessReview{
		Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: "default", Verb: "delete", Resource: "configmaps"}},
	}, metav1.CreateOptions{})).Status
	if about.Allowed || !about.Denied || about.Reason != "bob keeps what he made" {
		t.Errorf("can-i: %+v", about)
	}
	rules := must[*authorizationv1.SelfSubjectRulesReview](t)(bob.AuthorizationV1().SelfSubjectRulesReviews().Create(ctx, &authorizationv1.SelfSubjectRulesReview{
		Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: "default"},
	}, metav1.CreateOptions{})).Status
	if !rules.Incomplete || !slices.ContainsFunc(rules.ResourceRules, func(r authorizationv1.ResourceRule) bool { return slices.Equal(r.Resources, []string{"pods"}) }) {
		t.Errorf("can-i --list: %+v", rules)
	}
	password := rest.AnonymousClientConfig(admin)
	password.Username, password.Password = "jane", "s3cr3t"
	if code, _, _ := raw(t, password, "GET", "/api", ""); code != http.StatusUnauthorized {
		t.Errorf("the token as a password: %d", code)
	}
	_, err := jane.CoreV1().ConfigMaps("default").Create(ctx, configMap("written", nil), metav1.CreateOptions{})
	if !apierrors.IsForbidden(err) {
		t.Fatal(err)
	}
	type event struct {
		Level, Verb  string
		User         struct{ Username string }
		ObjectRef    struct{ Resource, Name string }
		Response     struct{ Code int } `json:"responseStatus"`
		RequestBody  json.RawMessage    `json:"requestObject"`
		StageAtWhich string             `json:"stage"`
	}
	soon(t, "the audit log tells of it", func() bool {
		file, err := os.Open(log)
		if err != nil {
			return false
		}
		defer file.Close()
		for lines := bufio.NewScanner(file); lines.Scan(); {
			var e event
			if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
				continue // the last line may be half written
			}
			if e.User.Username == "system:apiserver" || strings.Contains(lines.Text(), "s3cr3t") {
				t.Fatalf("this was not to be written down: %s", lines.Text())
			}
			if e.User.Username == "jane" && e.Verb == "create" && e.ObjectRef.Resource == "configmaps" && e.Response.Code == http.StatusForbidden && e.Level == "Request" {
				return true
			}
		}
		return false
	})
	for name, access := range map[string]server.Access{
		"roles left out":         {Authorization: chain.Options{Modes: []string{chain.Node, chain.ABAC}}},
		"no such token file":     {TokenFile: filepath.Join(dir, "none")},
		"a log without a policy": {AuditLog: log},
		"no policy":              {AuditPolicy: write("empty.yaml", "apiVersion: audit.k8s.io/v1\nkind: Policy\n"), AuditLog: log},
		"no authentication":      {Authentication: write("authn.yaml", "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\njwt: [{issuer: {url: 'http://plain'}}]\n")},
	} {
		if _, err := server.New(server.Config{Storage: servertest.NewMemory().Decorator(), Access: access}); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
}
