package server_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

func service(name string, change func(*corev1.ServiceSpec)) *corev1.Service {
	s := &corev1.Service{ObjectMeta: meta(name), Spec: corev1.ServiceSpec{
		Selector: map[string]string{"app": name}, Ports: []corev1.ServicePort{{Port: 80}},
	}}
	if change != nil {
		change(&s.Spec)
	}
	return s
}

func TestClusterAddresses(t *testing.T) {
	s := servertest.Start(t, func(c *server.Config) { c.ServiceCIDR = "10.96.0.0/29" }) // .1 to .6
	ctx, services := t.Context(), s.Client.CoreV1().Services("default")
	create := func(name string, change func(*corev1.ServiceSpec)) (*corev1.Service, error) {
		return services.Create(ctx, service(name, change), metav1.CreateOptions{})
	}
	at := func(address string) func(*corev1.ServiceSpec) {
		return func(spec *corev1.ServiceSpec) { spec.ClusterIP = address }
	}

	chosen := must[*corev1.Service](t)(create("chosen", at("10.96.0.3")))
	if chosen.Spec.ClusterIP != "10.96.0.3" || *chosen.Spec.IPFamilyPolicy != corev1.IPFamilyPolicySingleStack || len(chosen.Spec.IPFamilies) != 1 {
		t.Errorf("chosen: %+v", chosen.Spec)
	}
	for address, want := range map[string]string{
		"10.96.0.3": "provided IP is already allocated",
		"10.97.0.1": "provided IP is not in the valid range: the range of valid IPs is 10.96.0.0/29",
		"10.96.0.0": "provided IP is not in the valid range",
		"10.96.0.7": "provided IP is not in the valid range",
		"10.96.0":   "must be a valid IP address",
	} {
		if _, err := create("bad", at(address)); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want Invalid: %s", address, err, want)
		}
	}
	if headless := must[*corev1.Service](t)(create("headless", at("None"))); headless.Spec.ClusterIP != "None" {
		t.Errorf("headless: %s", headless.Spec.ClusterIP)
	}
	external := must[*corev1.Service](t)(create("external", func(spec *corev1.ServiceSpec) {
		*spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "example.com"}
	}))
	if external.Spec.ClusterIP != "" {
		t.Errorf("external: %s", external.Spec.ClusterIP)
	}
	must[*corev1.Service](t)(services.Create(ctx, service("ghost", nil), metav1.CreateOptions{DryRun: []string{"All"}}))

	seen := map[string]bool{"10.96.0.3": true}
	for i := range 5 {
		any := must[*corev1.Service](t)(create(fmt.Sprint("any-", i), nil))
		if address, err := netip.ParseAddr(any.Spec.ClusterIP); err != nil || seen[any.Spec.ClusterIP] || !netip.MustParsePrefix("10.96.0.0/29").Contains(address) {
			t.Errorf("any-%d got %q", i, any.Spec.ClusterIP)
		}
		seen[any.Spec.ClusterIP] = true
	}
	if _, err := create("one-too-many", nil); !apierrors.IsInternalError(err) || !strings.Contains(err.Error(), "range is full") {
		t.Errorf("%v, want: range is full", err)
	}
	// A refused Service gives its address back, a deleted one too.
	if err := services.Delete(ctx, "any-2", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := create("bad", func(spec *corev1.ServiceSpec) { spec.Ports[0].Port = 0 }); !apierrors.IsInvalid(err) {
		t.Errorf("%v, want Invalid", err)
	}
	must[*corev1.Service](t)(create("last", nil))

	// An update that says nothing of the address keeps it.
	chosen.Spec.ClusterIP, chosen.Spec.ClusterIPs = "", nil
	chosen.Spec.Ports[0].Port = 81
	if kept := must[*corev1.Service](t)(services.Update(ctx, chosen, metav1.UpdateOptions{})); kept.Spec.ClusterIP != "10.96.0.3" {
		t.Errorf("kept: %q", kept.Spec.ClusterIP)
	}
}

func TestBadServiceRange(t *testing.T) {
	for _, cidr := range []string{"nonsense", "10.0.0.0/31"} {
		if _, err := server.New(server.Config{Storage: servertest.NewMemory().Decorator(), ServiceCIDR: cidr}); err == nil || !strings.Contains(err.Error(), "ServiceCIDR") {
			t.Errorf("%s: %v", cidr, err)
		}
	}
}
