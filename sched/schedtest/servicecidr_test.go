package schedtest_test

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/networking"
	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// TestLineServiceCIDR: Services' addresses are seen as IPAddresses, a ServiceCIDR
// gives more of them and stays while it is in use, and an address that somebody
// keeps is given to nobody else.
func TestLineServiceCIDR(t *testing.T) {
	l := newLineWith(t, func(c *server.Config) { c.ServiceCIDR = "10.96.0.0/16" })
	ctx, cidrs, addresses, services := t.Context(), l.client.NetworkingV1().ServiceCIDRs(), l.client.NetworkingV1().IPAddresses(), l.client.CoreV1().Services(ns)
	ready := func(name, want string) {
		t.Helper()
		schedtest.Eventually(t, func() string {
			c, err := cidrs.Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			s := meta.FindStatusCondition(c.Status.Conditions, networkingv1.ServiceCIDRConditionReady)
			if s == nil || string(s.Status)+" "+s.Reason != want {
				return fmt.Sprintf("%s: %+v, want %s", name, s, want)
			}
			if len(c.Finalizers) == 0 {
				return name + " has no finalizer"
			}
			return ""
		})
	}
	mirrored := func(address, want string) {
		t.Helper()
		schedtest.Eventually(t, func() string {
			a, err := addresses.Get(ctx, address, metav1.GetOptions{})
			switch {
			case apierrors.IsNotFound(err) && want == "":
				return ""
			case err != nil:
				return err.Error()
			}
			if got := a.Spec.ParentRef.Namespace + "/" + a.Spec.ParentRef.Name; got != want {
				return fmt.Sprintf("IPAddress %s is of %s, want %q", address, got, want)
			}
			return ""
		})
	}
	create := func(name, address string) error {
		_, err := services.Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{ClusterIP: address, Ports: []corev1.ServicePort{{Port: 80}}}}, metav1.CreateOptions{})
		return err
	}
	more := func(name string, cidrList ...string) {
		t.Helper()
		if _, err := cidrs.Create(ctx, &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: cidrList}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}

	ready(networking.DefaultServiceCIDR, "True Usable")
	mirrored("10.96.0.1", "default/kubernetes")

	if err := create("web", "192.0.2.9"); !apierrors.IsInvalid(err) {
		t.Fatalf("an address of no range: %v, want Invalid", err)
	}
	more("more", "192.0.2.0/24")
	more("pods", "10.244.0.0/24")
	more("six", "2001:db8::/108")
	ready("more", "True Usable")
	ready("pods", "False OverlapsPods")
	ready("six", "False FamilyNotConfigured")
	if err := create("web", "192.0.2.9"); err != nil {
		t.Fatal(err)
	}
	if err := create("bad", "10.244.0.9"); !apierrors.IsInvalid(err) {
		t.Errorf("an address of the pods: %v, want Invalid", err)
	}
	mirrored("192.0.2.9", ns+"/web")

	// Somebody keeps an address; the Service named by it may have it.
	kept := &networkingv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Name: "192.0.2.10"}, Spec: networkingv1.IPAddressSpec{
		ParentRef: &networkingv1.ParentReference{Resource: "services", Namespace: ns, Name: "heir"}}}
	if _, err := addresses.Create(ctx, kept, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := create("thief", "192.0.2.10"); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "provided IP is already allocated") {
		t.Errorf("an address that is kept: %v, want Invalid", err)
	}
	if err := create("heir", "192.0.2.10"); err != nil {
		t.Error(err)
	}
	if _, err := addresses.Create(ctx, &networkingv1.IPAddress{ObjectMeta: metav1.ObjectMeta{Name: "192.0.2.9"}, Spec: kept.Spec}, metav1.CreateOptions{}); !apierrors.IsAlreadyExists(err) {
		t.Errorf("an address that a Service has: %v, want AlreadyExists", err)
	}

	// The mirror comes back, and goes with its Service.
	if err := addresses.Delete(ctx, "192.0.2.9", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	mirrored("192.0.2.9", ns+"/web")
	if err := cidrs.Delete(ctx, "more", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	ready("more", "False Terminating")
	if err := create("late", "192.0.2.11"); !apierrors.IsInvalid(err) {
		t.Errorf("an address of a range that goes: %v, want Invalid", err)
	}
	for _, name := range []string{"heir", "web"} {
		if _, err := cidrs.Get(ctx, "more", metav1.GetOptions{}); err != nil {
			t.Errorf("before %s is deleted: %v", name, err)
		}
		if err := services.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	schedtest.Eventually(t, func() string {
		if _, err := cidrs.Get(ctx, "more", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Sprint("the ServiceCIDR is still there: ", err)
		}
		return ""
	})
	mirrored("192.0.2.9", "")
	mirrored("192.0.2.10", ns+"/heir") // not ours to delete
}
