package loadbalancer

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"

	"github.com/clusterd/clusterd/sched/loop"
)

// TestWithoutAPool: addresses that another program gave stay; those of a pool go
// with it.
func TestWithoutAPool(t *testing.T) {
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web"}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
	}}
	pool := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: Pool.Namespace, Name: Pool.Name}, Data: map[string]string{"addresses": "192.0.2.10-192.0.2.20"}}
	client := fake.NewSimpleClientset(service)
	indexer := func() cache.Indexer {
		return cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	}
	services, maps := indexer(), indexer()
	c := &controller{
		client: client, events: record.NewFakeRecorder(100), services: corelisters.NewServiceLister(services), maps: corelisters.NewConfigMapLister(maps),
		given: map[loop.Key][]string{}, reported: map[loop.Key]string{}, pooled: map[loop.Key][]string{},
	}
	look := func(want ...string) {
		t.Helper()
		for range 2 { // the second time with what the first has written
			now, err := client.CoreV1().Services("ns").Get(t.Context(), "web", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if err := services.Add(now); err != nil {
				t.Fatal(err)
			}
			if err := c.reconcile(t.Context(), all); err != nil {
				t.Fatal(err)
			}
		}
		now, err := client.CoreV1().Services("ns").Get(t.Context(), "web", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, in := range now.Status.LoadBalancer.Ingress {
			got = append(got, in.IP+in.Hostname)
		}
		if len(got) != len(want) || len(want) > 0 && got[0] != want[0] {
			t.Errorf("addresses %q, want %q", got, want)
		}
	}
	for _, other := range []corev1.LoadBalancerIngress{{IP: "203.0.113.4"}, {Hostname: "lb.example.com"}} {
		next := service.DeepCopy()
		next.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{other}
		if _, err := client.CoreV1().Services("ns").UpdateStatus(t.Context(), next, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		look(other.IP + other.Hostname)
	}
	if err := maps.Add(pool); err != nil {
		t.Fatal(err)
	}
	look("192.0.2.10")
	if err := maps.Delete(pool); err != nil {
		t.Fatal(err)
	}
	look()
}
