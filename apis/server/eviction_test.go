package server_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/client-go/tools/cache"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// listing calls a function before objects are listed.
type listing struct {
	storage.Interface
	before func()
}

func (s listing) GetList(ctx context.Context, key string, opts storage.ListOptions, list runtime.Object) error {
	s.before()
	return s.Interface.GetList(ctx, key, opts, list)
}

// TestEvictionOfOneThatBecomesReady: a pod that is not ready may go without its budget's
// leave; one that has become ready meanwhile may not.
func TestEvictionOfOneThatBecomesReady(t *testing.T) {
	var meanwhile atomic.Pointer[func()]
	s := servertest.Start(t, func(c *server.Config) {
		plain := c.Storage
		c.Storage = func(config *storagebackend.ConfigForResource, prefix string, key func(runtime.Object) (string, error),
			newFunc, newListFunc func() runtime.Object, attrs storage.AttrFunc, triggers storage.IndexerFuncs, indexers *cache.Indexers,
		) (storage.Interface, factory.DestroyFunc, error) {
			store, destroy, err := plain(config, prefix, key, newFunc, newListFunc, attrs, triggers, indexers)
			if err == nil && config.GroupResource == policyv1.Resource("poddisruptionbudgets") {
				store = listing{store, func() {
					if f := meanwhile.Swap(nil); f != nil {
						(*f)()
					}
				}}
			}
			return store, destroy, err
		}
	})
	ctx, pods, budgets := t.Context(), s.Client.CoreV1().Pods("default"), s.Client.PolicyV1().PodDisruptionBudgets("default")
	p := pod("one")
	p.Labels = map[string]string{"app": "web"}
	p = createPod(t, s.Client, p, "n1")
	p.Status.Phase = corev1.PodRunning
	p = must[*corev1.Pod](t)(pods.UpdateStatus(ctx, p, metav1.UpdateOptions{}))
	one, always := intstr.FromInt32(1), policyv1.AlwaysAllow
	budget := must[*policyv1.PodDisruptionBudget](t)(budgets.Create(ctx, &policyv1.PodDisruptionBudget{
		ObjectMeta: meta("web"),
		Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: &one, UnhealthyPodEvictionPolicy: &always, Selector: &metav1.LabelSelector{MatchLabels: p.Labels}},
	}, metav1.CreateOptions{}))
	budget.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: budget.Generation, DesiredHealthy: 1, ExpectedPods: 1}
	must[*policyv1.PodDisruptionBudget](t)(budgets.UpdateStatus(ctx, budget, metav1.UpdateOptions{}))

	becomes := func() {
		now, err := pods.Get(ctx, "one", metav1.GetOptions{})
		if err == nil {
			now.Status.Conditions = append(now.Status.Conditions, corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue})
			_, err = pods.UpdateStatus(ctx, now, metav1.UpdateOptions{})
		}
		if err != nil {
			t.Errorf("make it ready: %v", err)
		}
	}
	meanwhile.Store(&becomes)
	for _, why := range []string{"changed while it was looked at", "disruption budget"} {
		code, status, _ := raw(t, s.LoopbackConfig(), "POST", "/api/v1/namespaces/default/pods/one/eviction", `{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"one"}}`)
		if code != 429 || !strings.Contains(status.Message, why) {
			t.Errorf("%d %+v, want 429: %s", code, status, why)
		}
	}
	if now := must[*corev1.Pod](t)(pods.Get(ctx, "one", metav1.GetOptions{})); now.DeletionTimestamp != nil {
		t.Error("a pod that its budget keeps was deleted")
	}
	now := must[*corev1.Pod](t)(pods.Get(ctx, "one", metav1.GetOptions{}))
	now.Status.Conditions = nil
	must[*corev1.Pod](t)(pods.UpdateStatus(ctx, now, metav1.UpdateOptions{}))
	if err := pods.EvictV1(ctx, &policyv1.Eviction{ObjectMeta: meta("one")}); err != nil {
		t.Errorf("one that stays unready: %v", err)
	}
}
