package ingress

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/apps"
	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/networking"
	"github.com/clusterd/clusterd/leaktest"
	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/schedtest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func of(class *string, annotation string) *networkingv1.Ingress {
	i := &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, Spec: networkingv1.IngressSpec{IngressClassName: class}}
	if annotation != "" {
		i.Annotations = map[string]string{"kubernetes.io/ingress.class": annotation}
	}
	return i
}

func TestOurs(t *testing.T) {
	other := &networkingv1.IngressClass{ObjectMeta: metav1.ObjectMeta{Name: "nginx"}, Spec: networkingv1.IngressClassSpec{Controller: "k8s.io/ingress-nginx"}}
	classes := []*networkingv1.IngressClass{newClass(), other}
	for i, want := range map[*networkingv1.Ingress]bool{
		of(ptr.To("clusterd"), ""): true, of(nil, "clusterd"): true, of(ptr.To("nginx"), ""): false, of(nil, ""): false, of(ptr.To("none"), ""): false,
	} {
		if ours(i, classes) != want {
			t.Errorf("%+v %v: want %t", i.Annotations, i.Spec.IngressClassName, want)
		}
	}
}

func TestAddresses(t *testing.T) {
	s := &corev1.Service{Spec: corev1.ServiceSpec{ExternalIPs: []string{"192.0.2.1", "192.0.2.9"}}}
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.9"}, {Hostname: "lb.example"}}
	want := []networkingv1.IngressLoadBalancerIngress{{IP: "192.0.2.9"}, {Hostname: "lb.example"}, {IP: "192.0.2.1"}}
	if diff := cmp.Diff(want, Addresses(s)); diff != "" {
		t.Error(diff)
	}
}

// TestNotOnAgents: an agent could have the token of an account that may read all
// Secrets.
func TestNotOnAgents(t *testing.T) {
	on := nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: newDaemonSet().Spec.Template.Spec})
	for role, want := range map[string]bool{"node-role.kubernetes.io/control-plane": true, "node-role.kubernetes.io/agent": false} {
		got, err := on.Match(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{role: ""}}})
		if err != nil || got != want {
			t.Errorf("%s: %t, %v", role, got, err)
		}
	}
}

// TestWhatIsMadeIsValid: what the loop writes is not refused.
func TestWhatIsMadeIsValid(t *testing.T) {
	set, service, class := newDaemonSet(), newService(), newClass()
	kinds := apps.DaemonSet()
	kinds.Default(set)
	kinds.PrepareCreate(set)
	if errs := kinds.Validate(set); len(errs) > 0 {
		t.Error(errs)
	}
	kinds = core.Service()
	kinds.Default(service)
	kinds.PrepareCreate(service)
	if errs := kinds.Validate(service); len(errs) > 0 {
		t.Error(errs)
	}
	kinds = networking.IngressClass()
	kinds.Default(class)
	if errs := kinds.Validate(class); len(errs) > 0 {
		t.Error(errs)
	}
}

// TestLoop: nothing but the class is there until an Ingress wants more; what is
// deleted comes back, the class does not; the status follows the Service.
func TestLoop(t *testing.T) {
	client := fake.NewClientset()
	schedtest.SeeAll(&client.Fake, client.Tracker())
	run := func() (stop func()) {
		ctx, cancel := context.WithCancel(t.Context())
		env := loop.Env{Client: client, Informers: informers.NewSharedInformerFactory(client, 0), Events: loop.NewEvents(client, clock.RealClock{}), Clock: clock.RealClock{}}
		l := New(env)
		env.Informers.StartWithContext(ctx)
		ended := make(chan error, 1)
		go func() { ended <- l.Run(ctx) }()
		return func() {
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
			env.Informers.Shutdown()
		}
	}
	ctx := t.Context()
	eventually := func(what string, ok func() error) {
		t.Helper()
		err := ok()
		for end := time.Now().Add(time.Minute); err != nil && time.Now().Before(end); err = ok() {
			time.Sleep(5 * time.Millisecond)
		}
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	net := client.NetworkingV1()
	stop := run()
	eventually("the mark is there", func() error {
		_, err := client.CoreV1().ConfigMaps(Name.Namespace).Get(ctx, mark, metav1.GetOptions{})
		return err
	})
	class, err := net.IngressClasses().Get(ctx, "clusterd", metav1.GetOptions{})
	if err != nil || networking.DefaultClass([]networkingv1.IngressClass{*class}) == nil {
		t.Fatal(class, err)
	}
	if _, err := net.Ingresses("shop").Create(ctx, of(ptr.To("nginx"), ""), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	ingress := of(ptr.To("clusterd"), "")
	ingress.Name = "own"
	if sets, err := client.AppsV1().DaemonSets("").List(ctx, metav1.ListOptions{}); err != nil || len(sets.Items) != 0 {
		t.Fatal("pods before there is an Ingress of ours", err)
	}
	if _, err := net.Ingresses("shop").Create(ctx, ingress, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	there := func() error {
		_, err1 := client.AppsV1().DaemonSets(Name.Namespace).Get(ctx, Name.Name, metav1.GetOptions{})
		_, err2 := client.CoreV1().Services(Name.Namespace).Get(ctx, Name.Name, metav1.GetOptions{})
		_, err3 := client.CoreV1().ServiceAccounts(Name.Namespace).Get(ctx, Name.Name, metav1.GetOptions{})
		return errors.Join(err1, err2, err3)
	}
	eventually("all is made", there)
	if err := client.AppsV1().DaemonSets(Name.Namespace).Delete(ctx, Name.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually("the pods come back", there)
	service, err := client.CoreV1().Services(Name.Namespace).Get(ctx, Name.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, ip := range []string{"192.0.2.1", "192.0.2.2"} {
		service.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: ip}}
		if service, err = client.CoreV1().Services(Name.Namespace).UpdateStatus(ctx, service, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		eventually("the status says "+ip, func() error {
			i, err := net.Ingresses("shop").Get(ctx, "own", metav1.GetOptions{})
			if err == nil && (len(i.Status.LoadBalancer.Ingress) != 1 || i.Status.LoadBalancer.Ingress[0].IP != ip) {
				err = fmt.Errorf("%+v", i.Status)
			}
			return err
		})
	}
	if i, err := net.Ingresses("shop").Get(ctx, "web", metav1.GetOptions{}); err != nil || len(i.Status.LoadBalancer.Ingress) != 0 {
		t.Error("another controller's Ingress was written", i, err)
	}
	if err := net.IngressClasses().Delete(ctx, "clusterd", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	stop()
	looks := func() (n int) {
		for _, a := range client.Actions() {
			if a.Matches("get", "configmaps") && a.GetNamespace() == Name.Namespace {
				n++
			}
		}
		return n
	}
	before := looks()
	stop = run() // the next leader
	eventually("it looks for the mark", func() error {
		if looks() == before {
			return errors.New("not yet")
		}
		return nil
	})
	stop()
	if _, err := net.IngressClasses().Get(ctx, "clusterd", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Error("a class that was deleted came back", err)
	}
}
