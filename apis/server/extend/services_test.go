package extend

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"
)

func TestServicesAreFoundByTheirEndpoints(t *testing.T) {
	factory := informers.NewSharedInformerFactory(fake.NewClientset(), 0)
	resolver := NewServiceResolver(factory)
	services, slices := factory.Core().V1().Services().Informer().GetStore(), factory.Discovery().V1().EndpointSlices().Informer().GetStore()
	service := func(name string, spec corev1.ServiceSpec) {
		spec.Ports = []corev1.ServicePort{{Name: "https", Port: 443}}
		if err := services.Add(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name}, Spec: spec}); err != nil {
			t.Fatal(err)
		}
	}
	// No cluster address is needed, and what has one is not called by it.
	service("ready", corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: corev1.ClusterIPNone})
	service("starting", corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.0.9"})
	service("outside", corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "hooks.example.com"})
	for name, ready := range map[string]bool{"ready": true, "starting": false} {
		err := slices.Add(&discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "n", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.244.1.2"}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
			Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("https"), Port: ptr.To[int32](8443)}},
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{
		"ready": "https://10.244.1.2:8443", "outside": "https://hooks.example.com:443",
		"starting": "no endpoints available", "missing": "not found",
	} {
		u, err := resolver.ResolveEndpoint("n", name, 443)
		switch {
		case strings.HasPrefix(want, "https:"):
			if err != nil || u.String() != want {
				t.Errorf("%s: %v, %v; want %s", name, u, err, want)
			}
		case err == nil || !strings.Contains(err.Error(), want):
			t.Errorf("%s: %v, %v; want an error with %q", name, u, err, want)
		}
	}
	if _, err := resolver.ResolveEndpoint("n", "ready", 80); err == nil {
		t.Error("a port that the Service does not have was found")
	}
}
