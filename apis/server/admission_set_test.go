package server_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/admission"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/features"
)

// TestAdmissionSet: plugins that are off by default, one that was turned off,
// and what a file says of some of them.
func TestAdmissionSet(t *testing.T) {
	features.Shows(t, 65)
	file := filepath.Join(t.TempDir(), "admission.yaml")
	if err := os.WriteFile(file, []byte(`
apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
- name: PodSecurity
  configuration: {apiVersion: pod-security.admission.config.k8s.io/v1, kind: PodSecurityConfiguration, defaults: {enforce: baseline}, exemptions: {namespaces: [exempt]}}
- name: EventRateLimit
  configuration: {apiVersion: eventratelimit.admission.k8s.io/v1alpha1, kind: Configuration, limits: [{type: Namespace, qps: 1, burst: 3}]}
- name: PodNodeSelector
  configuration: {podNodeSelectorPluginConfig: {clusterDefaultNodeSelector: "pool=shared", bounded: "env=prod"}}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	s := servertest.Start(t, func(c *server.Config) {
		c.Admission = admission.Set{File: file, Disable: []string{"DefaultTolerationSeconds"},
			Enable: []string{"NamespaceAutoProvision", "NamespaceExists", "AlwaysPullImages", "PodNodeSelector", "EventRateLimit", "OwnerReferencesPermissionEnforcement"}}
	})
	ctx := t.Context()
	namespace := func(name, selector string) {
		n := &corev1.Namespace{ObjectMeta: meta(name)}
		if selector != "" {
			n.Annotations = map[string]string{"scheduler.alpha.kubernetes.io/node-selector": selector}
		}
		must[*corev1.Namespace](t)(s.Client.CoreV1().Namespaces().Create(ctx, n, metav1.CreateOptions{}))
	}
	forbidden := func(what, why string, err error) {
		t.Helper()
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), why) {
			t.Errorf("%s: %v, want Forbidden: %s", what, err, why)
		}
	}

	// A namespace that does not exist is made; an update in none is refused.
	p := pod("p")
	p.Spec.Containers[0].ImagePullPolicy = corev1.PullIfNotPresent
	p = must[*corev1.Pod](t)(s.Client.CoreV1().Pods("made").Create(ctx, p, metav1.CreateOptions{}))
	must[*corev1.Namespace](t)(s.Client.CoreV1().Namespaces().Get(ctx, "made", metav1.GetOptions{}))
	if err := s.Client.CoreV1().Pods("none").Delete(ctx, "p", metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("delete in a namespace that is not there: %v", err)
	}
	if _, err := s.Client.CoreV1().Pods("dry").Create(ctx, pod("p"), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}); !apierrors.IsNotFound(err) {
		t.Errorf("dry run in a namespace that is not there: %v", err)
	}
	if p.Spec.Containers[0].ImagePullPolicy != corev1.PullAlways {
		t.Errorf("AlwaysPullImages: %s", p.Spec.Containers[0].ImagePullPolicy)
	}
	if len(p.Spec.Tolerations) != 0 {
		t.Errorf("DefaultTolerationSeconds is off, yet %v", p.Spec.Tolerations)
	}
	if len(p.Spec.NodeSelector) != 1 || p.Spec.NodeSelector["pool"] != "shared" {
		t.Errorf("PodNodeSelector, the cluster's default: %v", p.Spec.NodeSelector)
	}
	p.Labels["changed"] = "yes"
	must[*corev1.Pod](t)(s.Client.CoreV1().Pods("made").Update(ctx, p, metav1.UpdateOptions{}))

	// Selectors of namespaces.
	namespace("own", "disk=ssd")
	namespace("bounded", "")
	namespace("wrong", "a in (b)")
	if p := must[*corev1.Pod](t)(s.Client.CoreV1().Pods("own").Create(ctx, pod("p"), metav1.CreateOptions{})); p.Spec.NodeSelector["disk"] != "ssd" || p.Spec.NodeSelector["pool"] != "" {
		t.Errorf("PodNodeSelector, the annotation: %v", p.Spec.NodeSelector)
	}
	clash := pod("clash")
	clash.Spec.NodeSelector = map[string]string{"disk": "hdd"}
	_, err := s.Client.CoreV1().Pods("own").Create(ctx, clash, metav1.CreateOptions{})
	forbidden("a selector against the namespace's", "conflicts with its namespace node label selector", err)
	_, err = s.Client.CoreV1().Pods("bounded").Create(ctx, pod("p"), metav1.CreateOptions{})
	forbidden("a selector out of bounds", "namespace whitelist", err)
	_, err = s.Client.CoreV1().Pods("wrong").Create(ctx, pod("p"), metav1.CreateOptions{})
	forbidden("an annotation that is no selector", "a in (b)", err)

	// The file's default holds where no label says otherwise, exemptions aside.
	privileged := pod("privileged")
	privileged.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true)}
	_, err = s.Client.CoreV1().Pods("made").Create(ctx, privileged, metav1.CreateOptions{})
	forbidden("a privileged pod", `violates PodSecurity "baseline`, err)
	namespace("exempt", "")
	must[*corev1.Pod](t)(s.Client.CoreV1().Pods("exempt").Create(ctx, privileged, metav1.CreateOptions{}))

	// A new node waits to be seen ready.
	node := must[*corev1.Node](t)(s.Client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: meta("n1")}, metav1.CreateOptions{}))
	if len(node.Spec.Taints) != 1 || node.Spec.Taints[0].Key != corev1.TaintNodeNotReady || node.Spec.Taints[0].Effect != corev1.TaintEffectNoSchedule {
		t.Errorf("TaintNodesByCondition: %v", node.Spec.Taints)
	}

	// Of a hundred Events at one a second, some are too many.
	refused := 0
	for i := range 100 {
		_, err := s.Client.CoreV1().Events("made").Create(ctx, &corev1.Event{ObjectMeta: meta("e" + strconv.Itoa(i)), InvolvedObject: corev1.ObjectReference{Namespace: "made"}}, metav1.CreateOptions{})
		if apierrors.IsTooManyRequests(err) && strings.Contains(err.Error(), "limit reached on type Namespace for key made") {
			refused++
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if refused == 0 {
		t.Error("EventRateLimit: all were taken")
	}

	// A user who may write an object, but not delete it, cannot have it deleted with its owner.
	grant := func(name string, rules []rbacv1.PolicyRule) {
		must[*rbacv1.Role](t)(s.Client.RbacV1().Roles("made").Create(ctx, &rbacv1.Role{ObjectMeta: meta(name), Rules: rules}, metav1.CreateOptions{}))
		must[*rbacv1.RoleBinding](t)(s.Client.RbacV1().RoleBindings("made").Create(ctx, &rbacv1.RoleBinding{ObjectMeta: meta(name),
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name}, Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: name}}}, metav1.CreateOptions{}))
	}
	grant("writer", grants("create update get", "configmaps"))
	grant("keeper", append(grants("create update get delete", "configmaps"), rbacv1.PolicyRule{Verbs: []string{"update"}, APIGroups: []string{"*"}, Resources: []string{"*/finalizers"}}))
	grant("owner", grants("create update get delete", "configmaps"))
	owned := func(name string, block bool) *corev1.ConfigMap {
		m := configMap(name, nil)
		m.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: p.Name, UID: p.UID, BlockOwnerDeletion: &block}}
		return m
	}
	create := func(user string, m *corev1.ConfigMap) error {
		_, err := s.ClientFor(t, user).CoreV1().ConfigMaps("made").Create(ctx, m, metav1.CreateOptions{})
		return err
	}
	soon(t, "the bindings count", func() bool {
		return create("writer", configMap("w", nil)) == nil || apierrors.IsAlreadyExists(create("writer", configMap("w", nil)))
	})
	soon(t, "the bindings count", func() bool { return create("owner", owned("fine", false)) == nil })
	// What is new is nobody else's: who makes it may say when it goes.
	if err := create("writer", owned("x", false)); err != nil {
		t.Errorf("a new object with an owner, by who may not delete: %v", err)
	}
	_, err = s.ClientFor(t, "writer").CoreV1().ConfigMaps("made").Update(ctx, owned("w", false), metav1.UpdateOptions{})
	forbidden("a reference without the right to delete", "cannot set an ownerRef on a resource you can't delete", err)
	forbidden("a reference that holds up the owner", "cannot set blockOwnerDeletion", create("owner", owned("y", true)))
	// Who may write any finalizers is not asked what kind the owner is.
	unknown := owned("z", true)
	unknown.OwnerReferences[0].APIVersion, unknown.OwnerReferences[0].Kind = "example.com/v1", "Unknown"
	forbidden("an owner of a kind that is not served", "find the owner's kind", create("owner", unknown))
	soon(t, "the right to write any finalizers", func() bool { return create("keeper", unknown) == nil })
}

func TestWrongAdmissionSets(t *testing.T) {
	// Of what these leave running TestMain would tell.
	file := func(plugin, configuration string) string {
		name := filepath.Join(t.TempDir(), plugin+".yaml")
		text := "apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins:\n- name: " + plugin + "\n  configuration: " + configuration + "\n"
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	for want, set := range map[string]admission.Set{
		"there are NamespaceAutoProvision,":           {Enable: []string{"PodPreset"}},
		"both enabled and disabled":                   {Enable: []string{"Priority"}, Disable: []string{"Priority"}},
		"Configuration of eventratelimit":             {Enable: []string{"EventRateLimit"}},
		"none.yaml":                                   {File: "none.yaml"},
		"admission plugin ValidatingAdmissionWebhook": {File: file("ValidatingAdmissionWebhook", "{apiVersion: apiserver.config.k8s.io/v1, kind: WebhookAdmission, kubeConfigFile: 7}")},
		"admission plugin ResourceQuota":              {File: file("ResourceQuota", "{apiVersion: apiserver.config.k8s.io/v1, kind: ResourceQuotaConfiguration, limitedResources: [{matchContains: [x]}]}")},
	} {
		_, err := server.New(server.Config{Storage: servertest.NewMemory().Decorator(), Admission: set})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want an error about %q", err, want)
		}
	}
}
