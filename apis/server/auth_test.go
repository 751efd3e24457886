package server_test

import (
	"net/http"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/rbac"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/features"
)

func TestWhoMayWhat(t *testing.T) {
	s := servertest.Start(t, func(c *server.Config) {
		c.RawHandlers = map[string]http.Handler{"/clusterd/v1/": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Write([]byte(`{"message":"raw"}`))
		})}
	})
	admin := s.Listen(t)
	address := strings.TrimPrefix(admin.Host, "https://")
	anonymous := rest.AnonymousClientConfig(admin)
	stranger := s.CertConfig(t, address, "jane", "developers")
	foreign := servertest.Start(t, nil).CertConfig(t, address, "admin", "system:masters")
	foreign.CAData = admin.CAData
	token := rest.AnonymousClientConfig(admin)
	token.BearerToken = "nonsense"
	password := rest.AnonymousClientConfig(admin)
	password.Username, password.Password = "admin", "secret"
	both := rest.CopyConfig(admin)
	both.BearerToken = "nonsense"
	features.Shows(t, 32, 49, 50, 53)

	for _, test := range []struct {
		name    string
		config  *rest.Config
		path    string
		code    int
		message string
	}{
		{"no credentials", anonymous, "/api/v1/pods", 401, "Unauthorized"},
		{"no credentials, discovery", anonymous, "/api", 401, "Unauthorized"},
		{"no credentials, health", anonymous, "/healthz", 200, ""},
		{"no credentials, ready", anonymous, "/readyz", 200, ""},
		{"no credentials, version", anonymous, "/version", 200, ""},
		{"no credentials, metrics", anonymous, "/metrics", 401, "Unauthorized"},
		{"certificate of another CA", foreign, "/api/v1/pods", 401, "Unauthorized"},
		{"certificate of another CA, health", foreign, "/healthz", 401, "Unauthorized"},
		{"nonsense token", token, "/api/v1/pods", 401, "Unauthorized"},
		{"nonsense token beside a certificate", both, "/api/v1/pods", 200, ""},
		{"password", password, "/api/v1/pods", 401, "Unauthorized"},
		{"no rights", stranger, "/api/v1/namespaces/default/pods", 403,
			`pods is forbidden: User "jane" cannot list resource "pods" in API group "" in the namespace "default"`},
		{"no rights, cluster", stranger, "/api/v1/nodes/n1", 403,
			`nodes "n1" is forbidden: User "jane" cannot get resource "nodes" in API group "" at the cluster scope`},
		{"no rights, path", stranger, "/metrics", 403, `forbidden: User "jane" cannot get path "/metrics"`},
		{"no rights, raw", stranger, "/clusterd/v1/members", 403, `forbidden: User "jane" cannot get path "/clusterd/v1/members"`},
		{"discovery for the authenticated", stranger, "/apis", 200, ""},
		{"openapi for the authenticated", stranger, "/openapi/v3", 200, ""},
		{"administrator", admin, "/api/v1/pods", 200, ""},
		{"administrator, raw", admin, "/clusterd/v1/members", 200, "raw"},
		{"administrator, metrics", admin, "/metrics", 200, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			code, status, _ := raw(t, test.config, "GET", test.path, "")
			if code != test.code || !strings.Contains(status.Message, test.message) {
				t.Errorf("%d %q, want %d %q", code, status.Message, test.code, test.message)
			}
			if code == http.StatusUnauthorized && status.Reason != metav1.StatusReasonUnauthorized {
				t.Errorf("reason %q", status.Reason)
			}
		})
	}
}

func TestReviews(t *testing.T) {
	s := servertest.Start(t, nil)
	config := s.CertConfig(t, strings.TrimPrefix(s.Listen(t).Host, "https://"), "jane", "developers")
	jane := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(config))

	who := must[*authenticationv1.SelfSubjectReview](t)(jane.AuthenticationV1().SelfSubjectReviews().Create(t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{}))
	if got := who.Status.UserInfo; got.Username != "jane" || strings.Join(got.Groups, ",") != "developers,system:authenticated" {
		t.Errorf("whoami: %+v", got)
	}
	ask := func(client kubernetes.Interface, verb string) bool {
		review := must[*authorizationv1.SelfSubjectAccessReview](t)(client.AuthorizationV1().SelfSubjectAccessReviews().Create(t.Context(), &authorizationv1.SelfSubjectAccessReview{
			Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: "default", Verb: verb, Resource: "pods"}},
		}, metav1.CreateOptions{}))
		return review.Status.Allowed
	}
	if ask(jane, "list") {
		t.Error("jane may list pods, want no")
	}
	if !ask(s.Client, "delete") {
		t.Error("administrator may not delete pods, want yes")
	}
	about := must[*authorizationv1.SubjectAccessReview](t)(s.Client.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{User: "system:kube-scheduler", ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: "default", Verb: "create", Resource: "pods", Subresource: "binding"}},
	}, metav1.CreateOptions{}))
	if !about.Status.Allowed {
		t.Errorf("scheduler may not bind: %+v", about.Status)
	}
	rules := must[*authorizationv1.SelfSubjectRulesReview](t)(jane.AuthorizationV1().SelfSubjectRulesReviews().Create(t.Context(), &authorizationv1.SelfSubjectRulesReview{
		Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: "default"},
	}, metav1.CreateOptions{}))
	if len(rules.Status.ResourceRules) == 0 || len(rules.Status.NonResourceRules) == 0 {
		t.Errorf("rules: %+v", rules.Status)
	}
}

func TestImpersonation(t *testing.T) {
	s := servertest.Start(t, nil)
	config := s.LoopbackConfig()
	config.Impersonate = rest.ImpersonationConfig{UserName: "jane"}
	jane := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(config))
	if _, err := jane.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("as jane: %v, want Forbidden", err)
	}
	config = s.ClientConfigFor("system:kube-controller-manager")
	config.Impersonate = rest.ImpersonationConfig{UserName: "jane"}
	client := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(config))
	if _, err := client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "impersonate") {
		t.Errorf("controller as jane: %v, want Forbidden to impersonate", err)
	}
}

// TestNode goes through what a node's agent does, and what it must not.
func TestNode(t *testing.T) {
	features.Shows(t, 60)
	s := servertest.Start(t, nil)
	node := s.ClientFor(t, "system:node:n1", "system:nodes")
	ctx := t.Context()

	mine := pod("mine")
	mine.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "used"}}}}}
	mine.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "used"}}}}
	createPod(t, s.Client, mine, "n1")
	createPod(t, s.Client, pod("theirs"), "n2")
	for _, name := range []string{"used", "other"} {
		must[*corev1.ConfigMap](t)(s.Client.CoreV1().ConfigMaps("default").Create(ctx, configMap(name, nil), metav1.CreateOptions{}))
		must[*corev1.Secret](t)(s.Client.CoreV1().Secrets("default").Create(ctx, &corev1.Secret{ObjectMeta: meta(name)}, metav1.CreateOptions{}))
	}

	pods, maps, secrets := node.CoreV1().Pods("default"), node.CoreV1().ConfigMaps("default"), node.CoreV1().Secrets("default")
	status := func(name string) error {
		p := must[*corev1.Pod](t)(s.Client.CoreV1().Pods("default").Get(ctx, name, metav1.GetOptions{}))
		p.Status.Phase = corev1.PodRunning
		_, err := pods.UpdateStatus(ctx, p, metav1.UpdateOptions{})
		return err
	}
	now := int64(0)
	cfg := rest.CopyConfig(s.ClientConfigFor("system:node:n1", "system:nodes"))
	cfg.Impersonate.UserName = rbac.NodeNetwork
	network := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(cfg))
	cfg = rest.CopyConfig(cfg)
	cfg.Impersonate.UserName = "system:node:n2"
	another := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(cfg))
	for _, test := range []struct {
		name    string
		allowed bool
		do      func() error
	}{
		{"register", true, func() error {
			_, err := node.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: meta("n1")}, metav1.CreateOptions{})
			return err
		}},
		{"register another", false, func() error {
			_, err := node.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: meta("n3")}, metav1.CreateOptions{})
			return err
		}},
		{"label itself trusted", false, func() error {
			_, err := node.CoreV1().Nodes().Patch(ctx, "n1", "application/merge-patch+json", []byte(`{"metadata":{"labels":{"node-restriction.kubernetes.io/x":"y"}}}`), metav1.PatchOptions{})
			return err
		}},
		{"take off its taints", false, func() error {
			_, err := node.CoreV1().Nodes().Patch(ctx, "n1", "application/merge-patch+json", []byte(`{"spec":{"taints":[{"key":"k","effect":"NoSchedule"}]}}`), metav1.PatchOptions{})
			return err
		}},
		{"its status", true, func() error {
			_, err := node.CoreV1().Nodes().Patch(ctx, "n1", "application/merge-patch+json", []byte(`{"status":{"nodeInfo":{"kubeletVersion":"v1"}}}`), metav1.PatchOptions{}, "status")
			return err
		}},
		{"delete itself", false, func() error { return node.CoreV1().Nodes().Delete(ctx, "n1", metav1.DeleteOptions{}) }},
		{"its lease", true, func() error {
			_, err := node.CoordinationV1().Leases("kube-node-lease").Create(ctx, &coordinationv1.Lease{ObjectMeta: meta("n1")}, metav1.CreateOptions{})
			return err
		}},
		{"another's lease", false, func() error {
			_, err := node.CoordinationV1().Leases("kube-node-lease").Create(ctx, &coordinationv1.Lease{ObjectMeta: meta("n2")}, metav1.CreateOptions{})
			return err
		}},
		{"a lease elsewhere", false, func() error {
			_, err := node.CoordinationV1().Leases("default").Create(ctx, &coordinationv1.Lease{ObjectMeta: meta("n1")}, metav1.CreateOptions{})
			return err
		}},
		{"list its pods", true, func() error {
			_, err := node.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=n1"})
			return err
		}},
		{"list all pods", false, func() error { _, err := node.CoreV1().Pods("").List(ctx, metav1.ListOptions{}); return err }},
		{"list another's pods", false, func() error {
			_, err := node.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=n2"})
			return err
		}},
		{"get its pod", true, func() error { _, err := pods.Get(ctx, "mine", metav1.GetOptions{}); return err }},
		{"get another's pod", false, func() error { _, err := pods.Get(ctx, "theirs", metav1.GetOptions{}); return err }},
		{"list all pods to guard them", true, func() error { _, err := network.CoreV1().Pods("").List(ctx, metav1.ListOptions{}); return err }},
		{"read a secret to guard pods", false, func() error {
			_, err := network.CoreV1().Secrets("default").Get(ctx, "used", metav1.GetOptions{})
			return err
		}},
		{"act as another node", false, func() error { _, err := another.CoreV1().Nodes().List(ctx, metav1.ListOptions{}); return err }},
		{"create a pod", false, func() error { _, err := pods.Create(ctx, pod("new"), metav1.CreateOptions{}); return err }},
		{"status of its pod", true, func() error { return status("mine") }},
		{"status of another's pod", false, func() error { return status("theirs") }},
		{"a config map its pod uses", true, func() error { _, err := maps.Get(ctx, "used", metav1.GetOptions{}); return err }},
		{"watch a config map its pod uses", true, func() error {
			_, err := maps.List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=used"})
			return err
		}},
		{"another config map", false, func() error { _, err := maps.Get(ctx, "other", metav1.GetOptions{}); return err }},
		{"all config maps", false, func() error { _, err := maps.List(ctx, metav1.ListOptions{}); return err }},
		{"a secret its pod uses", true, func() error { _, err := secrets.Get(ctx, "used", metav1.GetOptions{}); return err }},
		{"another secret", false, func() error { _, err := secrets.Get(ctx, "other", metav1.GetOptions{}); return err }},
		{"all secrets", false, func() error { _, err := secrets.List(ctx, metav1.ListOptions{}); return err }},
		{"write a secret", false, func() error { return secrets.Delete(ctx, "used", metav1.DeleteOptions{}) }},
		{"events", true, func() error {
			_, err := node.CoreV1().Events("default").Create(ctx, &corev1.Event{ObjectMeta: meta("e"), InvolvedObject: corev1.ObjectReference{Namespace: "default"}}, metav1.CreateOptions{})
			return err
		}},
		{"services", true, func() error { _, err := node.CoreV1().Services("").List(ctx, metav1.ListOptions{}); return err }},
		{"nodes", true, func() error { _, err := node.CoreV1().Nodes().List(ctx, metav1.ListOptions{}); return err }},
		{"delete another's pod", false, func() error { return pods.Delete(ctx, "theirs", metav1.DeleteOptions{GracePeriodSeconds: &now}) }},
		{"delete its pod", true, func() error { return pods.Delete(ctx, "mine", metav1.DeleteOptions{GracePeriodSeconds: &now}) }},
		{"deployments", false, func() error { _, err := node.AppsV1().Deployments("").List(ctx, metav1.ListOptions{}); return err }},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := test.do()
			if test.allowed && err != nil || !test.allowed && !apierrors.IsForbidden(err) {
				t.Errorf("%v, want allowed: %t", err, test.allowed)
			}
		})
	}
}
