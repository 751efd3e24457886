package server_test

import (
	"slices"
	"strings"
	"testing"

	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/apis/server/servertest"
)

const podGroups = "/apis/scheduling.k8s.io/v1beta1/namespaces/default/podgroups"

// TestPodGroupsAreServed: a PodGroup needs the template it names, gets its
// finalizer and priority, warns of what nothing acts on, is refused in words, and
// has a status of its own.
func TestPodGroupsAreServed(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx, client := t.Context(), s.Client.SchedulingV1beta1()
	group := &schedulingv1beta1.PodGroup{ObjectMeta: metav1.ObjectMeta{Name: "workers"}, Spec: schedulingv1beta1.PodGroupSpec{
		WorkloadRef:      &schedulingv1beta1.WorkloadReference{WorkloadName: "train", TemplateName: "workers"},
		SchedulingPolicy: schedulingv1beta1.PodGroupSchedulingPolicy{Gang: &schedulingv1beta1.GangSchedulingPolicy{MinCount: 4}},
	}}
	refused := func(want string) {
		t.Helper()
		if _, err := client.PodGroups("default").Create(ctx, group, metav1.CreateOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), want) {
			t.Fatalf("got %v, want it to be forbidden: %s", err, want)
		}
	}
	refused(`there is no Workload "train"`)
	must[*schedulingv1beta1.Workload](t)(client.Workloads("default").Create(ctx, &schedulingv1beta1.Workload{
		ObjectMeta: metav1.ObjectMeta{Name: "train"},
		Spec:       schedulingv1beta1.WorkloadSpec{PodGroupTemplates: []schedulingv1beta1.PodGroupTemplate{{Name: "driver", SchedulingPolicy: group.Spec.SchedulingPolicy}}},
	}, metav1.CreateOptions{}))
	refused(`Workload "train" has no podGroupTemplate "workers"`)
	group.Spec.WorkloadRef.TemplateName, group.Spec.PriorityClassName = "driver", "system-cluster-critical"
	made := must[*schedulingv1beta1.PodGroup](t)(client.PodGroups("default").Create(ctx, group, metav1.CreateOptions{}))
	if !slices.Contains(made.Finalizers, "scheduling.k8s.io/podgroup-protection") {
		t.Errorf("finalizers %q", made.Finalizers)
	}
	if made.Spec.Priority == nil || *made.Spec.Priority != 2_000_000_000 || made.Generation != 1 {
		t.Errorf("priority %v, generation %d", made.Spec.Priority, made.Generation)
	}
	made.Spec.SchedulingPolicy.Gang.MinCount = 2
	made = must[*schedulingv1beta1.PodGroup](t)(client.PodGroups("default").Update(ctx, made, metav1.UpdateOptions{}))
	if made.Generation != 2 {
		t.Errorf("generation %d after another minCount", made.Generation)
	}
	patched := must[*schedulingv1beta1.PodGroup](t)(client.PodGroups("default").Patch(ctx, "workers", types.StrategicMergePatchType,
		[]byte(`{"spec":{"schedulingPolicy":{"gang":{"minCount":9}}},"status":{"conditions":[{"type":"PodGroupInitiallyScheduled","status":"True","reason":"Scheduled","message":"","lastTransitionTime":"2026-01-02T03:04:05Z"}]}}`), metav1.PatchOptions{}, "status"))
	if !apimeta.IsStatusConditionTrue(patched.Status.Conditions, schedulingv1beta1.PodGroupInitiallyScheduled) || patched.Spec.SchedulingPolicy.Gang.MinCount != 2 {
		t.Errorf("the status of its own: %+v", patched)
	}
	body := `{"apiVersion":"scheduling.k8s.io/v1beta1","kind":"PodGroup","metadata":{"name":"b"},"spec":{"schedulingPolicy":{"gang":{"minCount":2}},"schedulingConstraints":{"topology":[{"key":"rack"}]},"disruptionMode":{"all":{}}}}`
	code, answer, warnings := raw(t, s.LoopbackConfig(), "POST", podGroups+"?dryRun=All", body)
	if text := strings.Join(warnings, "\n"); code != 201 || !strings.Contains(text, "spec.schedulingConstraints.topology") || !strings.Contains(text, "spec.disruptionMode.all") {
		t.Errorf("%d %s, warnings %q", code, answer.Message, warnings)
	}
	code, answer, _ = raw(t, s.LoopbackConfig(), "POST", podGroups, strings.Replace(body, `"minCount":2`, `"minCount":-1`, 1))
	if code != 422 || !strings.Contains(answer.Message, "spec.schedulingPolicy.gang.minCount: Invalid value: -1: must be greater than or equal to 1") {
		t.Errorf("%d %s", code, answer.Message)
	}
}
