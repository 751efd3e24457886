package endpoints

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

func service(edit ...func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "shop", Labels: map[string]string{"app": "web"}},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": "web"}, ClusterIP: "10.96.0.9", IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}},
	}
	for _, e := range edit {
		e(s)
	}
	return s
}

func selectorless(s *corev1.Service) { s.Spec.Selector = nil }

// slice of a loop with one endpoint an entry: "+10.0.0.1" is ready,
// "-10.0.0.1" is not, "~10.0.0.1" ends.
func slice(by string, port int32, entries ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("web-%d", port), Namespace: "shop",
			Labels: map[string]string{discoveryv1.LabelServiceName: "web", discoveryv1.LabelManagedBy: by},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Protocol: ptr.To(corev1.ProtocolTCP), Port: &port}},
	}
	for _, e := range entries {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{e[1:]}, NodeName: ptr.To("n1"),
			Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(e[0] == '+'), Terminating: ptr.To(e[0] == '~')},
			TargetRef:  &corev1.ObjectReference{Kind: "Pod", UID: types.UID(e[1:])},
		})
	}
	return s
}

// text of subsets: "80+10.0.0.1-10.0.0.2", ports before addresses.
func text(subsets []corev1.EndpointSubset) string {
	var parts []string
	for _, s := range subsets {
		t := ""
		for _, p := range s.Ports {
			t += fmt.Sprint(p.Port)
		}
		for _, a := range s.Addresses {
			t += "+" + a.IP
		}
		for _, a := range s.NotReadyAddresses {
			t += "-" + a.IP
		}
		parts = append(parts, t)
	}
	return strings.Join(parts, " ")
}

func TestFromSlices(t *testing.T) {
	const by = "endpointslice-controller.k8s.io"
	six := slice(by, 80, "+fd00::1")
	six.AddressType = discoveryv1.AddressTypeIPv6
	tests := []struct {
		name string
		from []*discoveryv1.EndpointSlice
		want string
	}{
		{"no endpoints", []*discoveryv1.EndpointSlice{slice(by, 80)}, ""},
		{"sorted, ends left out", []*discoveryv1.EndpointSlice{slice(by, 80, "+10.0.0.3", "-10.0.0.2", "~10.0.0.4"), slice(by, 80, "+10.0.0.1")}, "80+10.0.0.1+10.0.0.3-10.0.0.2"},
		{"other ports", []*discoveryv1.EndpointSlice{slice(by, 80, "+10.0.0.1"), slice(by, 70, "+10.0.0.2")}, "70+10.0.0.2 80+10.0.0.1"},
		{"in two slices", []*discoveryv1.EndpointSlice{slice(by, 80, "+10.0.0.1"), slice(by, 80, "+10.0.0.1")}, "80+10.0.0.1"},
		{"other family", []*discoveryv1.EndpointSlice{six, slice(by, 80, "+10.0.0.1")}, "80+10.0.0.1"},
		{"another manager's slice", []*discoveryv1.EndpointSlice{slice("me", 80, "+10.0.0.9"), slice(by, 80, "+10.0.0.1")}, "80+10.0.0.1"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			plan := Decide(service(), nil, test.from, false)
			if plan.Create == nil || text(plan.Create.Subsets) != test.want {
				t.Fatalf("plan %+v, want to create %q", plan, test.want)
			}
			if l := plan.Create.Labels; l["app"] != "web" || l[labelManagedBy] != managedBy {
				t.Errorf("labels %v", l)
			}
			if again := Decide(service(), plan.Create, test.from, false); again.Update != nil || again.Create != nil || len(again.CreateSlices) > 0 {
				t.Errorf("second pass is not quiet: %+v", again)
			}
		})
	}
}

func TestOverCapacity(t *testing.T) {
	const by = "endpointslice-controller.k8s.io"
	var from []*discoveryv1.EndpointSlice
	for i := range 11 {
		s := slice(by, 80)
		for j := range 100 {
			sign := "+"
			if i == 0 && j < 50 {
				sign = "-" // the first to be left out
			}
			s.Endpoints = append(s.Endpoints, slice(by, 80, fmt.Sprintf("%s10.0.%d.%d", sign, i, j)).Endpoints...)
		}
		from = append(from, s)
	}
	e := Decide(service(), nil, from, false).Create
	if n := len(e.Subsets[0].Addresses); n != maxAddresses || len(e.Subsets[0].NotReadyAddresses) != 0 || e.Annotations[corev1.EndpointsOverCapacity] != truncated {
		t.Errorf("%d ready, %d not, annotations %v; want 1000, 0 and over-capacity", n, len(e.Subsets[0].NotReadyAddresses), e.Annotations)
	}
	fewer := Decide(service(), e, from[:2], false).Update
	if fewer == nil || len(fewer.Subsets[0].Addresses) != 150 || len(fewer.Subsets[0].NotReadyAddresses) != 50 || fewer.Annotations[corev1.EndpointsOverCapacity] != "" {
		t.Errorf("with fewer pods: %+v", fewer)
	}
}

func manual(subsets ...corev1.EndpointSubset) *corev1.Endpoints {
	return &corev1.Endpoints{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "shop", UID: "u1", Labels: map[string]string{"a": "b"},
			Annotations: map[string]string{"c": "d", corev1.LastAppliedConfigAnnotation: "{}"}},
		Subsets: subsets,
	}
}

func subset(port int32, ready ...string) corev1.EndpointSubset {
	s := corev1.EndpointSubset{Ports: []corev1.EndpointPort{{Port: port, Protocol: corev1.ProtocolTCP}}}
	for _, ip := range ready {
		s.Addresses = append(s.Addresses, corev1.EndpointAddress{IP: ip})
	}
	return s
}

func TestMirror(t *testing.T) {
	e := manual(subset(80, "10.0.0.1", "fd00::1"), subset(90, "10.0.0.2"))
	e.Subsets[0].NotReadyAddresses = []corev1.EndpointAddress{{IP: "10.0.0.3", Hostname: "c"}, {IP: "10.0.0.1"}}
	plan := Decide(service(selectorless), e, nil, false)
	if len(plan.CreateSlices) != 3 || plan.Create != nil || plan.Update != nil {
		t.Fatalf("plan %+v, want three slices and the endpoints left alone", plan)
	}
	s := plan.CreateSlices[0]
	if len(s.Endpoints) != 2 || !*s.Endpoints[0].Conditions.Ready || *s.Endpoints[1].Conditions.Ready || *s.Endpoints[1].Hostname != "c" || *s.Ports[0].Port != 80 {
		t.Errorf("first slice %+v", s)
	}
	if s.Labels[discoveryv1.LabelManagedBy] != "endpointslicemirroring-controller.k8s.io" || s.Labels[discoveryv1.LabelServiceName] != "web" || s.Labels["a"] != "b" ||
		len(s.Annotations) != 1 || s.OwnerReferences[0].Kind != "Endpoints" || s.OwnerReferences[0].UID != "u1" {
		t.Errorf("metadata %+v", s.ObjectMeta)
	}
	if plan.CreateSlices[1].AddressType != discoveryv1.AddressTypeIPv6 {
		t.Errorf("second slice %+v", plan.CreateSlices[1])
	}
	have := plan.CreateSlices
	if again := Decide(service(selectorless), e, have, false); len(again.CreateSlices)+len(again.UpdateSlices)+len(again.DeleteSlices) > 0 {
		t.Errorf("second pass is not quiet: %+v", again)
	}
	changed := manual(subset(80, "10.0.0.7"))
	next := Decide(service(selectorless), changed, have, false)
	if len(next.UpdateSlices) != 1 || next.UpdateSlices[0].Endpoints[0].Addresses[0] != "10.0.0.7" || len(next.DeleteSlices) != 2 || len(next.CreateSlices) != 0 {
		t.Errorf("after a change: %+v", next)
	}
}

func TestMirrorCapacity(t *testing.T) {
	s := subset(80)
	for i := range maxAddresses + 5 {
		s.Addresses = append(s.Addresses, corev1.EndpointAddress{IP: fmt.Sprintf("10.0.%d.%d", i/250, i%250)})
	}
	plan := Decide(service(selectorless), manual(s), nil, false)
	if len(plan.CreateSlices) != 1 || len(plan.CreateSlices[0].Endpoints) != maxAddresses || plan.LeftOut != 5 {
		t.Errorf("%d slices, %d left out; want 1 full one and 5", len(plan.CreateSlices), plan.LeftOut)
	}
}

// TestWhose: whose endpoints and slices are touched at all.
func TestWhose(t *testing.T) {
	ours := manual(subset(80, "10.0.0.1"))
	ours.Labels[labelManagedBy] = managedBy
	skipped := manual(subset(80, "10.0.0.1"))
	skipped.Labels[discoveryv1.LabelSkipMirror] = "true"
	election := manual(subset(80, "10.0.0.1"))
	election.Annotations[leaderAnnotation] = "{}"
	ending := manual(subset(80, "10.0.0.1"))
	ending.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	kubernetes := service(selectorless, func(s *corev1.Service) { s.Namespace, s.Name = "default", "kubernetes" })
	external := service(func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeExternalName })
	mirrored := []*discoveryv1.EndpointSlice{slice(mirrorer, 80, "+10.0.0.1")}
	tests := []struct {
		name      string
		service   *corev1.Service
		endpoints *corev1.Endpoints
		slices    []*discoveryv1.EndpointSlice
		gone      bool
		want      string
	}{
		{"early endpoints wait", nil, manual(subset(80, "10.0.0.1")), nil, false, ""},
		{"they go with their service", nil, manual(subset(80, "10.0.0.1")), nil, true, "delete"},
		{"ours go without one", nil, ours, nil, false, "delete"},
		{"an election stays", nil, election, nil, true, ""},
		{"an election is no service", service(selectorless), election, nil, false, ""},
		{"not to be mirrored", service(selectorless), skipped, mirrored, false, "unmirror"},
		{"ending", service(selectorless), ending, mirrored, false, "unmirror"},
		{"no endpoints any more", service(selectorless), nil, mirrored, false, "unmirror"},
		{"a selector came", service(), manual(subset(80, "10.0.0.1")), mirrored, false, "update unmirror"},
		{"external name", external, nil, nil, false, ""},
		{"no selector, nothing there", service(selectorless), nil, nil, false, ""},
		{"the API", kubernetes, nil, []*discoveryv1.EndpointSlice{slice("clusterd", 443, "+192.0.2.1")}, false, "create skip"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			plan := Decide(test.service, test.endpoints, test.slices, test.gone)
			var got []string
			if plan.Create != nil {
				got = append(got, "create")
				if plan.Create.Labels[discoveryv1.LabelSkipMirror] == "true" {
					got = append(got, "skip")
				}
			}
			if plan.Update != nil {
				got = append(got, "update")
			}
			if plan.Delete != nil {
				got = append(got, "delete")
			}
			if len(plan.CreateSlices)+len(plan.UpdateSlices) > 0 {
				got = append(got, "mirror")
			}
			if len(plan.DeleteSlices) > 0 {
				got = append(got, "unmirror")
			}
			if s := strings.Join(got, " "); s != test.want {
				t.Errorf("%q, want %q", s, test.want)
			}
		})
	}
}
