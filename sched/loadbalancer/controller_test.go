package loadbalancer

import (
	"errors"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	corelisters "k8s.io/client-go/listers/core/v1"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/names"
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
	services, maps := newIndexer(), newIndexer()
	c := &controller{
		client: client, events: record.NewFakeRecorder(100), services: corelisters.NewServiceLister(services), maps: corelisters.NewConfigMapLister(maps), nodes: corelisters.NewNodeLister(newIndexer()),
		given: map[loop.Key]grant{}, reported: map[loop.Key]string{}, pooled: map[loop.Key]grant{},
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

// TestCondition: why a Service has no address stands in its status, for as long as it is so.
func TestCondition(t *testing.T) {
	service := func(name string, i int64) *corev1.Service {
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, CreationTimestamp: metav1.Unix(i, 0)}, Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer}}
	}
	elsewhere := service("elsewhere", 0)
	setIngress(elsewhere, []string{"203.0.113.4"})
	c, client := newController(t, service("first", 1), service("second", 2), elsewhere)
	services, maps := newIndexer(), newIndexer()
	c.services, c.maps = corelisters.NewServiceLister(services), corelisters.NewConfigMapLister(maps)
	look := func(what string, want map[string]string) {
		t.Helper()
		for range 2 { // the second time with what the first has written
			list, err := client.CoreV1().Services("ns").List(t.Context(), metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for i := range list.Items {
				if err := services.Update(&list.Items[i]); err != nil {
					t.Fatal(err)
				}
			}
			client.ClearActions()
			if err := c.reconcile(t.Context(), all); err != nil {
				t.Fatal(err)
			}
		}
		for _, a := range client.Actions() {
			if a.GetVerb() != "list" && a.GetVerb() != "get" {
				t.Errorf("%s: it wrote again what was there: %v", what, a)
			}
		}
		for name, reason := range want {
			s, err := client.CoreV1().Services("ns").Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			got := meta.FindStatusCondition(s.Status.Conditions, names.LoadBalancerAddress)
			if got == nil || got.Reason != reason || (got.Status == metav1.ConditionTrue) != (reason == core.ReasonAddressGiven) || got.Message == "" {
				t.Errorf("%s: the condition of %s is %+v, want reason %s", what, name, got, reason)
			}
		}
	}
	look("no pool", map[string]string{"first": core.ReasonNoPool, "second": core.ReasonNoPool, "elsewhere": core.ReasonOtherProgram})
	pool := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: Pool.Namespace, Name: Pool.Name}, Data: map[string]string{"addresses": "192.0.2.10-192.0.2.11"}}
	if err := maps.Add(pool); err != nil {
		t.Fatal(err)
	}
	look("two addresses", map[string]string{"elsewhere": core.ReasonAddressGiven, "first": core.ReasonAddressGiven, "second": core.ReasonPoolFull})
	pool = pool.DeepCopy()
	pool.Data["addresses"] = "192.0.2.10-192.0.2.12"
	if err := maps.Update(pool); err != nil {
		t.Fatal(err)
	}
	look("three addresses", map[string]string{"second": core.ReasonAddressGiven})
}

// TestAddressesOfOthersAreTaken: nodes lead packets to what stands in the status of a
// Service of another class, and of one that is being deleted.
func TestAddressesOfOthersAreTaken(t *testing.T) {
	service := func(name, ip string, change func(*corev1.Service)) *corev1.Service {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}, Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer}}
		if ip != "" {
			setIngress(s, []string{ip})
		}
		change(s)
		return s
	}
	c, client := newController(t,
		service("classed", "192.0.2.10", func(s *corev1.Service) { s.Spec.LoadBalancerClass = ptr.To("example.com/lb") }),
		service("going", "192.0.2.11", func(s *corev1.Service) {
			s.DeletionTimestamp, s.Finalizers = ptr.To(metav1.Now()), []string{"example.com/wait"}
		}),
		service("port", "", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort }),
		service("new", "", func(*corev1.Service) {}))
	if err := c.reconcile(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	now, err := client.CoreV1().Services("ns").Get(t.Context(), "new", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got := ingress(now); !slices.Equal(got, []string{"192.0.2.12"}) {
		t.Errorf("it was given %q, want the first that none has", got)
	}
}

// TestOneThatFails: the others get their addresses, and the failure is reported.
func TestOneThatFails(t *testing.T) {
	var services []*corev1.Service
	for i, name := range []string{"a", "b", "c"} {
		services = append(services, &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, CreationTimestamp: metav1.Unix(int64(i), 0)},
			Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer},
		})
	}
	c, client := newController(t, services...)
	client.PrependReactor("update", "services", func(a clienttesting.Action) (bool, runtime.Object, error) {
		s := a.(clienttesting.UpdateAction).GetObject().(*corev1.Service)
		return s.Name == "a", nil, errors.New("refused by a webhook")
	})
	if err := c.reconcile(t.Context(), all); err == nil || !strings.Contains(err.Error(), "service ns/a: refused by a webhook") {
		t.Errorf("reported is %v", err)
	}
	for _, name := range []string{"b", "c"} {
		if s, err := client.CoreV1().Services("ns").Get(t.Context(), name, metav1.GetOptions{}); err != nil || len(ingress(s)) != 1 {
			t.Errorf("%s has %v, %v", name, s, err)
		}
	}
}

// TestMadeAnew: what a deleted Service was given is not that of the next one of its name.
func TestMadeAnew(t *testing.T) {
	c, client := newController(t, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a", UID: "2"}, Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer}})
	key := loop.Key{Namespace: "ns", Name: "a"}
	c.given[key] = grant{uid: "1", ips: []string{"192.0.2.10"}}
	if err := c.reconcile(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	if s, err := client.CoreV1().Services("ns").Get(t.Context(), "a", metav1.GetOptions{}); err != nil || len(ingress(s)) != 1 {
		t.Errorf("it has %v, %v", s.Status, err)
	}
	if c.given[key].uid != "2" {
		t.Errorf("remembered is what %q was given", c.given[key].uid)
	}
}

// newController is a controller with these Services, and a pool from 192.0.2.10 on.
func newController(t *testing.T, list ...*corev1.Service) (*controller, *fake.Clientset) {
	t.Helper()
	client := fake.NewSimpleClientset()
	services, maps := newIndexer(), newIndexer()
	for _, s := range list {
		if err := client.Tracker().Add(s); err != nil {
			t.Fatal(err)
		}
		if err := services.Add(s); err != nil {
			t.Fatal(err)
		}
	}
	if err := maps.Add(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: Pool.Namespace, Name: Pool.Name}, Data: map[string]string{"addresses": "192.0.2.10-192.0.2.20"}}); err != nil {
		t.Fatal(err)
	}
	return &controller{
		client: client, events: record.NewFakeRecorder(100), services: corelisters.NewServiceLister(services), maps: corelisters.NewConfigMapLister(maps), nodes: corelisters.NewNodeLister(newIndexer()),
		given: map[loop.Key]grant{}, reported: map[loop.Key]string{}, pooled: map[loop.Key]grant{},
	}, client
}

func newIndexer() cache.Indexer {
	return cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
}
