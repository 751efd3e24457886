package server_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/client-go/tools/cache"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// TestDeleteCollectionTogether deletes by label what nothing holds together and the
// rest one by one; watchers see each object go once, with its last state.
func TestDeleteCollectionTogether(t *testing.T) {
	t.Parallel()
	members := raftstoretest.New(t, 1, func(c *raftstore.Config) { raftstoretest.Steady(c) })
	store := members.Leader()
	var before atomic.Uint64
	s := servertest.Start(t, func(c *server.Config) {
		c.Storage = kubestore.NewDecorator(kubestore.Config{Store: store, Cache: true, Origin: server.Caller})
	})
	maps := s.Client.CoreV1().ConfigMaps("default")
	const n = 40
	made := map[string]string{}
	for i := range n {
		cm := configMap(fmt.Sprintf("m%02d", i), map[string]string{"k": fmt.Sprint("value ", i)})
		cm.Labels = map[string]string{"which": "go"}
		switch {
		case i == 0:
			cm.Labels["which"] = "stay"
		case i%10 == 5:
			cm.Finalizers = []string{"example.com/held"}
		}
		made[cm.Name] = must[*corev1.ConfigMap](t)(maps.Create(t.Context(), cm, metav1.CreateOptions{})).ResourceVersion
	}
	list := must[*corev1.ConfigMapList](t)(maps.List(t.Context(), metav1.ListOptions{}))
	w := must[watch.Interface](t)(maps.Watch(t.Context(), metav1.ListOptions{ResourceVersion: list.ResourceVersion}))
	defer w.Stop()

	dry := metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}
	if err := maps.DeleteCollection(t.Context(), dry, metav1.ListOptions{LabelSelector: "which=go"}); err != nil {
		t.Fatal(err)
	}
	before.Store(store.Status().Keyspace.Index)
	if err := maps.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "which=go"}); err != nil {
		t.Fatal(err)
	}
	// Four are held and marked, the others went in one entry.
	if entries := store.Status().Keyspace.Index - before.Load(); entries > 15 {
		t.Errorf("%d log entries for %d objects", entries, n)
	}
	list = must[*corev1.ConfigMapList](t)(maps.List(t.Context(), metav1.ListOptions{}))
	var left []string
	for i := range list.Items {
		cm := &list.Items[i]
		if left = append(left, cm.Name); (cm.DeletionTimestamp != nil) != (cm.Name != "m00") {
			t.Errorf("%s: deleted at %v", cm.Name, cm.DeletionTimestamp)
		}
	}
	if got := strings.Join(left, " "); got != "m00 m05 m15 m25 m35" {
		t.Errorf("left: %s", got)
	}
	seen := map[string]bool{}
	for deadline := time.After(time.Minute); len(seen) < n-5; {
		select {
		case e, ok := <-w.ResultChan():
			if !ok {
				t.Fatal("the watch ended")
			}
			cm, isMap := e.Object.(*corev1.ConfigMap)
			if !isMap || e.Type != watch.Deleted {
				continue // held ones are marked
			}
			if seen[cm.Name] || seen[cm.ResourceVersion] {
				t.Fatalf("%s at %s: the object or its version was seen before", cm.Name, cm.ResourceVersion)
			}
			if seen[cm.Name] = true; cm.Data["k"] == "" || cm.ResourceVersion == made[cm.Name] {
				t.Errorf("%s went with %v at %s", cm.Name, cm.Data, cm.ResourceVersion)
			}
		case <-deadline:
			t.Fatalf("%d of %d deletions were seen", len(seen), n-5)
		}
	}
	h, err := store.History(t.Context(), "/registry/core/configmaps/default/m01", 1, raftstore.ReadOptions{})
	if err != nil || len(h.Changes) != 1 || h.Changes[0].Type != mvcc.Delete || h.Changes[0].Origin == "" {
		t.Errorf("the store's history of a deleted object: %+v, %v", h, err)
	}
}

// TestDeleteCollectionConditions: what must hold for a deletion holds for each
// of many.
func TestDeleteCollectionConditions(t *testing.T) {
	t.Parallel()
	s := servertest.Start(t, nil)
	maps := s.Client.CoreV1().ConfigMaps("default")
	count := func() int {
		return len(must[*corev1.ConfigMapList](t)(maps.List(t.Context(), metav1.ListOptions{LabelSelector: "a=b"})).Items)
	}
	for i := range 3 {
		cm := configMap(fmt.Sprint("m", i), nil)
		cm.Labels = map[string]string{"a": "b"}
		must[*corev1.ConfigMap](t)(maps.Create(t.Context(), cm, metav1.CreateOptions{}))
	}
	all := metav1.ListOptions{LabelSelector: "a=b"}
	other := "0000-another"
	uid := *metav1.NewPreconditionDeleteOptions(other)
	if err := maps.DeleteCollection(t.Context(), uid, all); err == nil || count() != 3 {
		t.Errorf("with another UID: %v, %d are left", err, count())
	}
	orphan := metav1.DeletePropagationOrphan
	if err := maps.DeleteCollection(t.Context(), metav1.DeleteOptions{PropagationPolicy: &orphan}, all); err != nil || count() != 3 {
		t.Errorf("whose dependents are orphaned first: %v, %d are left", err, count())
	}
	one := all
	one.Limit = 1
	held := must[*corev1.ConfigMapList](t)(maps.List(t.Context(), all))
	for i := range held.Items { // the garbage collector's part
		cm := &held.Items[i]
		cm.Finalizers = nil
		if _, err := maps.Update(t.Context(), cm, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if count() != 0 {
		t.Fatalf("%d are left", count())
	}
	for i := range 3 {
		cm := configMap(fmt.Sprint("m", i), nil)
		cm.Labels = map[string]string{"a": "b"}
		must[*corev1.ConfigMap](t)(maps.Create(t.Context(), cm, metav1.CreateOptions{}))
	}
	if err := maps.DeleteCollection(t.Context(), metav1.DeleteOptions{}, one); err != nil || count() != 2 {
		t.Errorf("one at most: %v, %d are left", err, count())
	}
}

// TestDeleteCollectionRefused: an object that admission keeps is reported, and
// keeps no other.
func TestDeleteCollectionRefused(t *testing.T) {
	t.Parallel()
	s := servertest.Start(t, nil)
	fail := admissionv1.Fail
	equivalent := admissionv1.Equivalent
	policy := &admissionv1.ValidatingAdmissionPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: "keep"},
		Spec: admissionv1.ValidatingAdmissionPolicySpec{
			FailurePolicy: &fail,
			MatchConstraints: &admissionv1.MatchResources{MatchPolicy: &equivalent, ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
				Operations: []admissionv1.OperationType{admissionv1.Delete},
				Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"configmaps"}},
			}}}},
			Validations: []admissionv1.Validation{{Expression: "!oldObject.metadata.name.startsWith('kept')", Message: "it is kept"}},
		},
	}
	must[*admissionv1.ValidatingAdmissionPolicy](t)(s.Client.AdmissionregistrationV1().ValidatingAdmissionPolicies().Create(t.Context(), policy, metav1.CreateOptions{}))
	must[*admissionv1.ValidatingAdmissionPolicyBinding](t)(s.Client.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Create(t.Context(), &admissionv1.ValidatingAdmissionPolicyBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "keep"},
		Spec:       admissionv1.ValidatingAdmissionPolicyBindingSpec{PolicyName: "keep", ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny}},
	}, metav1.CreateOptions{}))
	maps := s.Client.CoreV1().ConfigMaps("default")
	add := func(name string) {
		cm := configMap(name, nil)
		cm.Labels = map[string]string{"a": "b"}
		if strings.HasSuffix(name, "held") {
			cm.Finalizers = []string{"example.com/held"}
		}
		must[*corev1.ConfigMap](t)(maps.Create(t.Context(), cm, metav1.CreateOptions{}))
	}
	add("kept")
	holds := func(ctx context.Context) (bool, error) {
		err := maps.Delete(ctx, "kept", metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}})
		return err != nil && strings.Contains(err.Error(), "it is kept"), nil
	}
	if err := wait.PollUntilContextCancel(waitContext(t), 10*time.Millisecond, true, holds); err != nil {
		t.Fatalf("the policy does not hold: %v", err)
	}
	for i := range 20 {
		add(fmt.Sprintf("m%02d", i))
	}
	add("kept-held")
	err := maps.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "a=b"})
	if err == nil || !strings.Contains(err.Error(), "it is kept") {
		t.Errorf("the answer: %v", err)
	}
	var left []string
	for _, cm := range must[*corev1.ConfigMapList](t)(maps.List(t.Context(), metav1.ListOptions{LabelSelector: "a=b"})).Items {
		if left = append(left, cm.Name); cm.DeletionTimestamp != nil {
			t.Errorf("%s is marked", cm.Name)
		}
	}
	if got := strings.Join(left, " "); got != "kept kept-held" {
		t.Errorf("left: %s", got)
	}
}

// BenchmarkDeleteCollection has the API server delete 10 000 ConfigMaps of one
// namespace, over a real store of one member: together, and as the library does
// it over a storage that deletes one object at a time.
func BenchmarkDeleteCollection(b *testing.B) {
	for _, together := range []bool{false, true} {
		b.Run(fmt.Sprintf("together=%t", together), func(b *testing.B) { benchmarkDeleteCollection(b, together) })
	}
}

// singly hides that a storage can delete many objects at once.
func singly(inner generic.StorageDecorator) generic.StorageDecorator {
	return func(config *storagebackend.ConfigForResource, prefix string, key func(runtime.Object) (string, error), newFunc, newList func() runtime.Object,
		attrs storage.AttrFunc, triggers storage.IndexerFuncs, indexers *cache.Indexers) (storage.Interface, factory.DestroyFunc, error) {
		s, destroy, err := inner(config, prefix, key, newFunc, newList, attrs, triggers, indexers)
		return struct{ storage.Interface }{s}, destroy, err
	}
}

func benchmarkDeleteCollection(b *testing.B, together bool) {
	members := raftstoretest.New(b, 1, func(c *raftstore.Config) { raftstoretest.Steady(c) })
	store := members.Leader()
	s := servertest.Start(b, func(c *server.Config) {
		c.Storage = kubestore.NewDecorator(kubestore.Config{Store: store, Cache: true, Origin: server.Caller})
		if !together {
			c.Storage = singly(c.Storage)
		}
	})
	maps := s.Client.CoreV1().ConfigMaps("default")
	const n = 10_000
	for b.Loop() {
		b.StopTimer()
		var next atomic.Int64
		var wg sync.WaitGroup
		for range 32 {
			wg.Go(func() {
				for i := next.Add(1); i <= n; i = next.Add(1) {
					if _, err := maps.Create(b.Context(), configMap(fmt.Sprintf("m%05d", i), map[string]string{"k": strings.Repeat("v", 200)}), metav1.CreateOptions{}); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		b.StartTimer()
		if err := maps.DeleteCollection(b.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(n/(b.Elapsed().Seconds()/float64(b.N)), "deletes/s")
}
