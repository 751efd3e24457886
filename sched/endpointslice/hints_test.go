package endpointslice

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

func TestHints(t *testing.T) {
	ready, notReady := pod("a", "10.0.0.1").Obj(), pod("b", "10.0.0.2")
	notReady.P.Status.Conditions = nil
	nowhere := func(string) string { return "" }
	show := func(h *discoveryv1.EndpointHints) (text string) {
		if h == nil {
			return "none"
		}
		for _, n := range h.ForNodes {
			text += "node " + n.Name + " "
		}
		for _, z := range h.ForZones {
			text += "zone " + z.Name
		}
		return text
	}
	for _, tt := range []struct {
		distribution, want string
		pod                *corev1.Pod
		zone               func(string) string
	}{
		{"", "none", ready, zone},
		{corev1.ServiceTrafficDistributionPreferClose, "zone zone-of-n1", ready, zone},
		{corev1.ServiceTrafficDistributionPreferSameZone, "zone zone-of-n1", ready, zone},
		{corev1.ServiceTrafficDistributionPreferSameZone, "none", ready, nowhere},
		{corev1.ServiceTrafficDistributionPreferSameNode, "node n1 zone zone-of-n1", ready, zone},
		{corev1.ServiceTrafficDistributionPreferSameNode, "node n1 ", ready, nowhere},
		{corev1.ServiceTrafficDistributionPreferSameNode, "none", notReady.Obj(), zone},
		{"PreferTheMoon", "none", ready, zone},
	} {
		s := service(func(s *corev1.Service) {
			if tt.distribution != "" {
				s.Spec.TrafficDistribution = &tt.distribution
			}
		})
		made := Decide(s, []*corev1.Pod{tt.pod}, tt.zone, nil, nil).Create
		if got := show(made[0].Endpoints[0].Hints); got != tt.want {
			t.Errorf("%q: %s, want %s", tt.distribution, got, tt.want)
		}
	}
}

// TestHintsFollow: slices get hints when the Service asks for them, others when
// a node's zone changes, and lose them again.
func TestHintsFollow(t *testing.T) {
	all := []*corev1.Pod{pod("a", "10.0.0.1").Obj()}
	have := Decide(service(nil), all, zone, nil, nil).Create
	near := corev1.ServiceTrafficDistributionPreferClose
	asks := service(func(s *corev1.Service) { s.Spec.TrafficDistribution = &near })
	for i, step := range []struct {
		service *corev1.Service
		zone    func(string) string
		want    string
	}{
		{asks, zone, "zone-of-n1"}, {asks, func(string) string { return "elsewhere" }, "elsewhere"}, {service(nil), zone, ""},
	} {
		plan := Decide(step.service, all, step.zone, nil, have)
		if len(plan.Update) != 1 {
			t.Fatalf("step %d: %d updates", i, len(plan.Update))
		}
		have = plan.Update
		got := ""
		if h := have[0].Endpoints[0].Hints; h != nil {
			got = h.ForZones[0].Name
		}
		if got != step.want {
			t.Errorf("step %d: hints for %q, want %q", i, got, step.want)
		}
		if again := Decide(step.service, all, step.zone, nil, have); len(again.Update)+len(again.Create)+len(again.Delete) != 0 {
			t.Errorf("step %d: it is never content", i)
		}
	}
}
