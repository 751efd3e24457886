package rebalance

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	corelisters "k8s.io/client-go/listers/core/v1"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/sched/schedtest"
	"github.com/clusterd/clusterd/sched/scheduler"
)

var start = time.Unix(1_000_000, 0)

// replica is a pod of a ReplicaSet, ready for long.
func replica(name, set string) *schedtest.PodBuilder {
	return schedtest.Pod(name).On("a").Ready(start.Add(-time.Hour)).OwnedBy(schedtest.ReplicaSet(set, 1), schema.GroupVersionKind{Group: "apps", Version: "v1", Kind: "ReplicaSet"})
}

// TestWhoMayBeMoved looks at one thing that is different at a time.
func TestWhoMayBeMoved(t *testing.T) {
	with := func(f func(*corev1.Pod)) *corev1.Pod {
		p := replica("p", "rs").Obj()
		f(p)
		return p
	}
	volume := func(v corev1.VolumeSource) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: v}} }
	}
	empty := corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{SizeLimit: ptr.To(resource.MustParse("1Mi"))}}
	for name, c := range map[string]struct {
		pod  *corev1.Pod
		want bool
	}{
		"a replica":      {with(func(*corev1.Pod) {}), true},
		"it wishes not":  {with(func(p *corev1.Pod) { p.Annotations = map[string]string{names.Rebalance: "false"} }), false},
		"no controller":  {with(func(p *corev1.Pod) { p.OwnerReferences = nil }), false},
		"of a DaemonSet": {with(func(p *corev1.Pod) { p.OwnerReferences[0].Kind = "DaemonSet" }), false},
		"of a Job":       {with(func(p *corev1.Pod) { p.OwnerReferences[0].Kind = "Job" }), false},
		"of a workflow":  {with(func(p *corev1.Pod) { p.OwnerReferences[0].Kind = "Workflow" }), false},
		"of an operator, may go": {with(func(p *corev1.Pod) {
			p.OwnerReferences[0].Kind = "Cluster"
			p.Annotations = map[string]string{names.Rebalance: "true"}
		}), true},
		"runs once":        {with(func(p *corev1.Pod) { p.Spec.RestartPolicy = corev1.RestartPolicyNever }), false},
		"of a file":        {with(func(p *corev1.Pod) { p.OwnerReferences[0].Kind = "Node" }), false},
		"critical":         {with(func(p *corev1.Pod) { p.Spec.Priority = ptr.To[int32](critical) }), false},
		"emptyDir":         {with(volume(empty)), false},
		"hostPath":         {with(volume(corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/x"}})), false},
		"a volume's claim": {with(volume(corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}})), true},
		"emptyDir, may go": {with(func(p *corev1.Pod) { volume(empty)(p); p.Annotations = map[string]string{names.Rebalance: "true"} }), true},
		"devices":          {with(func(p *corev1.Pod) { p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu"}} }), false},
		"a gang":           {with(func(p *corev1.Pod) { p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: ptr.To("g")} }), false},
		"not ready":        {with(func(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }), false},
		"ready for seconds": {with(func(p *corev1.Pod) {
			p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(start.Add(-time.Minute))
		}), false},
		"on its way out": {with(func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: start} }), false},
		"ended":          {with(func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }), false},
	} {
		if got := movable(c.pod, defaultSettled, start); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// plan is a planner whose moves are given.
type plan struct {
	moves []scheduler.Move
	asked int
}

func (p *plan) Moves(may func(*corev1.Pod) bool, most int) (out []scheduler.Move) {
	p.asked++
	for _, m := range p.moves {
		if may(m.Pod) && len(out) < most {
			out = append(out, m)
		}
	}
	return out
}

// TestPass: one pod of a controller in half an hour; budgets are kept; no pass
// while a pod waits for a node.
func TestPass(t *testing.T) {
	client := fake.NewSimpleClientset()
	var evicted []string
	answer := map[string]error{"guarded": apierrors.NewTooManyRequests("budget", 1), "gone": apierrors.NewNotFound(corev1.Resource("pods"), "gone"), "broken": errors.New("no answer")}
	client.PrependReactor("create", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		e := action.(clienttesting.CreateAction).GetObject().(*policyv1.Eviction)
		if action.GetSubresource() != "eviction" || e.DeleteOptions == nil || e.DeleteOptions.Preconditions == nil || e.DeleteOptions.Preconditions.UID == nil {
			t.Errorf("%s of %+v", action.GetSubresource(), e)
		}
		if err := answer[e.Name]; err != nil {
			return true, nil, err
		}
		evicted = append(evicted, e.Name)
		return true, nil, nil
	})
	p := &plan{}
	clock, recorder := clocktesting.NewFakeClock(start), record.NewFakeRecorder(100)
	indexer := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	c := &controller{client: client, clock: clock, events: recorder, pods: corelisters.NewPodLister(indexer), planner: p, settled: defaultSettled, moved: map[types.UID]time.Time{}}
	for name, set := range map[string]string{"guarded": "s1", "gone": "s2", "broken": "s3", "x1": "s4", "x2": "s4", "y": "s5"} {
		pod := replica(name, set).Obj()
		pod.OwnerReferences[0].UID, pod.UID = types.UID(set), types.UID(name)
		if err := indexer.Add(pod); err != nil {
			t.Fatal(err)
		}
		known := pod.DeepCopy() // to the scheduler, which does not follow conditions
		known.Status = corev1.PodStatus{}
		p.moves = append(p.moves, scheduler.Move{Pod: known, From: "a", To: "b", Kind: scheduler.MoveLoad, Why: "of its load"})
	}
	slices.SortFunc(p.moves, func(a, b scheduler.Move) int { return -len(a.Pod.Name) + len(b.Pod.Name) })
	// Three a pass: those that cannot be evicted are in the way of no later pass for ever,
	// as the planner is asked again; here they are taken off.
	c.pass(t.Context())
	if len(evicted) > 0 {
		t.Fatalf("%v are evicted, though all three of the plan cannot be", evicted)
	}
	p.moves = slices.DeleteFunc(p.moves, func(m scheduler.Move) bool { return answer[m.Pod.Name] != nil })
	c.pass(t.Context())
	slices.Sort(evicted)
	if fmt.Sprint(evicted) != "[x1 y]" && fmt.Sprint(evicted) != "[x2 y]" {
		t.Fatalf("%v are evicted, want y and one of x", evicted)
	}
	if event := <-recorder.Events; event != "Normal Rebalanced Evicted from node a for rebalancing: of its load" {
		t.Errorf("the event %q", event)
	}
	c.pass(t.Context())
	if len(evicted) != 2 {
		t.Fatalf("at once %v are evicted", evicted)
	}
	waits := schedtest.Pod("waits").Obj()
	if err := indexer.Add(waits); err != nil {
		t.Fatal(err)
	}
	clock.Step(rest)
	asked := p.asked
	c.pass(t.Context())
	if p.asked != asked {
		t.Error("it plans while a pod waits")
	}
	if err := indexer.Delete(waits); err != nil {
		t.Fatal(err)
	}
	if c.pass(t.Context()); len(evicted) != 4 {
		t.Errorf("after the rest %v are evicted", evicted)
	}
}
