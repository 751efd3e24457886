package scheduler

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/replicaset"
	"github.com/clusterd/clusterd/sched/schedtest"
)

func world(nodes []*schedtest.NodeBuilder, placed ...*schedtest.PodBuilder) *snapshot {
	s := newSnapshot()
	for _, n := range nodes {
		s.setNode(n.Obj())
	}
	for _, p := range placed {
		s.setPod(p.Obj())
	}
	return s
}

func TestFilters(t *testing.T) {
	node, pod := schedtest.Node, schedtest.Pod
	nodes := func(n ...*schedtest.NodeBuilder) []*schedtest.NodeBuilder { return n }
	pods := func(p ...*schedtest.PodBuilder) []*schedtest.PodBuilder { return p }
	zone := func(name, zone string) *schedtest.NodeBuilder { return node(name).Label("zone", zone) }
	tests := []struct {
		name   string
		nodes  []*schedtest.NodeBuilder
		placed []*schedtest.PodBuilder
		pod    *schedtest.PodBuilder
		fit    string // names of the nodes left, or
		why    string // the explanation
	}{
		{name: "no nodes", pod: pod("p"), why: "no nodes available to schedule pods"},
		{name: "all fit", nodes: nodes(node("a"), node("b")), pod: pod("p").CPU("4"), fit: "a b"},
		{name: "cordoned", nodes: nodes(node("a").Cordon(), node("b")), pod: pod("p"), fit: "b"},
		{
			name: "cordon tolerated", nodes: nodes(node("a").Cordon()), fit: "a",
			pod: pod("p").Tolerate(corev1.Toleration{Key: corev1.TaintNodeUnschedulable, Operator: corev1.TolerationOpExists}),
		},
		{
			name:   "sum of requests",
			nodes:  nodes(node("a"), node("b").Has("cpu", "1")),
			placed: pods(pod("x").On("a").CPU("3500m")),
			pod:    pod("p").CPU("600m"), fit: "b",
		},
		{
			name: "reasons are counted and sorted",
			nodes: nodes(node("a").Has("cpu", "500m"),
				node("b").Taint("k", "v", corev1.TaintEffectNoSchedule), node("c").Taint("k", "v", corev1.TaintEffectNoExecute)),
			pod: pod("p").CPU("1"),
			why: "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had untolerated taint {k: v}.",
		},
		{
			name:  "one node, two reasons",
			nodes: nodes(node("a").Has("cpu", "500m").Has("memory", "1Mi")),
			pod:   pod("p").CPU("1").Memory("1Gi"),
			why:   "0/1 nodes are available: 1 Insufficient cpu, 1 Insufficient memory.",
		},
		{
			name:   "who asks for nothing gets a place where too much is promised",
			nodes:  nodes(node("a").Has("cpu", "1").Has("memory", "1Gi").Has("ephemeral-storage", "1Gi")),
			placed: pods(pod("x").On("a").CPU("2").Memory("2Gi").Disk("2Gi")),
			pod:    pod("p"), fit: "a",
		},
		{
			name:   "disk is counted as the others are",
			nodes:  nodes(node("a").Has("ephemeral-storage", "10Gi"), node("b").Has("ephemeral-storage", "20Gi"), node("c").Has("ephemeral-storage", "10Gi")),
			placed: pods(pod("x").On("a").Disk("8Gi")),
			pod:    pod("p").Disk("5Gi"), fit: "b c",
		},
		{
			name: "too little disk", nodes: nodes(node("a").Has("ephemeral-storage", "1Gi")), pod: pod("p").Disk("2Gi"),
			why: "0/1 nodes are available: 1 Insufficient ephemeral-storage.",
		},
		{
			name: "number of pods", nodes: nodes(node("a").Has("pods", "1")), placed: pods(pod("x").On("a")),
			pod: pod("p"), why: "0/1 nodes are available: 1 Too many pods.",
		},
		{
			name: "finished pods take nothing", nodes: nodes(node("a").Has("pods", "1")),
			placed: pods(pod("x").On("a").Phase(corev1.PodSucceeded)), pod: pod("p"), fit: "a",
		},
		{
			name: "node selector", nodes: nodes(node("a"), node("b").Label("disk", "ssd")),
			pod: pod("p").Select("disk", "ssd"), fit: "b",
		},
		{
			name: "node selector nowhere", nodes: nodes(node("a")), pod: pod("p").Select("disk", "ssd"),
			why: "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.",
		},
		{
			name: "taint tolerated", nodes: nodes(node("a").Taint("k", "v", corev1.TaintEffectNoSchedule)), fit: "a",
			pod: pod("p").Tolerate(corev1.Toleration{Key: "k", Value: "v", Effect: corev1.TaintEffectNoSchedule}),
		},
		{
			name: "prefer-no-schedule is no filter", nodes: nodes(node("a").Taint("k", "v", corev1.TaintEffectPreferNoSchedule)),
			pod: pod("p"), fit: "a",
		},
		{
			name: "host port", nodes: nodes(node("a"), node("b")), placed: pods(pod("x").On("a").HostPort(80)),
			pod: pod("p").HostPort(80), fit: "b",
		},
		{
			name: "host port nowhere", nodes: nodes(node("a")), placed: pods(pod("x").On("a").HostPort(80)), pod: pod("p").HostPort(80),
			why: "0/1 nodes are available: 1 node(s) didn't have free ports for the requested pod ports.",
		},
		{
			name: "apart", nodes: nodes(zone("a", "1"), zone("b", "1"), zone("c", "2")), placed: pods(pod("x").Label("app", "db").On("a")),
			pod: pod("p").Apart("zone", "app", "db"), fit: "c",
		},
		{
			name: "apart, the other way round", nodes: nodes(node("a")),
			placed: pods(pod("x").On("a").Apart(corev1.LabelHostname, "app", "web")), pod: pod("p").Label("app", "web"),
			why: "0/1 nodes are available: 1 node(s) didn't satisfy existing pods anti-affinity rules.",
		},
		{
			name: "together", nodes: nodes(zone("a", "1"), zone("b", "1"), zone("c", "2")), placed: pods(pod("x").Label("app", "db").On("a")),
			pod: pod("p").Together("zone", "app", "db"), fit: "a b",
		},
		{
			name: "together, the first of its kind", nodes: nodes(zone("a", "1"), node("none")),
			pod: pod("p").Label("app", "db").Together("zone", "app", "db"), fit: "a",
		},
		{
			name: "together with nobody", nodes: nodes(zone("a", "1")), pod: pod("p").Together("zone", "app", "db"),
			why: "0/1 nodes are available: 1 node(s) didn't match pod affinity rules.",
		},
		{
			name: "spread", nodes: nodes(zone("a", "1"), zone("b", "2")),
			placed: pods(pod("x").Label("app", "web").On("a"), pod("y").Label("app", "web").On("a"), pod("z").Label("app", "web").On("b")),
			pod:    pod("p").Label("app", "web").Spread("zone", 1, corev1.DoNotSchedule, "app", "web"), fit: "b",
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			v := runFilters(world(test.nodes, test.placed...), newPodInfo(test.pod.Obj()))
			var fit []string
			for _, n := range v.fit {
				fit = append(fit, n.name)
			}
			slices.Sort(fit)
			if got := strings.Join(fit, " "); got != test.fit {
				t.Fatalf("fits %q, want %q; %s", got, test.fit, v.explain())
			}
			if len(fit) == 0 && v.explain() != test.why {
				t.Errorf("explains\n%s, want\n%s", v.explain(), test.why)
			}
		})
	}
}

func TestRequestsOfInitContainersAndOverhead(t *testing.T) {
	cpu := func(q string) corev1.ResourceRequirements {
		return corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": resource.MustParse(q)}}
	}
	p := schedtest.Pod("p").Obj()
	p.Spec.Containers = []corev1.Container{{Name: "a", Resources: cpu("200m")}, {Name: "b", Resources: cpu("300m")}}
	p.Spec.InitContainers = []corev1.Container{
		{Name: "sidecar", Resources: cpu("100m"), RestartPolicy: ptr.To(corev1.ContainerRestartPolicyAlways)},
		{Name: "init", Resources: cpu("1")},
	}
	p.Spec.Overhead = corev1.ResourceList{"cpu": resource.MustParse("50m")}
	if got := requests(p).cpu; got != 1150 { // init beside the sidecar, plus overhead
		t.Errorf("requests %dm, want 1150m", got)
	}
}

func TestBest(t *testing.T) {
	node, pod := schedtest.Node, schedtest.Pod
	rs := schedtest.ReplicaSet("web", 3)
	owned := func(name string) *schedtest.PodBuilder { return pod(name).OwnedBy(rs, replicaset.Kind) }
	preferSSD := pod("p")
	preferSSD.P.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
		PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{{Weight: 50, Preference: corev1.NodeSelectorTerm{
			MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "disk", Operator: corev1.NodeSelectorOpIn, Values: []string{"ssd"}}},
		}}},
	}}
	tests := []struct {
		name   string
		nodes  []*schedtest.NodeBuilder
		placed []*schedtest.PodBuilder
		pod    *schedtest.PodBuilder
		want   string
	}{
		{"emptier", []*schedtest.NodeBuilder{node("a"), node("b")}, []*schedtest.PodBuilder{pod("x").On("a").CPU("1").Memory("2Gi")}, pod("p").CPU("100m"), "b"},
		{"best-effort pods count too", []*schedtest.NodeBuilder{node("a"), node("b")}, []*schedtest.PodBuilder{pod("x").On("a"), pod("y").On("a"), pod("z").On("b")}, pod("p"), "b"},
		{"away from siblings, even to a fuller node", []*schedtest.NodeBuilder{node("a"), node("b")}, []*schedtest.PodBuilder{owned("x").On("a"), pod("y").On("b").CPU("1500m").Memory("3Gi")}, owned("p"), "b"},
		{"away from a soft taint", []*schedtest.NodeBuilder{node("a").Taint("k", "v", corev1.TaintEffectPreferNoSchedule), node("b")}, []*schedtest.PodBuilder{pod("x").On("b").CPU("1").Memory("2Gi")}, pod("p"), "b"},
		{"to a preferred label", []*schedtest.NodeBuilder{node("a").Label("disk", "ssd"), node("b")}, []*schedtest.PodBuilder{pod("x").On("a").CPU("1").Memory("2Gi")}, preferSSD, "a"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s, p := world(test.nodes, test.placed...), newPodInfo(test.pod.Obj())
			if got := best(s, p, runFilters(s, p).fit).name; got != test.want {
				t.Errorf("chose %s, want %s", got, test.want)
			}
		})
	}
}

func TestTiesAreBrokenByChance(t *testing.T) {
	s := world([]*schedtest.NodeBuilder{schedtest.Node("a"), schedtest.Node("b"), schedtest.Node("c")})
	p := newPodInfo(schedtest.Pod("p").Obj())
	seen := map[string]int{}
	for range 300 {
		seen[best(s, p, runFilters(s, p).fit).name]++
	}
	if len(seen) != 3 {
		t.Errorf("300 choices of equal nodes came to %v", seen)
	}
}

// Pods that ask for nothing piled up on one node as soon as their assumed
// weights exceeded the nodes' CPU: more memory in use looked more balanced.
func TestManyBestEffortPodsSpread(t *testing.T) {
	var nodes []*schedtest.NodeBuilder
	for _, name := range []string{"a", "b", "c"} { // much more memory than CPU
		nodes = append(nodes, schedtest.Node(name).Has(corev1.ResourceCPU, "2").Has(corev1.ResourceMemory, "24Gi"))
	}
	s := world(nodes)
	count := map[string]int{}
	for i := range 99 {
		p := newPodInfo(schedtest.Pod(fmt.Sprint("p", i)).Obj())
		n := best(s, p, runFilters(s, p).fit).name
		s.assume(p, n)
		count[n]++
	}
	for _, n := range []string{"a", "b", "c"} {
		if count[n] < 25 {
			t.Errorf("99 pods were placed as %v", count)
		}
	}
}

// The sums that the snapshot keeps incrementally are those of the pods it holds.
func TestSnapshotSums(t *testing.T) {
	s := world([]*schedtest.NodeBuilder{schedtest.Node("a")})
	a := schedtest.Pod("a").CPU("1")
	s.assume(newPodInfo(a.Obj()), "a")
	s.setPod(a.On("a").Obj()) // confirmed
	s.forget(a.P.UID)         // too late
	if got := s.nodes["a"].requested.cpu; got != 1000 {
		t.Errorf("requested %dm, want 1000m", got)
	}
	s.setPod(schedtest.Pod("a").On("a").CPU("500m").Obj()) // resized
	b := schedtest.Pod("b").CPU("2").Apart(corev1.LabelHostname, "x", "y")
	s.assume(newPodInfo(b.Obj()), "a")
	if got := s.nodes["a"].requested.cpu; got != 2500 || len(s.repelling.byID) != 1 {
		t.Errorf("requested %dm, repelling %d", got, len(s.repelling.byID))
	}
	s.forget(b.P.UID)
	s.removePod(a.P.UID)
	if got := s.nodes["a"].requested.cpu; got != 0 || len(s.repelling.byID) != 0 || len(s.placed)+len(s.assumed) != 0 {
		t.Errorf("something is left: %dm %v %v %v", got, s.repelling.byID, s.placed, s.assumed)
	}
	s.setPod(schedtest.Pod("c").On("unknown").Obj())
	s.removeNode("a")
	s.removePod("uid-c")
	if len(s.nodes) != 0 {
		t.Errorf("nodes left: %v", s.nodes)
	}
}

func TestNodeChange(t *testing.T) {
	n := func() *schedtest.NodeBuilder { return schedtest.Node("a") }
	heartbeat := n()
	heartbeat.N.Status.Conditions[0].LastHeartbeatTime = metav1.NewTime(time.Unix(1, 0))
	tests := []struct {
		name     string
		old, new *schedtest.NodeBuilder
		want     change
	}{
		{"heartbeat", n(), heartbeat, 0},
		{"uncordon", n().Cordon(), n(), nodeSpec},
		{"taint", n(), n().Taint("k", "v", corev1.TaintEffectNoSchedule), nodeSpec},
		{"label", n(), n().Label("k", "v"), nodeLabels},
		{"grown", n(), n().Has("cpu", "8"), nodeAllocatable},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if got := nodeChange(test.old.Obj(), test.new.Obj()); got != test.want {
				t.Errorf("got %b, want %b", got, test.want)
			}
		})
	}
	// A node that is removed wakes who waits for a spread, and nobody else.
	for _, f := range filters {
		if woken := f.wakes()&nodeChange(n().Obj(), nil) != 0; woken != (f.Name == "PodTopologySpread") {
			t.Errorf("%s is woken by a node that is removed: %t", f.Name, woken)
		}
	}
}

// BenchmarkSchedule is one decision, with two pods on each node already: of a
// ReplicaSet's plain pods, of pods that spread over zones, of pods that keep
// apart from their like, of pods whose image every second node has.
func BenchmarkSchedule(b *testing.B) {
	rs := schedtest.ReplicaSet("web", 1)
	for _, kind := range []struct {
		name string
		pod  func(name string) *schedtest.PodBuilder
	}{
		{"plain", func(name string) *schedtest.PodBuilder { return schedtest.Pod(name) }},
		{"spread", func(name string) *schedtest.PodBuilder {
			return schedtest.Pod(name).Spread("zone", 1, corev1.DoNotSchedule, "app", "web")
		}},
		{"apart", func(name string) *schedtest.PodBuilder {
			return schedtest.Pod(name).Apart(corev1.LabelHostname, "app", "other")
		}},
		{"image", func(name string) *schedtest.PodBuilder {
			p := schedtest.Pod(name)
			p.P.Spec.Containers[0].Image = "example.com/half:1"
			return p
		}},
	} {
		for _, nodes := range []int{3, 100, 1000, 5000} {
			b.Run(fmt.Sprintf("%s/nodes=%d", kind.name, nodes), func(b *testing.B) {
				s := newSnapshot()
				for i := range nodes {
					n := schedtest.Node(fmt.Sprintf("n%d", i)).Label("zone", fmt.Sprint(i%3)).Label(corev1.LabelTopologyZone, fmt.Sprint(i%3)).Has("pods", "1000000")
					if i%2 == 0 {
						n.N.Status.Images = []corev1.ContainerImage{{Names: []string{"example.com/half:1"}, SizeBytes: 1 << 30}}
					}
					s.setNode(n.Obj())
				}
				made := 0
				next := func() *podInfo {
					made++
					return newPodInfo(kind.pod(fmt.Sprintf("p%d", made)).Label("app", "web").CPU("1m").OwnedBy(rs, replicaset.Kind).Obj())
				}
				for i := range 2 * nodes {
					s.assume(next(), fmt.Sprintf("n%d", i%nodes))
				}
				b.ReportAllocs()
				for b.Loop() {
					p := next()
					v := runFilters(s, p)
					s.assume(p, best(s, p, v.fit).name)
				}
			})
		}
	}
}

// The bug of issue 9: what a resize grants, or an infeasible one gives back,
// arrives in the status alone, and the node stayed over-reserved.
func TestResizeInStatusFreesTheNode(t *testing.T) {
	old := schedtest.Pod("a").On("n").CPU("2").Obj()
	main := &old.Spec.Containers[0]
	old.Status.ContainerStatuses = []corev1.ContainerStatus{{
		Name: main.Name, AllocatedResources: main.Resources.Requests.DeepCopy(),
		Resources: &corev1.ResourceRequirements{Requests: main.Resources.Requests.DeepCopy()},
	}}
	status := func(cpu string) corev1.ContainerStatus {
		list := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu)}
		return corev1.ContainerStatus{Name: main.Name, AllocatedResources: list, Resources: &corev1.ResourceRequirements{Requests: list}}
	}
	down := old.DeepCopy()
	down.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1")}
	granted := down.DeepCopy()
	granted.Status.ContainerStatuses = []corev1.ContainerStatus{status("1")}
	up := old.DeepCopy()
	up.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("8")}
	infeasible := up.DeepCopy()
	infeasible.Status.Conditions = append(infeasible.Status.Conditions, corev1.PodCondition{
		Type: corev1.PodResizePending, Status: corev1.ConditionTrue, Reason: corev1.PodReasonInfeasible,
	})
	for _, tt := range []struct {
		name          string
		before, after *corev1.Pod
		cpu           int64
	}{
		{"resized down", down, granted, 1000},
		{"infeasible", up, infeasible, 2000},
	} {
		parked := schedtest.Pod("parked").CPU("3").Obj()
		queue, clock := newTestQueue(parked)
		s := &scheduler{queue: queue, snapshot: newSnapshot()}
		s.snapshot.setNode(schedtest.Node("n").Has(corev1.ResourceCPU, "4").Obj())
		take(t, queue, "parked")
		s.onPod(nil, tt.before)
		queue.park(parked.UID, podGone)
		clock.Step(10 * time.Second)
		s.onPod(tt.before, tt.after)
		if got := s.snapshot.nodes["n"].requested.cpu; got != tt.cpu {
			t.Errorf("%s: the node counts %dm, want %dm", tt.name, got, tt.cpu)
		}
		take(t, queue, "parked") // it does not sleep on
	}
}
