package endpointslice

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/clusterd/clusterd/sched/schedtest"
)

var now = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

func service(change func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: schedtest.Namespace, Name: "web", UID: "svc", Labels: map[string]string{"team": "a"}},
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app": "web"}, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, ClusterIP: "10.96.0.7",
			Ports: []corev1.ServicePort{{Name: "http", Port: 80, TargetPort: intstr.FromInt32(8080)}},
		},
	}
	if change != nil {
		change(s)
	}
	return s
}

func pod(name string, ip string) *schedtest.PodBuilder {
	b := schedtest.Pod(name).On("n1").Ready(now)
	b.P.Status.PodIP, b.P.Status.PodIPs = ip, []corev1.PodIP{{IP: ip}}
	return b
}

func zone(node string) string { return "zone-of-" + node }

// show writes slices as "family ports: address(RST)…", sorted; the letters
// stand for ready, serving and terminating.
func show(list []*discoveryv1.EndpointSlice) string {
	var out []string
	for _, s := range list {
		text := string(s.AddressType)
		for _, p := range s.Ports {
			text += fmt.Sprintf(" %s=%d", *p.Name, *p.Port)
		}
		text += ":"
		for _, e := range s.Endpoints {
			text += " " + e.Addresses[0]
			for _, c := range []struct {
				set    *bool
				letter string
			}{{e.Conditions.Ready, "R"}, {e.Conditions.Serving, "S"}, {e.Conditions.Terminating, "T"}} {
				if *c.set {
					text += c.letter
				}
			}
		}
		out = append(out, text)
	}
	slices.Sort(out)
	return strings.Join(out, "; ")
}

func TestDecideFromNothing(t *testing.T) {
	notReady := pod("c", "10.0.0.3")
	notReady.P.Status.Conditions = nil
	dual := pod("d", "10.0.0.4")
	dual.P.Status.PodIPs = append(dual.P.Status.PodIPs, corev1.PodIP{IP: "fd00::4"})
	named := func(name string, port int32) *schedtest.PodBuilder {
		b := pod(name, "10.0.0."+fmt.Sprint(port%10))
		b.P.Spec.Containers[0].Ports = []corev1.ContainerPort{{Name: "web", ContainerPort: port}}
		return b
	}
	byName := func(s *corev1.Service) { s.Spec.Ports[0].TargetPort = intstr.FromString("web") }
	tests := []struct {
		name   string
		change func(*corev1.Service)
		pods   []*schedtest.PodBuilder
		want   string
	}{
		{"no pods", nil, nil, "IPv4:"},
		{"ready", nil, []*schedtest.PodBuilder{pod("a", "10.0.0.1")}, "IPv4 http=8080: 10.0.0.1RS"},
		{"not ready", nil, []*schedtest.PodBuilder{notReady}, "IPv4 http=8080: 10.0.0.3"},
		{"not ready, published", func(s *corev1.Service) { s.Spec.PublishNotReadyAddresses = true }, []*schedtest.PodBuilder{notReady}, "IPv4 http=8080: 10.0.0.3R"},
		{"terminating", nil, []*schedtest.PodBuilder{pod("a", "10.0.0.1").Deleting(now)}, "IPv4 http=8080: 10.0.0.1ST"},
		{"no address, no node, ended", nil, []*schedtest.PodBuilder{pod("a", ""), pod("b", "10.0.0.2").On(""), pod("c", "10.0.0.3").Phase(corev1.PodFailed)}, "IPv4:"},
		{"two families", func(s *corev1.Service) { s.Spec.IPFamilies = append(s.Spec.IPFamilies, corev1.IPv6Protocol) }, []*schedtest.PodBuilder{dual}, "IPv4 http=8080: 10.0.0.4RS; IPv6 http=8080: fd00::4RS"},
		{"named port", byName, []*schedtest.PodBuilder{named("a", 8081), named("b", 8082), named("c", 8081).On("n2")}, "IPv4 http=8081: 10.0.0.1RS 10.0.0.1RS; IPv4 http=8082: 10.0.0.2RS"},
		{"named port that a pod lacks", byName, []*schedtest.PodBuilder{pod("a", "10.0.0.1")}, "IPv4: 10.0.0.1RS"},
		{"port without a target", func(s *corev1.Service) { s.Spec.Ports[0].TargetPort = intstr.IntOrString{} }, []*schedtest.PodBuilder{pod("a", "10.0.0.1")}, "IPv4 http=80: 10.0.0.1RS"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var all []*corev1.Pod
			for _, b := range test.pods {
				all = append(all, b.Obj())
			}
			s := service(test.change)
			plan := Decide(s, all, zone, nil, nil)
			if got := show(plan.Create); got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
			if again := Decide(s, all, zone, nil, plan.Create); len(again.Create)+len(again.Update)+len(again.Delete) != 0 {
				t.Errorf("not settled: %+v", again)
			}
		})
	}
}

func TestSliceMetadata(t *testing.T) {
	b := pod("a", "10.0.0.1")
	b.P.Spec.Hostname, b.P.Spec.Subdomain = "a", "web"
	plan := Decide(service(func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone }), []*corev1.Pod{b.Obj()}, zone, nil, nil)
	s := plan.Create[0]
	for k, want := range map[string]string{"kubernetes.io/service-name": "web", "endpointslice.kubernetes.io/managed-by": managedBy, "team": "a", "service.kubernetes.io/headless": ""} {
		if got, ok := s.Labels[k]; !ok || got != want {
			t.Errorf("label %s is %q", k, got)
		}
	}
	if ref := metav1.GetControllerOf(s); ref == nil || ref.UID != "svc" || ref.Kind != "Service" {
		t.Errorf("owner %v", ref)
	}
	e := s.Endpoints[0]
	if *e.NodeName != "n1" || *e.Zone != "zone-of-n1" || *e.Hostname != "a" || e.TargetRef.Name != "a" {
		t.Errorf("endpoint %+v", e)
	}
}

// A change of one pod touches one slice; full slices are followed by others;
// what is empty goes.
func TestDecideKeepsSlices(t *testing.T) {
	var all []*corev1.Pod
	for i := range 250 {
		all = append(all, pod(fmt.Sprintf("p%03d", i), fmt.Sprintf("10.0.%d.%d", i/200, i%200+1)).Obj())
	}
	s := service(nil)
	have := Decide(s, all, zone, nil, nil).Create
	if len(have) != 3 || len(have[0].Endpoints) != 100 || len(have[2].Endpoints) != 50 {
		t.Fatalf("%d slices", len(have))
	}
	// One pod stops being ready.
	all[7] = all[7].DeepCopy()
	all[7].Status.Conditions = nil
	plan := Decide(s, all, zone, nil, have)
	if len(plan.Update) != 1 || plan.Update[0].Name != have[0].Name || len(plan.Create)+len(plan.Delete) != 0 {
		t.Fatalf("%d updates, %d creates, %d deletes", len(plan.Update), len(plan.Create), len(plan.Delete))
	}
	// One goes and one comes: it takes the free place.
	all[7] = pod("new", "10.0.9.9").Obj()
	plan = Decide(s, all, zone, nil, have)
	if len(plan.Update) != 1 || len(plan.Update[0].Endpoints) != 100 || len(plan.Create)+len(plan.Delete) != 0 {
		t.Fatalf("%d updates, %d creates, %d deletes", len(plan.Update), len(plan.Create), len(plan.Delete))
	}
	// All but a few of the first slice go.
	plan = Decide(s, all[:5], zone, nil, have)
	if len(plan.Update) != 1 || len(plan.Delete) != 2 || len(plan.Create) != 0 {
		t.Fatalf("%d updates, %d creates, %d deletes", len(plan.Update), len(plan.Create), len(plan.Delete))
	}
	// All go: one empty slice is left, without ports.
	plan = Decide(s, nil, zone, nil, have)
	if len(plan.Create) != 1 || len(plan.Create[0].Endpoints) != 0 || len(plan.Delete) != 3 {
		t.Fatalf("%d updates, %d creates, %d deletes", len(plan.Update), len(plan.Create), len(plan.Delete))
	}
}
