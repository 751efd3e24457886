package schedtest_test

import (
	"fmt"
	"testing"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// TestNamespaceGoesTogether: a namespace's objects go in a few entries of the
// store's log, and what a deletion of many takes is given back to its quota.
func TestNamespaceGoesTogether(t *testing.T) {
	store := raftstoretest.New(t, 1, func(c *raftstore.Config) { raftstoretest.Steady(c) }).Leader()
	l := newLineWith(t, func(c *server.Config) {
		c.Storage = kubestore.NewDecorator(kubestore.Config{Store: store, Cache: true, Origin: server.Caller})
	})
	services := l.client.CoreV1().Services(ns)
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "few"}, Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"services": resource.MustParse("0")}}}
	if _, err := l.client.CoreV1().ResourceQuotas(ns).Create(t.Context(), quota, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	used := func(want int64) {
		t.Helper()
		schedtest.Eventually(t, func() string {
			q, err := l.client.CoreV1().ResourceQuotas(ns).Get(t.Context(), "few", metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			if n, ok := q.Status.Used["services"]; !ok || n.Value() != want {
				return fmt.Sprintf("used: %v, want %d services", q.Status.Used, want)
			}
			return ""
		})
	}
	add := func(name string) error {
		_, err := services.Create(t.Context(), &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"a": "b"}}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
		}, metav1.CreateOptions{})
		return err
	}
	// What is made before admission has heard of the quota is not counted.
	schedtest.Eventually(t, func() string {
		err := add("too-soon")
		if apierrors.IsForbidden(err) {
			return ""
		}
		return fmt.Sprintf("a service where none may be: %v, %v", err, services.Delete(t.Context(), "too-soon", metav1.DeleteOptions{}))
	})
	used(0)
	if _, err := l.client.CoreV1().ResourceQuotas(ns).Patch(t.Context(), "few", "application/merge-patch+json", []byte(`{"spec":{"hard":{"services":"3"}}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		schedtest.Eventually(t, func() string { // admission may know the quota as it was
			if err := add(fmt.Sprint("s", i)); err != nil && !apierrors.IsAlreadyExists(err) {
				return err.Error()
			}
			return ""
		})
	}
	used(3)
	if err := add("one-more"); !apierrors.IsForbidden(err) {
		t.Fatalf("a fourth service: %v", err)
	}
	if err := l.client.CoreV1().RESTClient().Delete().Namespace(ns).Resource("services").Param("labelSelector", "a=b").Do(t.Context()).Error(); err != nil {
		t.Fatal(err)
	}
	used(0)
	schedtest.Eventually(t, func() string { // admission hears of the status a little later
		if err := add("one-more"); err != nil {
			return fmt.Sprintf("a service after the deletion of three: %v", err)
		}
		return ""
	})

	const n = 600
	var writers errgroup.Group
	writers.SetLimit(16)
	for i := range n {
		writers.Go(func() error {
			cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("m", i)}}
			if i%100 == 0 {
				cm.Finalizers = []string{"example.com/held"}
			}
			_, err := l.client.CoreV1().ConfigMaps(ns).Create(t.Context(), cm, metav1.CreateOptions{})
			return err
		})
	}
	if err := writers.Wait(); err != nil {
		t.Fatal(err)
	}
	before := store.Status().Keyspace.Index
	if err := l.client.CoreV1().Namespaces().Delete(t.Context(), ns, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	var held *corev1.ConfigMapList
	schedtest.Eventually(t, func() string {
		var err error
		if held, err = l.client.CoreV1().ConfigMaps(ns).List(t.Context(), metav1.ListOptions{}); err != nil {
			return err.Error()
		}
		if len(held.Items) != n/100 {
			return fmt.Sprintf("%d ConfigMaps are left, %d are held", len(held.Items), n/100)
		}
		return ""
	})
	if entries := store.Status().Keyspace.Index - before; entries > n/2 {
		t.Errorf("%d log entries for %d objects", entries, n)
	}
	for i := range held.Items {
		cm := &held.Items[i]
		if cm.DeletionTimestamp == nil {
			t.Errorf("%s is held, and not marked", cm.Name)
		}
		if _, err := l.client.CoreV1().ConfigMaps(ns).Patch(t.Context(), cm.Name, "application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil {
			t.Error(err)
		}
	}
	schedtest.Eventually(t, func() string {
		_, err := l.client.CoreV1().Namespaces().Get(t.Context(), ns, metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			return fmt.Sprintf("the namespace: %v", err)
		}
		return ""
	})
}
