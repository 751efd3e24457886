package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
)

// placements are the pods that have a node, as the store's history tells one write
// after the other.
type placements struct {
	allocatable map[string]int64 // processors of nodes, in thousandths
	on          map[types.UID]string
	asks        map[types.UID]int64
	names       map[types.UID]string
	sums        map[string]int64
	bindings    int
}

func newPlacements(nodes []corev1.Node) *placements {
	p := &placements{allocatable: map[string]int64{}, on: map[types.UID]string{}, asks: map[types.UID]int64{}, names: map[types.UID]string{}, sums: map[string]int64{}}
	for i := range nodes {
		p.allocatable[nodes[i].Name] = nodes[i].Status.Allocatable.Cpu().MilliValue()
	}
	return p
}

// see takes note of a write, and says what is wrong by it: a pod that changes its node,
// a node that is promised more than it has.
func (p *placements) see(kind watch.EventType, pod *corev1.Pod) error {
	before, had := p.on[pod.UID]
	ended := kind == watch.Deleted || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
	switch node := pod.Spec.NodeName; {
	case had && node != before:
		return fmt.Errorf("pod %s goes from node %s to %q", pod.Name, before, node)
	case had && ended:
		p.sums[before] -= p.asks[pod.UID]
		delete(p.on, pod.UID)
	case !had && !ended && node != "":
		for i := range pod.Spec.Containers {
			p.asks[pod.UID] += pod.Spec.Containers[i].Resources.Requests.Cpu().MilliValue()
		}
		p.on[pod.UID], p.names[pod.UID] = node, pod.Name
		p.sums[node] += p.asks[pod.UID]
		p.bindings++
		if has, known := p.allocatable[node]; !known || p.sums[node] > has {
			return fmt.Errorf("pod %s makes node %s be asked for %dm of %dm", pod.Name, node, p.sums[node], has)
		}
	}
	return nil
}

// room is how many pods that ask for so much find a node yet.
func (p *placements) room(each int64) (n int) {
	for node, has := range p.allocatable {
		n += int(max(0, has-p.sums[node]) / each)
	}
	return n
}

func TestPlacements(t *testing.T) {
	on := func(name, node, cpu string, phase corev1.PodPhase) *corev1.Pod {
		p := pod(name)
		p.UID, p.Spec.NodeName, p.Status.Phase = types.UID(name), node, phase
		p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu)}
		return p
	}
	type write struct {
		kind watch.EventType
		pod  *corev1.Pod
	}
	for _, tt := range []struct {
		name   string
		writes []write
		wrong  string
	}{
		{"they fit", []write{{watch.Added, on("a", "", "1", "")}, {watch.Modified, on("a", "n", "1", "")}, {watch.Modified, on("b", "n", "1", "")}}, ""},
		{"too many", []write{{watch.Added, on("a", "n", "1", "")}, {watch.Modified, on("b", "n", "1100m", "")}}, "pod b makes node n be asked for 2100m of 2000m"},
		{"for a moment", []write{{watch.Added, on("a", "n", "2", "")}, {watch.Added, on("b", "n", "1", "")}, {watch.Deleted, on("a", "n", "2", "")}}, "pod b makes"},
		{"one after the other", []write{{watch.Added, on("a", "n", "2", "")}, {watch.Modified, on("a", "n", "2", corev1.PodFailed)}, {watch.Added, on("b", "n", "1", "")}}, ""},
		{"moved", []write{{watch.Added, on("a", "n", "1", "")}, {watch.Modified, on("a", "m", "1", "")}}, "pod a goes from node n"},
		{"an unknown node", []write{{watch.Added, on("a", "x", "1", "")}}, "pod a makes node x"},
	} {
		p := newPlacements([]corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("2")}}}})
		var err error
		for _, w := range tt.writes {
			if err = errors.Join(err, p.see(w.kind, w.pod)); err != nil {
				break
			}
		}
		if tt.wrong == "" && err != nil || tt.wrong != "" && (err == nil || !strings.Contains(err.Error(), tt.wrong)) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.wrong)
		}
	}
}

// TestE2EBurstLeaderKilled creates more pods at once than there is room for, and kills
// the leader while they are bound. The store's history shows that no node was promised
// more than it has at any moment, and that no pod was bound twice; in the end as many
// are bound as there is room for, and none is lost.
func TestE2EBurstLeaderKilled(t *testing.T) {
	e := start(t)
	ns := e.namespace("burst")
	nodes, err := e.api.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	history := newPlacements(nodes.Items)
	var there *corev1.PodList
	e.eventually("no pod of the cluster's own waits for a node", func(ctx context.Context) (err error) {
		if there, err = e.api.CoreV1().Pods("").List(ctx, metav1.ListOptions{}); err != nil {
			return err
		}
		for i := range there.Items {
			if p := &there.Items[i]; p.Spec.NodeName == "" {
				return fmt.Errorf("%s/%s: %s", p.Namespace, p.Name, brief(p))
			}
		}
		return nil
	})
	for i := range there.Items {
		if err := history.see(watch.Added, &there.Items[i]); err != nil {
			t.Fatal(err)
		}
	}
	each := int64(1) // thousandths of a processor: so many that some forty pods find room on any machine
	for history.room(each) > 50 {
		each += max(1, each/10)
	}
	room := history.room(each)
	if room < 4 {
		t.Fatalf("there is room for %d pods of %dm: the cluster's own take all", room, each)
	}
	more := max(3, room/2) // that find no node
	leader := e.leader()
	e.use(e.other(leader))
	burst := func(from, to int) {
		for i := from; i < to; i++ {
			p := pod(fmt.Sprintf("p%d", i), "sleep")
			p.Labels = map[string]string{"app": "burst"}
			// Those on the killed leader's node stay, however long the others take.
			p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute}}
			p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: *resource.NewMilliQuantity(each, resource.DecimalSI)}
			e.eventually("pod "+p.Name+" is made", func(ctx context.Context) error {
				_, err := e.api.CoreV1().Pods(ns).Create(ctx, p.DeepCopy(), metav1.CreateOptions{})
				if err != nil {
					if _, found := e.api.CoreV1().Pods(ns).Get(ctx, p.Name, metav1.GetOptions{}); found == nil {
						return nil // the answer was lost
					}
				}
				return err
			})
		}
	}
	bound := func(ctx context.Context) (n, all int, err error) {
		list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=burst"})
		if err != nil {
			return 0, 0, err
		}
		for i := range list.Items {
			if list.Items[i].Spec.NodeName != "" {
				n++
			}
		}
		return n, len(list.Items), nil
	}
	burst(0, room/2)
	e.eventually("a pod is bound", func(ctx context.Context) error {
		n, _, err := bound(ctx)
		if err == nil && n == 0 {
			err = errors.New("none is")
		}
		return err
	})
	if err := e.Kill(leader); err != nil {
		t.Fatal(err)
	}
	burst(room/2, room+more) // while nobody leads, and then another does
	if err := e.Start(t.Context(), leader); err != nil {
		t.Fatal(err)
	}
	e.eventually("as many are bound as there is room for", func(ctx context.Context) error {
		n, all, err := bound(ctx)
		if err == nil && (n != room || all != room+more) {
			err = fmt.Errorf("%d of %d are bound, there is room for %d", n, all, room)
		}
		return err
	})
	// A last write that no scheduler answers shows where the history may end.
	last := pod("last")
	last.Spec.SchedulerName = "none"
	e.create(ns, last)
	w, err := e.api.CoreV1().Pods("").Watch(t.Context(), metav1.ListOptions{ResourceVersion: there.ResourceVersion})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	writes, before := 0, history.bindings
	for event := range w.ResultChan() {
		p, ok := event.Object.(*corev1.Pod)
		if !ok {
			t.Fatalf("%s %v", event.Type, event.Object)
		}
		if p.Namespace == ns && p.Name == last.Name {
			break
		}
		writes++
		if err := history.see(event.Type, p); err != nil {
			t.Errorf("version %s: %v", p.ResourceVersion, err)
		}
	}
	if got := history.bindings - before; got != room {
		t.Errorf("the history has %d bindings, want %d", got, room)
	}
	t.Logf("%d pods for %d nodes with room for %d; the leader %s was killed; %d writes were looked at", room+more, len(nodes.Items), room, leader, writes)
}
