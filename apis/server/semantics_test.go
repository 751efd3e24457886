package server_test

import (
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// TestStreamsNeedCreate: who may look at everything runs no command, whether he
// asks by POST or by a WebSocket, which is a GET.
func TestStreamsNeedCreate(t *testing.T) {
	agent := newAgent(t)
	s := servertest.Start(t, func(c *server.Config) { c.NodeTransport = agent.transport })
	ctx, roles, bindings := t.Context(), s.Client.RbacV1().ClusterRoles(), s.Client.RbacV1().ClusterRoleBindings()
	createPod(t, s.Client, pod("p"), "n1")
	grant := func(name string, rules ...rbacv1.PolicyRule) {
		must[*rbacv1.ClusterRole](t)(roles.Create(ctx, &rbacv1.ClusterRole{ObjectMeta: roleMeta(name), Rules: rules}, metav1.CreateOptions{}))
		must[*rbacv1.ClusterRoleBinding](t)(bindings.Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: roleMeta(name), RoleRef: rbacv1.RoleRef{Kind: "ClusterRole", Name: name}, Subjects: []rbacv1.Subject{{Kind: "User", Name: name}},
		}, metav1.CreateOptions{}))
		soon(t, name+" may list", func() bool { return mayList(t, s.ClientFor(t, name), "default") })
	}
	read := rbacv1.PolicyRule{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"get", "list", "watch"}}
	grant("auditor", read)
	grant("operator", read, rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"pods/exec", "pods/attach", "pods/portforward"}, Verbs: []string{"create"}})

	host := s.Listen(t).Host
	ask := func(who, method, path string) (int, string) {
		config := s.CertConfig(t, strings.TrimPrefix(host, "https://"), who)
		transport, err := rest.TransportFor(config)
		if err != nil {
			t.Fatal(err)
		}
		req, err := http.NewRequestWithContext(ctx, method, config.Host+"/api/v1/namespaces/default/pods/p/"+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		for key, value := range map[string]string{
			"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
			"Sec-WebSocket-Key": "AAECAwQFBgcICQoLDA0ODw==", "Sec-WebSocket-Protocol": "v5.channel.k8s.io",
		} {
			req.Header.Set(key, value)
		}
		answer, err := transport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		if answer.StatusCode == http.StatusSwitchingProtocols {
			return answer.StatusCode, ""
		}
		body, err := io.ReadAll(answer.Body)
		if err != nil {
			t.Fatal(err)
		}
		return answer.StatusCode, string(body)
	}
	for _, path := range []string{"exec?command=id&stdout=1", "attach?stdout=1", "portforward?ports=80"} {
		what, _, _ := strings.Cut(path, "?")
		for _, method := range []string{http.MethodGet, http.MethodPost} {
			if code, body := ask("auditor", method, path); code != http.StatusForbidden || !strings.Contains(body, `cannot create resource \"pods/`+what) {
				t.Errorf("%s %s of an auditor: %d %s, want 403", method, what, code, body)
			}
		}
	}
	if code, body := ask("operator", http.MethodGet, "exec?command=id&stdout=1"); code != http.StatusSwitchingProtocols {
		t.Errorf("exec of an operator: %d %s, want 101", code, body)
	}
}

// TestPutWithoutUID: what a Service is given by an update that names no UID is its
// own, and free when it is gone.
func TestPutWithoutUID(t *testing.T) {
	s := servertest.Start(t, func(c *server.Config) { c.ServiceCIDR = "10.96.0.0/16" })
	ctx, services := t.Context(), s.Client.CoreV1().Services("default")
	byPort := func(spec *corev1.ServiceSpec) {
		spec.Type, spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, 30080
	}
	one := must[*corev1.Service](t)(services.Create(ctx, service("one", nil), metav1.CreateOptions{}))
	put := service("one", byPort)
	put.ResourceVersion = one.ResourceVersion
	must[*corev1.Service](t)(services.Update(ctx, put, metav1.UpdateOptions{}))
	if err := services.Delete(ctx, "one", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := services.Create(ctx, service("two", byPort), metav1.CreateOptions{}); err != nil {
		t.Errorf("the port of the deleted Service: %v", err)
	}
}

// TestLimitsKeepNothingThatGoes: a LimitRange that was made later does not keep the
// finalizers of a claim that is being deleted.
func TestLimitsKeepNothingThatGoes(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx, claims := t.Context(), s.Client.CoreV1().PersistentVolumeClaims("default")
	size := func(of string) corev1.ResourceList {
		return corev1.ResourceList{corev1.ResourceStorage: apiresource.MustParse(of)}
	}
	must[*corev1.PersistentVolumeClaim](t)(claims.Create(ctx, &corev1.PersistentVolumeClaim{ObjectMeta: meta("c"), Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, Resources: corev1.VolumeResourceRequirements{Requests: size("10Gi")},
	}}, metav1.CreateOptions{}))
	must[*corev1.LimitRange](t)(s.Client.CoreV1().LimitRanges("default").Create(ctx, &corev1.LimitRange{ObjectMeta: meta("l"), Spec: corev1.LimitRangeSpec{
		Limits: []corev1.LimitRangeItem{{Type: corev1.LimitTypePersistentVolumeClaim, Max: size("5Gi")}},
	}}, metav1.CreateOptions{}))
	if err := claims.Delete(ctx, "c", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	c := must[*corev1.PersistentVolumeClaim](t)(claims.Get(ctx, "c", metav1.GetOptions{}))
	if c.DeletionTimestamp == nil || len(c.Finalizers) == 0 {
		t.Fatalf("deleted at %v, finalizers %q: want it to wait for one", c.DeletionTimestamp, c.Finalizers)
	}
	c.Finalizers = nil
	if _, err := claims.Update(ctx, c, metav1.UpdateOptions{}); err != nil {
		t.Errorf("finalizers of a claim that is being deleted: %v", err)
	}
}

// TestOldKindsOrphan: Jobs and ReplicationControllers leave their pods when they
// are deleted without a propagation policy, as ever; and Jobs can be put without a
// resourceVersion.
func TestOldKindsOrphan(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx, jobs := t.Context(), s.Client.BatchV1().Jobs("default")
	template := pod("x").Spec
	template.RestartPolicy = corev1.RestartPolicyNever
	j := must[*batchv1.Job](t)(jobs.Create(ctx, &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: "j", Finalizers: []string{"example.com/hold"}},
		Spec:       batchv1.JobSpec{Template: corev1.PodTemplateSpec{Spec: template}},
	}, metav1.CreateOptions{}))
	j.ResourceVersion, j.Labels = "", map[string]string{"a": "b"}
	must[*batchv1.Job](t)(jobs.Update(ctx, j, metav1.UpdateOptions{}))
	if err := jobs.Delete(ctx, "j", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	j = must[*batchv1.Job](t)(jobs.Get(ctx, "j", metav1.GetOptions{}))
	if !slices.Contains(j.Finalizers, metav1.FinalizerOrphanDependents) {
		t.Errorf("finalizers of a Job deleted without a policy: %q, want orphan among them", j.Finalizers)
	}
}
