package endpointslice

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/schedtest"
)

// spreadOut are n pods of each zone's node, and the nodes with that many processors.
func spreadOut(zones string, cpus, n map[string]int) (all []*corev1.Pod, nodes []*corev1.Node) {
	for _, z := range strings.Fields(zones) {
		nodes = append(nodes, schedtest.Node(z).Label(corev1.LabelTopologyZone, "zone-of-"+z).Has("cpu", fmt.Sprint(cpus[z])).Obj())
		for i := range n[z] {
			p := pod(fmt.Sprintf("%s%02d", z, i), fmt.Sprintf("10.0.%d.%d", z[0], i)).Obj()
			p.Spec.NodeName = z
			all = append(all, p)
		}
	}
	return all, nodes
}

func shared(change func(*corev1.Service)) *corev1.Service {
	return service(func(s *corev1.Service) {
		s.Annotations = map[string]string{corev1.AnnotationTopologyMode: "Auto"}
		if change != nil {
			change(s)
		}
	})
}

// hinted counts endpoints by their own zone and the one they are for: "a>b".
func hinted(plan Plan) map[string]int {
	out := map[string]int{}
	for _, s := range plan.Create {
		for _, e := range s.Endpoints {
			to := "none"
			if e.Hints != nil {
				to = strings.TrimPrefix(e.Hints.ForZones[0].Name, "zone-of-")
			}
			out[strings.TrimPrefix(*e.Zone, "zone-of-")+">"+to]++
		}
	}
	return out
}

// TestSharedOut: service.kubernetes.io/topology-mode: Auto had no effect.
func TestSharedOut(t *testing.T) {
	type counts = map[string]int
	even := counts{"a": 4, "b": 4, "c": 4}
	for _, tt := range []struct {
		name  string
		zones string
		cpus  counts
		pods  counts
		want  counts
		why   string
	}{
		{"each zone has its part", "a b c", even, counts{"a": 3, "b": 3, "c": 3}, counts{"a>a": 3, "b>b": 3, "c>c": 3}, ""},
		{"a little uneven", "a b c", even, counts{"a": 5, "b": 4, "c": 6}, counts{"a>a": 5, "b>b": 4, "c>c": 5, "c>b": 1}, ""}, // 4.17 is the least
		{"a zone has none", "a b", even, counts{"a": 6}, counts{"a>a": 3, "a>b": 3}, ""},
		{"as processors are", "a b", counts{"a": 12, "b": 4}, counts{"a": 4, "b": 4}, counts{"a>a": 4, "b>a": 1, "b>b": 3}, ""},
		{"too few", "a b c", even, counts{"a": 1, "b": 1}, counts{"a>none": 1, "b>none": 1}, "2 endpoints that are ready are too few for 3 zones"},
		{"one zone", "a", even, counts{"a": 3}, counts{"a>none": 3}, "the nodes are of one zone"},
		{"not to be shared out evenly", "a b", counts{"a": 4, "b": 4}, counts{"a": 3}, counts{"a>none": 3}, "over 20% more"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			all, nodes := spreadOut(tt.zones, tt.cpus, tt.pods)
			plan := Decide(shared(nil), all, zone, nodes, nil)
			if got := hinted(plan); fmt.Sprint(got) != fmt.Sprint(tt.want) || !strings.Contains(plan.NoHints, tt.why) || (plan.NoHints == "") != (tt.why == "") {
				t.Errorf("%v, %q; want %v, %q", got, plan.NoHints, tt.want, tt.why)
			}
			if again := Decide(shared(nil), all, zone, nodes, plan.Create); len(again.Create)+len(again.Update)+len(again.Delete) > 0 {
				t.Errorf("a second pass changes something: %+v", again)
			}
		})
	}
	all, nodes := spreadOut("a b", even, counts{"a": 4, "b": 4})
	all[0].Status.Conditions = nil
	if got := hinted(Decide(shared(nil), all, zone, nodes, nil)); got["a>none"] != 1 || got["a>a"] != 3 {
		t.Errorf("one that is not ready: %v", got)
	}
	nodes[0].Status.Conditions[0].Status = corev1.ConditionUnknown
	if plan := Decide(shared(nil), all, zone, nodes, nil); plan.NoHints == "" {
		t.Errorf("a zone whose node is lost: %v", hinted(plan))
	}
	delete(nodes[1].Labels, corev1.LabelTopologyZone)
	if plan := Decide(shared(nil), all, zone, nodes, nil); !strings.Contains(plan.NoHints, `node "b" has no label topology.kubernetes.io/zone`) {
		t.Errorf("a node without a zone: %q", plan.NoHints)
	}
	if got := hinted(Decide(service(nil), all, zone, nodes, nil)); got["a>none"]+got["b>none"] != 8 {
		t.Errorf("a Service that does not ask for it: %v", got)
	}
}

// The bug: of several reasons another one was given each time, and an event told of it.
func TestTheReasonStays(t *testing.T) {
	_, nodes := spreadOut("a b", map[string]int{"a": 4, "b": 4}, nil)
	reasons := map[string]bool{}
	for range 50 {
		ready := func(zone string) discoveryv1.Endpoint {
			return discoveryv1.Endpoint{Zone: &zone, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)}, TargetRef: &corev1.ObjectReference{Name: "p"}}
		}
		reasons[shareOut(shared(nil), nodes, map[group][]discoveryv1.Endpoint{
			{discoveryv1.AddressTypeIPv4, "1"}: {ready("zone-of-a")},
			{discoveryv1.AddressTypeIPv4, "2"}: {ready("elsewhere"), ready("elsewhere")},
			{discoveryv1.AddressTypeIPv4, "3"}: {ready("zone-of-a"), ready("zone-of-b")},
		})] = true
	}
	if len(reasons) != 1 || reasons[""] {
		t.Errorf("reasons are %v, want one", reasons)
	}
}

// No zone's endpoints are asked for more than a fifth above the mean, and none leaves
// its zone needlessly.
func TestSharedOutKeepsItsBound(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	given := 0
	for round := range 2000 {
		cpus, n := map[string]int{}, map[string]int{}
		zones := []string{"a b", "a b c", "a b c d"}[r.IntN(3)]
		for _, z := range strings.Fields(zones) {
			cpus[z], n[z] = 1+r.IntN(8), r.IntN(12)
		}
		all, nodes := spreadOut(zones, cpus, n)
		by, why := sharesOf(nodes)
		if why != "" {
			t.Fatal(why)
		}
		plan := Decide(shared(nil), all, zone, nodes, nil)
		got := hinted(plan)
		if plan.NoHints != "" {
			continue
		}
		given++
		have, total, moved, lacking := map[string]int{}, 0, 0, 0
		for path, count := range got {
			from, to, _ := strings.Cut(path, ">")
			have[to] += count
			total += count
			if from != to {
				moved += count
			}
		}
		for z, part := range by {
			z := strings.TrimPrefix(z, "zone-of-")
			least := int(math.Ceil(part*float64(total)/(1+overload) - 1e-9))
			if have[z] < least {
				t.Fatalf("round %d: zone %s with %.2f of the processors has %d of %d endpoints: %v", round, z, part, have[z], total, got)
			}
			lacking += max(0, least-n[z])
		}
		if total != len(all) || moved != lacking {
			t.Fatalf("round %d: %d of %d endpoints, %d moved where %d lacked: %v", round, total, len(all), moved, lacking, got)
		}
	}
	if given < 500 {
		t.Errorf("only %d of 2000 rounds had hints", given)
	}
}

func TestHintsAreTold(t *testing.T) {
	events := record.NewFakeRecorder(10)
	c := &controller{events: events, hints: map[types.UID]string{}}
	s := shared(nil)
	for _, step := range []struct{ why, want string }{
		{"", ""}, {"x", "Warning TopologyAwareHintsDisabled"}, {"x", ""}, {"y", "Warning TopologyAwareHintsDisabled"},
		{"5 of z", "5 of z"}, {"17 of z", ""}, {`node "a" is u`, `node "a" is u`}, {`node "b2" is u`, ""}, {"", "Normal TopologyAwareHintsEnabled"}, {"", ""},
	} {
		c.tellHints(s, step.why)
		got := ""
		if len(events.Events) > 0 {
			got = <-events.Events
		}
		if !strings.Contains(got, step.want) || (got == "") != (step.want == "") {
			t.Errorf("%q: %q, want %q", step.why, got, step.want)
		}
	}
}
