package ipaddress

import (
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/networking"
	"github.com/clusterd/clusterd/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func service(name string, born int64, ips ...string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, CreationTimestamp: metav1.Unix(born, 0)},
		Spec:       corev1.ServiceSpec{ClusterIPs: ips},
	}
}

func TestDecide(t *testing.T) {
	const address = "10.96.0.7"
	web, api := service("web", 1, address), service("api", 2, address)
	ours := newAddress(address, web)
	going := ours.DeepCopy()
	going.DeletionTimestamp = &metav1.Time{Time: time.Unix(3, 0)}
	foreign := func(name string) *networkingv1.IPAddress {
		a := newAddress(address, service(name, 0))
		a.Labels = nil
		return a
	}
	for _, tt := range []struct {
		name    string
		holders []*corev1.Service
		have    *networkingv1.IPAddress
		want    string
	}{
		{"no Service has it", nil, nil, ""},
		{"new", []*corev1.Service{web}, nil, "create web"},
		{"two for a moment", []*corev1.Service{api, web}, nil, "create web"},
		{"as it is", []*corev1.Service{web}, ours, ""},
		{"as it is, for one of two", []*corev1.Service{api, web}, ours, ""},
		{"the Service is gone", nil, ours, "delete"},
		{"it goes already", nil, going, ""},
		{"now another's", []*corev1.Service{api}, ours, "delete"},
		{"now another's, and it goes already", []*corev1.Service{api}, going, ""},
		{"another Service keeps it", nil, foreign("web"), ""},
		{"it was kept for this one", []*corev1.Service{web}, foreign("web"), ""},
		{"another took it", []*corev1.Service{web}, foreign("else"), "stolen web"},
	} {
		step := Decide(address, tt.holders, tt.have)
		got := ""
		switch {
		case step.Create != nil:
			got = "create " + step.Create.Spec.ParentRef.Name
			if errs := networking.IPAddress().Validate(step.Create); len(errs) > 0 {
				t.Errorf("%s: %v", tt.name, errs)
			}
		case step.Delete:
			got = "delete"
		case step.Stolen != nil:
			got = "stolen " + step.Stolen.Name
		}
		if got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestNewAddress(t *testing.T) {
	for address, family := range map[string]string{"10.96.0.7": "IPv4", "2001:db8::7": "IPv6"} {
		a := newAddress(address, service("web", 1))
		if a.Name != address || a.Labels[networkingv1.LabelIPAddressFamily] != family || a.Labels[networkingv1.LabelManagedBy] != networking.IPAddressManager {
			t.Errorf("%+v", a)
		}
	}
	if got := addressesOf(service("web", 1, "None", "", "2001:DB8::7")); !slices.Equal(got, []string{"2001:db8::7"}) {
		t.Errorf("got %q", got)
	}
}
