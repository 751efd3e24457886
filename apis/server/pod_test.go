package server_test

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server/servertest"
)

func TestBinding(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx, pods := t.Context(), s.Client.CoreV1().Pods("default")
	made := createPod(t, s.Client, pod("one"), "")

	stale := binding("one", "n1")
	stale.UID = "another"
	if err := pods.Bind(ctx, stale, metav1.CreateOptions{}); !apierrors.IsConflict(err) {
		t.Errorf("bind another uid: %v, want Conflict", err)
	}
	if err := pods.Bind(ctx, binding("one", ""), metav1.CreateOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("bind to no node: %v, want Invalid", err)
	}
	for field, b := range map[string]*corev1.Binding{
		"metadata.labels": {ObjectMeta: metav1.ObjectMeta{Name: "one", Labels: map[string]string{"not a key": ""}}}, "metadata.annotations": {ObjectMeta: metav1.ObjectMeta{Name: "one", Annotations: map[string]string{"not a key": ""}}},
	} {
		b.Target.Name = "n1"
		if err := pods.Bind(ctx, b, metav1.CreateOptions{}); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), field) {
			t.Errorf("bind with wrong %s: %v, want Invalid", field, err)
		}
	}
	if err := pods.Bind(ctx, binding("ghost", "n1"), metav1.CreateOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("bind no pod: %v, want NotFound", err)
	}

	b := binding("one", "n1")
	b.UID = made.UID
	b.Annotations = map[string]string{"why": "because"}
	if err := pods.Bind(ctx, b, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	bound := must[*corev1.Pod](t)(pods.Get(ctx, "one", metav1.GetOptions{}))
	if bound.Spec.NodeName != "n1" || bound.Annotations["why"] != "because" {
		t.Errorf("bound: node %q, annotations %v", bound.Spec.NodeName, bound.Annotations)
	}
	if c := bound.Status.Conditions; len(c) != 1 || c[0].Type != corev1.PodScheduled || c[0].Status != corev1.ConditionTrue {
		t.Errorf("conditions: %+v", c)
	}
	err := pods.Bind(ctx, binding("one", "n2"), metav1.CreateOptions{})
	if !apierrors.IsConflict(err) || !strings.Contains(err.Error(), `pod one is already assigned to node "n1"`) {
		t.Errorf("second bind: %v, want Conflict", err)
	}
}

func TestGracefulDeletion(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx, pods := t.Context(), s.Client.CoreV1().Pods("default")
	zero := int64(0)

	createPod(t, s.Client, pod("unbound"), "")
	if err := pods.Delete(ctx, "unbound", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := pods.Get(ctx, "unbound", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("a pod on no node is gone at once: %v", err)
	}

	createPod(t, s.Client, pod("bound"), "n1")
	if err := pods.Delete(ctx, "bound", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	ending := must[*corev1.Pod](t)(pods.Get(ctx, "bound", metav1.GetOptions{}))
	if ending.DeletionTimestamp == nil || ending.DeletionGracePeriodSeconds == nil || *ending.DeletionGracePeriodSeconds != 30 {
		t.Fatalf("a bound pod ends gracefully: %v %v", ending.DeletionTimestamp, ending.DeletionGracePeriodSeconds)
	}
	five := int64(5)
	if err := pods.Delete(ctx, "bound", metav1.DeleteOptions{GracePeriodSeconds: &five}); err != nil {
		t.Fatal(err)
	}
	if sooner := must[*corev1.Pod](t)(pods.Get(ctx, "bound", metav1.GetOptions{})); *sooner.DeletionGracePeriodSeconds != 5 {
		t.Errorf("grace %d, want 5", *sooner.DeletionGracePeriodSeconds)
	}
	if err := pods.Bind(ctx, binding("bound", "n2"), metav1.CreateOptions{}); !apierrors.IsConflict(err) {
		t.Errorf("bind an ending pod: %v, want Conflict", err)
	}
	if err := pods.Delete(ctx, "bound", metav1.DeleteOptions{GracePeriodSeconds: &zero}); err != nil {
		t.Fatal(err)
	}
	if _, err := pods.Get(ctx, "bound", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("after the node's last word: %v, want NotFound", err)
	}
}

func TestEviction(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx, pods := t.Context(), s.Client.CoreV1().Pods("default")
	createPod(t, s.Client, pod("one"), "n1")
	dry := []string{metav1.DryRunAll}
	if err := pods.EvictV1(ctx, &policyv1.Eviction{ObjectMeta: meta("one"), DeleteOptions: &metav1.DeleteOptions{DryRun: dry}}); err != nil {
		t.Fatal(err)
	}
	if code, status, _ := raw(t, s.LoopbackConfig(), "POST", "/api/v1/namespaces/default/pods/one/eviction?dryRun=All",
		`{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"one"}}`); code != 201 {
		t.Fatalf("%d %s", code, status.Message)
	}
	kept := must[*corev1.Pod](t)(pods.Get(ctx, "one", metav1.GetOptions{}))
	if kept.DeletionTimestamp != nil || len(kept.Status.Conditions) != 1 {
		t.Errorf("a dry run changed the pod: %v %+v", kept.DeletionTimestamp, kept.Status.Conditions)
	}
	if err := pods.EvictV1(ctx, &policyv1.Eviction{ObjectMeta: meta("one")}); err != nil {
		t.Fatal(err)
	}
	evicted := must[*corev1.Pod](t)(pods.Get(ctx, "one", metav1.GetOptions{}))
	if evicted.DeletionTimestamp == nil {
		t.Error("an evicted pod is being deleted")
	}
	found := false
	for _, c := range evicted.Status.Conditions {
		found = found || c.Type == corev1.DisruptionTarget && c.Reason == "EvictionByEvictionAPI"
	}
	if !found {
		t.Errorf("conditions: %+v", evicted.Status.Conditions)
	}
	if err := pods.EvictV1(ctx, &policyv1.Eviction{ObjectMeta: meta("ghost")}); !apierrors.IsNotFound(err) {
		t.Errorf("evict no pod: %v, want NotFound", err)
	}
}

func TestEvictionWithinABudget(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx, pods, budgets := t.Context(), s.Client.CoreV1().Pods("default"), s.Client.PolicyV1().PodDisruptionBudgets("default")
	running := func(name string) *corev1.Pod {
		p := pod(name)
		p.Labels = map[string]string{"app": "web"}
		p = createPod(t, s.Client, p, "n1")
		p.Status.Phase = corev1.PodRunning
		p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue})
		return must[*corev1.Pod](t)(pods.UpdateStatus(ctx, p, metav1.UpdateOptions{}))
	}
	evict := func(name string) error { return pods.EvictV1(ctx, &policyv1.Eviction{ObjectMeta: meta(name)}) }
	running("one")
	running("two")
	createPod(t, s.Client, func() *corev1.Pod { p := pod("pending"); p.Labels = map[string]string{"app": "web"}; return p }(), "n1")
	one := intstr.FromInt32(1)
	budget := must[*policyv1.PodDisruptionBudget](t)(budgets.Create(ctx, &policyv1.PodDisruptionBudget{
		ObjectMeta: meta("web"),
		Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: &one, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}},
	}, metav1.CreateOptions{}))

	refused := func(name, why string) {
		t.Helper()
		// One request: client-go would wait for Retry-After and try again.
		code, status, _ := raw(t, s.LoopbackConfig(), "POST", "/api/v1/namespaces/default/pods/"+name+"/eviction",
			`{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"`+name+`"}}`)
		if code != 429 || status.Details == nil || len(status.Details.Causes) == 0 || !strings.Contains(status.Details.Causes[len(status.Details.Causes)-1].Message, why) {
			t.Errorf("%d %+v, want 429: %s", code, status, why)
		}
	}
	refused("one", "is still being processed by the server")
	budget.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: budget.Generation, DisruptionsAllowed: 1, CurrentHealthy: 2, DesiredHealthy: 1, ExpectedPods: 2}
	must[*policyv1.PodDisruptionBudget](t)(budgets.UpdateStatus(ctx, budget, metav1.UpdateOptions{}))
	if err := evict("pending"); err != nil {
		t.Errorf("a pod that does not run costs nothing: %v", err)
	}
	if err := evict("one"); err != nil {
		t.Error(err)
	}
	spent := must[*policyv1.PodDisruptionBudget](t)(budgets.Get(ctx, "web", metav1.GetOptions{}))
	if _, ok := spent.Status.DisruptedPods["one"]; !ok || spent.Status.DisruptionsAllowed != 0 {
		t.Errorf("status: %+v", spent.Status)
	}
	refused("two", "The disruption budget web needs 1 healthy pods and has 2 currently")
	if two := must[*corev1.Pod](t)(pods.Get(ctx, "two", metav1.GetOptions{})); two.DeletionTimestamp != nil {
		t.Error("a refused eviction deleted the pod")
	}
	second := spent.DeepCopy()
	second.ObjectMeta = meta("second")
	must[*policyv1.PodDisruptionBudget](t)(budgets.Create(ctx, second, metav1.CreateOptions{}))
	if err := evict("two"); !apierrors.IsInternalError(err) || !strings.Contains(err.Error(), "more than one PodDisruptionBudget") {
		t.Errorf("two budgets: %v", err)
	}
}

// TestPodParts: ephemeral containers and resources of a running pod are
// written through subresources of their own, by every way of writing.
func TestPodParts(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx, pods := t.Context(), s.Client.CoreV1().Pods("default")
	p := pod("one")
	p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"cpu": resource.MustParse("100m")}
	made := createPod(t, s.Client, p, "n1")

	// As kubectl debug does it.
	got, err := pods.Patch(ctx, "one", types.StrategicMergePatchType,
		[]byte(`{"spec":{"ephemeralContainers":[{"name":"debugger","image":"tools:1","targetContainerName":"main","stdin":true,"tty":true}]}}`),
		metav1.PatchOptions{}, "ephemeralcontainers")
	if err != nil {
		t.Fatal(err)
	}
	if e := got.Spec.EphemeralContainers; len(e) != 1 || e[0].Name != "debugger" || e[0].TerminationMessagePath == "" || got.Generation != made.Generation+1 {
		t.Errorf("ephemeral containers %+v, generation %d", e, got.Generation)
	}
	_, err = pods.Patch(ctx, "one", types.JSONPatchType, []byte(`[{"op":"remove","path":"/spec/ephemeralContainers"}]`), metav1.PatchOptions{}, "ephemeralcontainers")
	if !apierrors.IsInvalid(err) {
		t.Errorf("take it away: %v, want Invalid", err)
	}
	got.Spec.EphemeralContainers = append(got.Spec.EphemeralContainers, corev1.EphemeralContainer{
		EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "second", Image: "tools:1"},
	})
	got.Spec.Containers[0].Image = "other:1"
	got = must[*corev1.Pod](t)(pods.UpdateEphemeralContainers(ctx, "one", got, metav1.UpdateOptions{}))
	if len(got.Spec.EphemeralContainers) != 2 || got.Spec.Containers[0].Image != "web:1" {
		t.Errorf("after an update: %+v", got.Spec)
	}

	// As kubectl patch --subresource resize does it.
	got, err = pods.Patch(ctx, "one", types.StrategicMergePatchType,
		[]byte(`{"spec":{"containers":[{"name":"main","resources":{"requests":{"cpu":"200m"}}}]}}`), metav1.PatchOptions{}, "resize")
	if err != nil {
		t.Fatal(err)
	}
	if cpu := got.Spec.Containers[0].Resources.Requests.Cpu().String(); cpu != "200m" {
		t.Errorf("cpu %s, want 200m", cpu)
	}
	// Server-side apply through the subresource owns the resources alone.
	got, err = pods.Patch(ctx, "one", types.ApplyPatchType,
		[]byte(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"one"},"spec":{"containers":[{"name":"main","resources":{"requests":{"cpu":"300m"}}}]}}`),
		metav1.PatchOptions{FieldManager: "sizer", Force: ptr.To(true)}, "resize")
	if err != nil {
		t.Fatal(err)
	}
	if cpu := got.Spec.Containers[0].Resources.Requests.Cpu().String(); cpu != "300m" {
		t.Errorf("cpu %s, want 300m", cpu)
	}
	if !slices.ContainsFunc(got.ManagedFields, func(m metav1.ManagedFieldsEntry) bool {
		return m.Manager == "sizer" && m.Subresource == "resize" && strings.Contains(string(m.FieldsV1.Raw), "f:resources")
	}) {
		t.Errorf("owners: %+v", got.ManagedFields)
	}
	// The main resource still refuses both.
	got.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"cpu": resource.MustParse("400m")}
	if _, err = pods.Update(ctx, got, metav1.UpdateOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("resize by the main resource: %v, want Invalid", err)
	}
}
