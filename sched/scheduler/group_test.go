package scheduler

import (
	"errors"
	"fmt"
	"math/rand" //nolint:depguard // repeatable by its seed
	"slices"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/schedtest"
)

func TestGangWaitsForItsPods(t *testing.T) {
	x := newTable(t)
	x.node(schedtest.Node("n1").Obj()) // 4 CPUs
	pods := gangPods("a", 4, "1")
	x.pods(pods[:2]...)
	x.decide()
	x.want("no PodGroup yet", "")
	x.group(schedtest.Gang("a", 3))
	x.later()
	x.decide()
	x.want("two of three", "")
	x.pods(pods[2])
	x.decide()
	x.want("the third has come", "a0 a1 a2")
	x.answerAll()
	x.pods(pods[3])
	x.decide()
	x.want("one more is placed by itself", "a0 a1 a2 a3")
}

func TestBasicGroupIsNoGang(t *testing.T) {
	x := newTable(t)
	x.node(schedtest.Node("n1").Has("cpu", "1").Obj())
	g := schedtest.Gang("a", 1)
	g.Spec.SchedulingPolicy = schedulingv1beta1.PodGroupSchedulingPolicy{Basic: &schedulingv1beta1.BasicSchedulingPolicy{}}
	x.group(g)
	x.pods(gangPods("a", 2, "1")...)
	x.decide()
	x.want("as many as fit", "a0")
}

// Two gangs want the room of one: one gets it whole, the other holds nothing, says
// why, and comes when there is room.
func TestTwoGangsForTheRoomOfOne(t *testing.T) {
	x := newTable(t)
	for _, n := range []string{"n1", "n2"} {
		x.node(schedtest.Node(n).Obj())
	}
	x.group(schedtest.Gang("a", 3))
	x.group(schedtest.Gang("b", 3))
	a, b := gangPods("a", 3, "2"), gangPods("b", 3, "2")
	for i := range 3 { // interleaved
		x.pods(a[i], b[i])
	}
	x.decide()
	x.want("the first whole one", "a0 a1 a2")
	if why := x.why("b0"); why != `PodGroup "b" needs nodes for 3 pods at the same time; 1 of 3 found one; pod "b1": 0/2 nodes are available: 2 Insufficient cpu.` {
		t.Errorf("b0 waits because %q", why)
	}
	if x.why("b0") != x.why("b2") {
		t.Errorf("b2 waits because %q", x.why("b2"))
	}
	x.pods(schedtest.Pod("small").CPU("2"))
	x.decide()
	x.want("what the gang does not hold is for others", "a0 a1 a2 small")
	x.answerAll()
	for _, p := range []string{"a0", "a1", "a2"} {
		pod, err := x.s.lister.Pods(schedtest.Namespace).Get(p)
		if err != nil {
			t.Fatal(err)
		}
		x.pod(pod, nil)
	}
	x.later()
	x.decide()
	x.want("room again", "b0 b1 b2 small")
}

func TestGangsByPriority(t *testing.T) {
	x := newTable(t)
	x.node(schedtest.Node("n1").Obj())
	urgent := schedtest.Gang("b", 2)
	urgent.Spec.Priority = ptr.To[int32](10)
	x.group(schedtest.Gang("a", 2))
	x.group(urgent)
	x.pods(gangPods("a", 2, "2")...)
	x.pods(schedtest.Pod("single").CPU("1").Priority(5))
	x.pods(gangPods("b", 2, "2")...)
	x.decide()
	x.want("the more important gang before older pods", "b0 b1")
}

func TestGangPreempts(t *testing.T) {
	for _, test := range []struct {
		name    string
		n       int
		policy  *schedulingv1beta1.PreemptionPolicy
		victims []types.UID
	}{
		{"the whole gang fits then", 3, nil, []types.UID{"uid-x", "uid-y"}},
		{"it does not fit anyway", 5, nil, nil},
		{"its policy forbids it", 3, ptr.To(schedulingv1beta1.PreemptNever), nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			x := newTable(t)
			for _, n := range []string{"n1", "n2"} {
				x.node(schedtest.Node(n).Obj())
			}
			x.pods(schedtest.Pod("x").On("n1").CPU("3"), schedtest.Pod("y").On("n2").CPU("3"))
			g := schedtest.Gang("a", int32(test.n))
			g.Spec.PreemptionPolicy = test.policy
			x.group(g)
			var members []*schedtest.PodBuilder
			for _, p := range gangPods("a", test.n, "2") {
				members = append(members, p.Priority(100))
			}
			x.pods(members...)
			x.decide()
			x.want("nothing is held", "x y")
			var victims []types.UID
			for _, n := range x.s.snapshot.nominated {
				victims = append(victims, n.victims...)
			}
			slices.Sort(victims)
			if !slices.Equal(victims, test.victims) {
				t.Fatalf("victims %v, want %v", victims, test.victims)
			}
			if victims == nil {
				return
			}
			x.pods(schedtest.Pod("later").CPU("1")) // finds the room promised
			x.later()
			x.decide()
			for _, name := range []string{"x", "y"} {
				pod, err := x.s.lister.Pods(schedtest.Namespace).Get(name)
				if err != nil {
					t.Fatal(err)
				}
				x.pod(pod, nil)
			}
			x.later()
			x.decide()
			if got := x.on(); !strings.HasPrefix(got, "a0 a1 a2") {
				t.Errorf("on nodes are %q, want the gang", got)
			}
		})
	}
}

// What was promised to a gang is given back when the gang cannot be placed any more.
func TestGangGivesPromisesBack(t *testing.T) {
	x := newTable(t)
	x.node(schedtest.Node("n1").Obj())
	x.pods(schedtest.Pod("x").On("n1").CPU("4"))
	x.group(schedtest.Gang("a", 2))
	members := gangPods("a", 2, "2")
	x.pods(members[0].Priority(100), members[1].Priority(100))
	x.decide()
	if n := len(x.s.snapshot.nominated); n != 2 {
		t.Fatalf("%d promises, want one for each pod", n)
	}
	x.pod(members[1].Obj(), nil)
	x.pod(schedtest.Pod("x").On("n1").CPU("4").Obj(), nil)
	x.pods(schedtest.Pod("low").CPU("3"))
	x.later()
	x.decide()
	x.later()
	x.decide()
	x.want("one pod of two keeps no room", "low")
}

// Members that failed to be bound are placed again; those bound stay.
func TestBindOfAMemberFails(t *testing.T) {
	x := newTable(t)
	x.node(schedtest.Node("n1").Obj())
	x.group(schedtest.Gang("a", 3))
	x.pods(gangPods("a", 3, "1")...)
	x.decide()
	x.answer(1, errors.New("the API server is not well"))
	x.answerAll()
	if n := len(strings.Fields(x.on())); n != 2 {
		t.Fatalf("%d have nodes, want those whose binding came through", n)
	}
	x.later()
	x.decide()
	x.want("the third again", "a0 a1 a2")
}

// A new leader sees two of four bound: the other two are placed both, or neither.
func TestLeaderChangeInTheMiddle(t *testing.T) {
	x := newTable(t)
	node, group, pods := schedtest.Node("n1").Obj(), schedtest.Gang("a", 4), gangPods("a", 4, "1")
	x.node(node)
	x.group(group)
	x.pods(pods...)
	x.decide()
	x.answer(0, nil)
	x.answer(0, nil)
	var shown []*corev1.Pod
	for _, p := range pods {
		now, err := x.s.lister.Pods(schedtest.Namespace).Get(p.P.Name)
		if err != nil {
			t.Fatal(err)
		}
		shown = append(shown, now)
	}
	other := schedtest.Pod("other").CPU("1").On("n1").Obj()
	x.lead([]*corev1.Node{node}, []*schedulingv1beta1.PodGroup{group}, append(shown, other))
	x.decide()
	if n := len(strings.Fields(x.on())); n != 3 { // two of the gang and the other
		t.Fatalf("on nodes are %q: no room for both, so neither", x.on())
	}
	x.pod(other, nil)
	x.later()
	x.decide()
	x.want("both", "a0 a1 a2 a3")
}

func TestNodeGoesWhileAGangWaits(t *testing.T) {
	x := newTable(t)
	n1, n2 := schedtest.Node("n1").Has("cpu", "1").Obj(), schedtest.Node("n2").Has("cpu", "1").Obj()
	x.node(n1)
	x.group(schedtest.Gang("a", 2))
	pods := gangPods("a", 2, "1")
	x.pods(pods[0])
	x.node(n2)
	x.decide()
	x.s.onNode(n2, nil)
	x.pods(pods[1])
	x.decide()
	x.want("one node is too few", "")
	x.node(n2)
	x.later()
	x.decide()
	x.want("it is back", "a0 a1")
}

func TestMinCountIsLowered(t *testing.T) {
	x := newTable(t)
	x.node(schedtest.Node("n1").Has("cpu", "2").Obj())
	x.group(schedtest.Gang("a", 3))
	x.pods(gangPods("a", 3, "1")...)
	x.decide()
	x.want("three do not fit", "")
	lower := schedtest.Gang("a", 2)
	x.group(lower)
	x.later()
	x.decide()
	if n := len(strings.Fields(x.on())); n != 2 {
		t.Errorf("%q have nodes, want two", x.on())
	}
}

// A pod that is to be near a sibling may come before it, and succeeded pods count
// for those that come in the place of failed ones.
func TestMembersThatNeedEachOther(t *testing.T) {
	x := newTable(t)
	x.node(schedtest.Node("n1").Label("zone", "1").Obj())
	x.group(schedtest.Gang("a", 2))
	x.pods(schedtest.Pod("follower").Group("a").CPU("2").Together("zone", "role", "first"), schedtest.Pod("leader").Group("a").CPU("1").Label("role", "first"))
	x.decide()
	x.want("both", "follower leader")

	y := newTable(t)
	y.node(schedtest.Node("n1").Obj())
	y.group(schedtest.Gang("a", 2))
	y.pods(schedtest.Pod("done").Group("a").On("n1").Phase(corev1.PodSucceeded), schedtest.Pod("failed").Group("a").On("n1").Phase(corev1.PodFailed))
	y.pods(schedtest.Pod("again").Group("a"))
	y.decide()
	y.want("the replacement", "again")
}

// The loss of a pod on one node makes room on others of its zone as well: the gang is
// promised the node of its victim.
func TestGangIsPromisedTheNodeOfItsVictims(t *testing.T) {
	x := newTable(t)
	for _, n := range []string{"n1", "n2"} {
		x.node(schedtest.Node(n).Label("zone", "z").Obj())
	}
	x.pods(schedtest.Pod("y").On("n1").CPU("2").Priority(200), schedtest.Pod("x").Label("app", "x").On("n1").CPU("1"))
	x.group(schedtest.Gang("a", 1))
	x.pods(schedtest.Pod("a0").Group("a").CPU("1").Priority(100).Apart("zone", "app", "x"))
	x.decide()
	promised := ""
	for _, n := range x.s.snapshot.nominated {
		promised += n.node
	}
	if promised != "n1" {
		t.Errorf("promised is %q, the victim is on n1", promised)
	}
}

// A volume cannot be had for one member: none is bound, all give their room back, and
// nobody joins them while that is not known.
func TestGangWhoseVolumesFail(t *testing.T) {
	x := newTable(t)
	x.node(schedtest.Node("n1").Obj())
	x.group(schedtest.Gang("a", 2))
	pods := gangPods("a", 3, "1")
	x.pods(pods[:2]...)
	x.decide()
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: schedtest.Namespace, Name: "not-there"}}
	x.begun[1].volumes = []claimChoice{{claim: claim}}
	key := loop.Key{Namespace: schedtest.Namespace, Name: "a"}
	x.s.groups.preparing[key] = true // as if it had been seen when the places were found
	x.pods(pods[2])
	x.decide()
	x.want("the third waits for the other two", "a0 a1")
	var binds, waits errgroup.Group
	x.s.bindGroup(t.Context(), x.begun, x.clock.Now(), &binds, &waits)
	_, _ = waits.Wait(), binds.Wait()
	x.begun = nil
	for _, action := range x.env.Client.(*fake.Clientset).Actions() {
		if action.GetSubresource() == "binding" {
			t.Errorf("%v was asked for", action)
		}
	}
	x.want("all have given their room back", "")
	if x.s.groups.preparing[key] {
		t.Error("the group still waits for what has failed")
	}
	x.later()
	x.decide()
	x.want("again, with the third", "a0 a1 a2")
}

// Two members want one device: the group holds none while it waits.
func TestGangGivesDevicesBack(t *testing.T) {
	x := newTable(t)
	x.s.devices.assume(&resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: schedtest.Namespace, Name: "c", UID: "c"}}, &resourcev1.AllocationResult{})
	claim := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: schedtest.Namespace, Name: "c", UID: "c"}}
	x.s.snapshot.setNode(schedtest.Node("n1").Obj())
	p := newPodInfo(schedtest.Pod("a0").Group("a").Obj())
	place := x.s.take(p, runFilters(x.s.snapshot, p))
	place.devices = []deviceChoice{{claim: claim, allocation: &resourcev1.AllocationResult{}}}
	x.s.untake(place)
	if n := len(x.s.devices.assumed) + len(x.s.snapshot.placed); n != 0 {
		t.Errorf("%d things are still assumed", n)
	}
}

// TestGangsAllOrNone: whatever comes and goes in whatever order, no decision of
// the scheduler's leaves a gang with fewer placed pods than it needs, and a gang
// without places holds nothing.
func TestGangsAllOrNone(t *testing.T) {
	for seed := range int64(30) {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) { allOrNone(t, rand.New(rand.NewSource(seed))) })
	}
}

func allOrNone(t *testing.T, r *rand.Rand) {
	x := newTable(t)
	nodes := map[string]*corev1.Node{}
	groups := map[string]*schedulingv1beta1.PodGroup{}
	shown := func() (out []*corev1.Pod) {
		for _, obj := range x.env.Informers.Core().V1().Pods().Informer().GetIndexer().List() {
			out = append(out, obj.(*corev1.Pod))
		}
		slices.SortFunc(out, func(a, b *corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
		return out
	}
	placed := func() map[string]int {
		out := map[string]int{}
		for _, name := range []string{"a", "b", "c"} {
			x.s.mu.Lock()
			out[name] = x.s.countGroup(loop.Key{Namespace: schedtest.Namespace, Name: name}).placed
			x.s.mu.Unlock()
		}
		return out
	}
	made, whole := 0, 0
	for step := range 400 {
		switch r.Intn(12) {
		case 0, 1:
			name := fmt.Sprint("n", r.Intn(4))
			if old := nodes[name]; old != nil {
				x.s.onNode(old, nil)
				delete(nodes, name)
			} else {
				nodes[name] = schedtest.Node(name).Obj()
				x.node(nodes[name])
			}
		case 2:
			name := string("abc"[r.Intn(3)])
			groups[name] = schedtest.Gang(name, int32(2+r.Intn(4)))
			x.group(groups[name])
		case 3, 4, 5:
			made++
			p := schedtest.Pod(fmt.Sprint("p", made)).CPU(fmt.Sprint(1 + r.Intn(2))).Priority(int32(r.Intn(3)))
			if r.Intn(4) > 0 {
				p.Group(string("abc"[r.Intn(3)]))
			}
			x.pods(p)
		case 6:
			if all := shown(); len(all) > 0 {
				x.pod(all[r.Intn(len(all))], nil)
			}
		case 7, 8:
			if len(x.begun) > 0 {
				var err error
				if r.Intn(4) == 0 {
					err = errors.New("refused")
				}
				x.answer(r.Intn(len(x.begun)), err)
			}
		case 9:
			x.later()
		case 10:
			if r.Intn(10) == 0 {
				var n []*corev1.Node
				for _, node := range nodes {
					n = append(n, node)
				}
				var g []*schedulingv1beta1.PodGroup
				for _, group := range groups {
					g = append(g, group)
				}
				x.lead(n, g, shown())
			}
		default:
		}
		before := placed()
		if !x.decideOne() {
			continue
		}
		for name, now := range placed() {
			if now == before[name] {
				continue
			}
			g := groups[name]
			if g == nil {
				t.Fatalf("step %d: group %s does not exist and has %d pods placed, %d before", step, name, now, before[name])
			}
			if need := int(g.Spec.SchedulingPolicy.Gang.MinCount); now < need {
				t.Fatalf("step %d: group %s needs %d; a decision placed %d, %d before", step, name, need, now, before[name])
			}
			whole++
		}
		if fault := x.fault(); fault != "" {
			t.Fatalf("step %d: %s", step, fault)
		}
	}
	t.Logf("%d decisions placed pods of a gang", whole)
}

// fault is what is wrong with the sums of the snapshot, or with what is assumed:
// nothing but what is bound or on its way counts on any node.
func (x *table) fault() string {
	x.s.mu.Lock()
	defer x.s.mu.Unlock()
	for uid := range x.s.snapshot.assumed {
		if !slices.ContainsFunc(x.begun, func(p placement) bool { return p.pod.UID == uid }) {
			return fmt.Sprintf("%s is assumed while nobody binds it", uid)
		}
	}
	for _, n := range x.s.snapshot.list {
		sum := int64(0)
		for _, p := range n.pods {
			sum += p.requests.cpu
		}
		if sum != n.requested.cpu {
			return fmt.Sprintf("node %s counts %dm, its pods ask for %dm", n.name, n.requested.cpu, sum)
		}
		if n.node != nil && sum > n.allocatable.cpu {
			return fmt.Sprintf("node %s has %dm, its pods ask for %dm", n.name, n.allocatable.cpu, sum)
		}
	}
	return ""
}
