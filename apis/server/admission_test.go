package server_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

func TestNamespaceLifecycle(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx, spaces := t.Context(), s.Client.CoreV1().Namespaces()
	_, err := s.Client.CoreV1().ConfigMaps("nowhere").Create(ctx, configMap("x", nil), metav1.CreateOptions{})
	if !apierrors.IsNotFound(err) || err.Error() != `namespaces "nowhere" not found` {
		t.Errorf("create in a missing namespace: %v", err)
	}
	for _, name := range []string{"default", "kube-system", "kube-public", "kube-node-lease"} {
		if err := spaces.Delete(ctx, name, metav1.DeleteOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "this namespace may not be deleted") {
			t.Errorf("delete %s: %v", name, err)
		}
	}

	must[*corev1.Namespace](t)(spaces.Create(ctx, &corev1.Namespace{ObjectMeta: meta("brief")}, metav1.CreateOptions{}))
	maps := s.Client.CoreV1().ConfigMaps("brief")
	must[*corev1.ConfigMap](t)(maps.Create(ctx, configMap("before", nil), metav1.CreateOptions{}))
	if err := spaces.Delete(ctx, "brief", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	ns := must[*corev1.Namespace](t)(spaces.Get(ctx, "brief", metav1.GetOptions{}))
	if ns.Status.Phase != corev1.NamespaceTerminating || ns.DeletionTimestamp == nil {
		t.Errorf("a deleted namespace is %s (%v), want Terminating", ns.Status.Phase, ns.DeletionTimestamp)
	}
	_, err = maps.Create(ctx, configMap("after", nil), metav1.CreateOptions{})
	if !apierrors.IsForbidden(err) || !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) ||
		!strings.Contains(err.Error(), "unable to create new content in namespace brief because it is being terminated") {
		t.Errorf("create in a terminating namespace: %v", err)
	}
	if err := maps.Delete(ctx, "before", metav1.DeleteOptions{}); err != nil {
		t.Errorf("delete in a terminating namespace: %v", err)
	}
	// A second delete changes nothing: the namespace waits for its finalizer.
	if err := spaces.Delete(ctx, "brief", metav1.DeleteOptions{}); err != nil {
		t.Errorf("second delete: %v", err)
	}
	ns.Spec.Finalizers = nil
	must[*corev1.Namespace](t)(spaces.Finalize(ctx, ns, metav1.UpdateOptions{}))
	if _, err := spaces.Get(ctx, "brief", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("after finalize: %v, want NotFound", err)
	}
}

func TestPodsAreCompleted(t *testing.T) {
	seconds := int64(7)
	s := servertest.Start(t, func(c *server.Config) { c.TolerationSeconds = &seconds })
	ctx := t.Context()
	must[*corev1.ServiceAccount](t)(s.Client.CoreV1().ServiceAccounts("default").Create(ctx, &corev1.ServiceAccount{
		ObjectMeta: meta("robot"), ImagePullSecrets: []corev1.LocalObjectReference{{Name: "registry"}},
	}, metav1.CreateOptions{}))

	plain := createPod(t, s.Client, pod("plain"), "")
	if plain.Spec.ServiceAccountName != "default" || plain.Spec.Priority == nil || *plain.Spec.Priority != 0 {
		t.Errorf("service account %q, priority %v", plain.Spec.ServiceAccountName, plain.Spec.Priority)
	}
	patience := map[string]int64{}
	for _, toleration := range plain.Spec.Tolerations {
		patience[toleration.Key] = *toleration.TolerationSeconds
	}
	if patience["node.kubernetes.io/not-ready"] != 7 || patience["node.kubernetes.io/unreachable"] != 7 {
		t.Errorf("tolerations: %v", plain.Spec.Tolerations)
	}

	picky := pod("picky")
	picky.Spec.ServiceAccountName = "robot"
	picky.Spec.PriorityClassName = "system-node-critical"
	picky.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	picky = createPod(t, s.Client, picky, "")
	if len(picky.Spec.Tolerations) != 1 || *picky.Spec.Priority != 2000001000 || len(picky.Spec.ImagePullSecrets) != 1 {
		t.Errorf("picky: %+v", picky.Spec)
	}

	for name, spoil := range map[string]func(*corev1.PodSpec){
		`error looking up service account default/ghost: serviceaccounts "ghost" not found`: func(p *corev1.PodSpec) { p.ServiceAccountName = "ghost" },
		`no PriorityClass with name vip was found`:                                          func(p *corev1.PodSpec) { p.PriorityClassName = "vip" },
	} {
		p := pod("bad")
		spoil(&p.Spec)
		if _, err := s.Client.CoreV1().Pods("default").Create(ctx, p, metav1.CreateOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), name) {
			t.Errorf("%v, want Forbidden: %s", err, name)
		}
	}
}

func TestPriorityClasses(t *testing.T) {
	s := servertest.Start(t, nil)
	classes := s.Client.SchedulingV1().PriorityClasses()
	never := corev1.PreemptNever
	for _, class := range []*schedulingv1.PriorityClass{
		{ObjectMeta: meta("high"), Value: 1000, PreemptionPolicy: &never},
		{ObjectMeta: meta("usual"), Value: 10, GlobalDefault: true},
	} {
		must[*schedulingv1.PriorityClass](t)(classes.Create(t.Context(), class, metav1.CreateOptions{}))
	}
	for name, want := range map[string]struct {
		class, gets string
		value       int32
		policy      corev1.PreemptionPolicy
	}{
		"named":   {"high", "high", 1000, corev1.PreemptNever},
		"unnamed": {"", "usual", 10, corev1.PreemptLowerPriority},
		"system":  {"system-cluster-critical", "system-cluster-critical", 2000000000, corev1.PreemptLowerPriority},
	} {
		p := pod(name)
		p.Spec.PriorityClassName = want.class
		spec := createPod(t, s.Client, p, "").Spec
		if spec.PriorityClassName != want.gets || *spec.Priority != want.value || *spec.PreemptionPolicy != want.policy {
			t.Errorf("%s: %s %d %s", name, spec.PriorityClassName, *spec.Priority, *spec.PreemptionPolicy)
		}
	}
	lying := pod("lying")
	more := int32(2000)
	lying.Spec.PriorityClassName, lying.Spec.Priority = "high", &more
	if _, err := s.Client.CoreV1().Pods("default").Create(t.Context(), lying, metav1.CreateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("%v, want Forbidden", err)
	}
}
