package gateway

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/clusterd/clusterd/apis/gateway"
	"github.com/clusterd/clusterd/sched/gateway/crds"
)

// TestServicePorts: each listener's port has one of the pods', which stays; what
// an administrator added does too.
func TestServicePorts(t *testing.T) {
	port := func(name string, port, target int32) corev1.ServicePort {
		return corev1.ServicePort{Name: name, Port: port, TargetPort: intstr.FromInt32(target), Protocol: corev1.ProtocolTCP}
	}
	named := corev1.ServicePort{Name: "http", Port: 80, TargetPort: intstr.FromString("http")}
	for _, tt := range []struct {
		name   string
		has    []corev1.ServicePort
		want   []int32
		ports  []corev1.ServicePort
		differ bool
	}{
		{"nothing to do", []corev1.ServicePort{named}, nil, []corev1.ServicePort{named}, false},
		{"its own port", []corev1.ServicePort{named}, []int32{8081}, []corev1.ServicePort{named, port("gateway-8081", 8081, 8081)}, true},
		{"ports that pods may not or cannot have", []corev1.ServicePort{named}, []int32{81, 8080, 8443, 9090},
			[]corev1.ServicePort{named, port("gateway-81", 81, 10000), port("gateway-8080", 8080, 10001), port("gateway-8443", 8443, 10002), port("gateway-9090", 9090, 10003)}, true},
		{"one that another has taken", []corev1.ServicePort{named, port("gateway-81", 81, 10000)}, []int32{81, 10000},
			[]corev1.ServicePort{named, port("gateway-81", 81, 10000), port("gateway-10000", 10000, 10001)}, true},
		{"there already", []corev1.ServicePort{named, port("gateway-81", 81, 10007)}, []int32{81}, []corev1.ServicePort{named, port("gateway-81", 81, 10007)}, false},
		{"the administrator's", []corev1.ServicePort{named, port("own", 81, 5)}, []int32{81}, []corev1.ServicePort{named, port("own", 81, 5)}, false},
		{"no listener any more", []corev1.ServicePort{named, port("gateway-81", 81, 10000), port("own", 82, 5)}, nil, []corev1.ServicePort{named, port("own", 82, 5)}, true},
	} {
		todo, err := plan([]*corev1.Service{{ObjectMeta: metav1.ObjectMeta{Namespace: gateway.ServiceNamespace, Name: gateway.SharedService}, Spec: corev1.ServiceSpec{Ports: tt.has}}},
			map[string]gateway.Service{gateway.SharedService: {Ports: tt.want}}, nil)
		got := tt.has
		for _, s := range todo.update {
			got = s.Spec.Ports
		}
		if diff := cmp.Diff(tt.ports, got); diff != "" || len(todo.update) > 0 != tt.differ || err != nil {
			t.Errorf("%s: %d %v %s", tt.name, len(todo.update), err, diff)
		}
	}
}

// TestPlan: each Gateway has a Service, whose ports lead to ports of the pods that no
// other Service's lead to. It goes with its Gateway, and stays while nothing of that
// can be served.
func TestPlan(t *testing.T) {
	service := func(name, manager string, ports ...int32) *corev1.Service {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: gateway.ServiceNamespace, Name: name, Labels: map[string]string{managedBy: manager}}}
		for i := 0; i < len(ports); i += 2 {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint(portPrefix, ports[i]), Port: ports[i], TargetPort: intstr.FromInt32(ports[i+1])})
		}
		return s
	}
	short := func(list []*corev1.Service) (out []string) {
		for _, s := range list {
			text := s.Name
			for _, p := range s.Spec.Ports {
				text += fmt.Sprintf(" %d>%d", p.Port, p.TargetPort.IntVal)
			}
			out = append(out, text)
		}
		return out
	}
	got, err := plan([]*corev1.Service{
		service(gateway.SharedService, "", 9000, 9000, 81, 10000), service("kept", manager, 80, 10001), service("more", manager, 80, 10002), service("gone", manager, 80, 10003),
		service("idle", manager, 80, 10004),
		service("pinned", manager, 80, 10008), service("waits", manager, 80, 10009), service("second", manager, 80, 10008),
	}, map[string]gateway.Service{
		"kept": {Ports: []int32{80}}, "more": {Ports: []int32{80, 443}}, "new": {Ports: []int32{80, 9000, 9001}, Address: "192.0.2.8"}, "idle": {}, "none": {}, "second": {Ports: []int32{80}},
		"pinned": {Ports: []int32{80}, Address: "192.0.2.7"},
	}, map[string]bool{"waits": true})
	if err != nil {
		t.Fatal(err)
	}
	for what, diff := range map[string]string{
		"create": cmp.Diff([]string{"new 80>10007 9000>10010 9001>9001"}, short(got.create)),
		"update": cmp.Diff([]string{"clusterd-ingress", "more 80>10002 443>10005", "pinned 80>10008", "second 80>10006"}, short(got.update)),
		"remove": cmp.Diff([]string{"gone 80>10003"}, short(got.remove)),
	} {
		if diff != "" {
			t.Error(what, diff)
		}
	}
	if a, b := got.create[0].Spec.LoadBalancerIP, got.update[2].Spec.LoadBalancerIP; a != "192.0.2.8" || b != "192.0.2.7" {
		t.Error("the addresses that are asked for:", a, b)
	}
	if s := got.create[0].Spec; s.Type != corev1.ServiceTypeLoadBalancer || len(s.Selector) == 0 || !own(got.create[0]) {
		t.Errorf("%+v", got.create[0])
	}
	full := service("full", manager)
	for at := int32(firstLocal); at <= lastLocal; at++ {
		full.Spec.Ports = append(full.Spec.Ports, corev1.ServicePort{Name: "x", TargetPort: intstr.FromInt32(at)})
	}
	if _, err := plan([]*corev1.Service{full}, map[string]gateway.Service{"full": {Ports: []int32{80}}}, nil); err == nil || !strings.Contains(err.Error(), "no free port from 10000 to 32767") {
		t.Error(err)
	}
}

func TestAddresses(t *testing.T) {
	s := &corev1.Service{Spec: corev1.ServiceSpec{ExternalIPs: []string{"192.0.2.1"}}}
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{Hostname: "lb.example"}}
	for i := range 30 {
		s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprint("192.0.2.", 2+i))
	}
	got := addresses(s)
	if len(got) != 16 || *got[0].Type != "Hostname" || got[0].Value != "lb.example" || *got[1].Type != "IPAddress" {
		t.Errorf("%+v", got)
	}
}

// TestForeign: what a user installed is not changed.
func TestForeign(t *testing.T) {
	one := func(release, applied string) *unstructured.Unstructured {
		u := &unstructured.Unstructured{Object: map[string]any{}}
		u.SetAnnotations(map[string]string{crds.BundleVersion: release})
		if applied != "" {
			u.SetAnnotations(map[string]string{crds.BundleVersion: release, lastApplied: applied})
		}
		return u
	}
	if foreign(one("v1.6.0", ""), "v1.6.0") || !foreign(one("v1.7.0", ""), "v1.6.0") || !foreign(one("v1.6.0", "{}"), "v1.6.0") {
		t.Error("wrong")
	}
	for _, tt := range []struct {
		release, made string
		want          bool
	}{{"v1.6.3", "", true}, {"v1.10.0", "v1.6.3", true}, {"v1.6.3", "v1.6.3", false}, {"v1.6.0", "v1.6.3", false}, {"v1.6.0", "?", false}} {
		if newer(tt.release, tt.made) != tt.want {
			t.Errorf("%s after %s: not %t", tt.release, tt.made, tt.want)
		}
	}
}

// TestCRDs: each kind that is looked at is there, in the version that is asked
// for. Without them the error says what to do.
func TestCRDs(t *testing.T) {
	all, release, err := crds.Read()
	if err != nil {
		if !strings.Contains(err.Error(), "make build") || os.Getenv("CLUSTERD_TEST_ALL") != "" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	if newer("v1.6.3", release) || len(all) != len(gateway.Resources) {
		t.Errorf("%d of release %s", len(all), release)
	}
	for i, one := range all {
		versions, _, err := unstructured.NestedSlice(one.Object, "spec", "versions")
		if err != nil || one.GetName() != gateway.Resources[i]+"."+gateway.Group {
			t.Error(one.GetName(), err)
		}
		served := []*metav1.APIResourceList{}
		for _, v := range versions {
			v := v.(map[string]any)
			if v["served"] == true {
				served = append(served, &metav1.APIResourceList{GroupVersion: gateway.Group + "/" + v["name"].(string), APIResources: []metav1.APIResource{{Name: gateway.Resources[i]}}})
			}
		}
		if gvr, ok := gateway.Version(gateway.Resources[i], served); !ok || gvr.Version != "v1" {
			t.Error(one.GetName(), gvr)
		}
	}
}
