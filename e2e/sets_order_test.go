package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"
)

// none is an image that no node has and no registry knows.
const none = "clusterd.local/none:1"

// orderCases are the rows of CONFORMANCE about the order and the share in which
// sets change, and about the revisions they keep.
func orderCases(e *env, ns string) {
	ctx := e.t.Context()
	e.cases("revisions", []int{101}, func(e *env) { revisionCase(e, ns) })
	e.cases("DaemonSet rolled back", []int{109}, func(e *env) {
		template := deployment("back", 1).Spec.Template
		_, err := e.api.AppsV1().DaemonSets(ns).Create(ctx, &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "back"},
			Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: template.Labels}, Template: template}}, metav1.CreateOptions{})
		e.must(err)
		before := map[types.UID]bool{}
		for _, p := range e.podsReady(ns, "app=back", 3) {
			before[p.UID] = true
		}
		e.ctl("-n", ns, "set", "image", "daemonset/back", "main="+none)
		e.eventually("one pod was updated and does not run", func(ctx context.Context) error {
			list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=back"})
			if err != nil {
				return err
			}
			for _, p := range list.Items {
				if p.Spec.Containers[0].Image == none && len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].State.Waiting != nil {
					return nil
				}
			}
			return fmt.Errorf("%d pods", len(list.Items))
		})
		e.ctl("-n", ns, "rollout", "undo", "daemonset/back")
		e.rolledOut(ns, "daemonset/back")
		kept := 0
		for _, p := range e.podsReady(ns, "app=back", 3) {
			if before[p.UID] {
				kept++
				if n := p.Status.ContainerStatuses[0].RestartCount; n != 0 {
					e.t.Errorf("%s was never updated, and restarted %d times", p.Name, n)
				}
			}
		}
		if kept != 2 {
			e.t.Errorf("%d of the pods are those of before, want 2: one at a time is updated", kept)
		}
		e.ctl("-n", ns, "delete", "daemonset", "back", "--wait=false")
	})
	e.cases("Deployment scaled in mid-rollout", []int{118}, func(e *env) { proportionCase(e, ns) })
	e.cases("StatefulSet in order", []int{154}, func(e *env) { orderCase(e, ns) })
	e.cases("StatefulSet whose pod fails", []int{155}, func(e *env) { evictedCase(e, ns) })
}

// next is the next event of a watch of pods.
func (e *env) next(w watch.Interface) (watch.EventType, *corev1.Pod) {
	e.t.Helper()
	select {
	case ev := <-w.ResultChan():
		if p, ok := ev.Object.(*corev1.Pod); ok {
			return ev.Type, p
		}
		e.t.Fatalf("the watch ended: %+v", ev.Object)
	case <-time.After(testTimeout):
		e.t.Fatalf("the watch sent nothing for %s", testTimeout)
	}
	return "", nil
}

// revisionCase lets a DaemonSet without pods keep revisions, and changes them.
func revisionCase(e *env, ns string) {
	ctx := e.t.Context()
	template := deployment("revisions", 1).Spec.Template
	template.Spec.NodeSelector = map[string]string{"no": "such"}
	set, err := e.api.AppsV1().DaemonSets(ns).Create(ctx, &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "revisions"},
		Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: template.Labels}, Template: template}}, metav1.CreateOptions{})
	e.must(err)
	api := e.api.AppsV1().ControllerRevisions(ns)
	// are waits until the set has revisions of these numbers, and returns them by
	// their number.
	are := func(numbers ...int64) map[int64]*appsv1.ControllerRevision {
		e.t.Helper()
		found := map[int64]*appsv1.ControllerRevision{}
		e.eventually(fmt.Sprintf("the revisions are %v", numbers), func(ctx context.Context) error {
			list, err := api.List(ctx, metav1.ListOptions{LabelSelector: "app=revisions"})
			if err != nil {
				return err
			}
			clear(found)
			var got []int64
			for i := range list.Items {
				r := &list.Items[i]
				if o := metav1.GetControllerOf(r); o == nil || o.UID != set.UID {
					return fmt.Errorf("%s belongs to %v", r.Name, o)
				}
				found[r.Revision] = r
				got = append(got, r.Revision)
			}
			if slices.Sort(got); !slices.Equal(got, numbers) {
				return fmt.Errorf("they are %v", got)
			}
			return nil
		})
		return found
	}
	first := are(1)[1]
	patched, err := api.Patch(ctx, first.Name, types.MergePatchType, []byte(`{"metadata":{"labels":{"patched":"yes"}}}`), metav1.PatchOptions{})
	e.must(err)
	if patched.Labels["patched"] != "yes" || patched.Revision != 1 {
		e.t.Errorf("patched: %+v", patched.ObjectMeta)
	}
	mine := &appsv1.ControllerRevision{
		ObjectMeta: metav1.ObjectMeta{Name: "revisions-mine", Labels: first.Labels, OwnerReferences: first.OwnerReferences},
		Data:       first.Data, Revision: 2,
	}
	_, err = api.Create(ctx, mine, metav1.CreateOptions{})
	e.must(err)
	e.must(api.Delete(ctx, first.Name, metav1.DeleteOptions{}))
	now := are(2)[2]
	if now.Name != "revisions-mine" {
		e.t.Errorf("the second revision is %s", now.Name)
	}
	e.must(retry.RetryOnConflict(retry.DefaultBackoff, func() (err error) { // the set's controller may write it, too
		if now, err = api.Get(ctx, mine.Name, metav1.GetOptions{}); err != nil {
			return err
		}
		now.Labels["updated"] = "yes"
		now, err = api.Update(ctx, now, metav1.UpdateOptions{})
		return err
	}))
	if now.Labels["updated"] != "yes" {
		e.t.Errorf("updated: %+v", now.ObjectMeta)
	}
	e.ctl("-n", ns, "set", "env", "daemonset/revisions", "MESSAGE=third")
	are(2, 3)
	e.must(api.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "updated=yes"}))
	are(3)
	e.ctl("-n", ns, "set", "env", "daemonset/revisions", "MESSAGE=fourth")
	are(3, 4)
	e.ctl("-n", ns, "delete", "daemonset", "revisions", "--wait=false")
}

// proportionCase scales a Deployment whose new pods cannot run, up and down.
func proportionCase(e *env, ns string) {
	d := deployment("share", 5)
	d.Spec.Strategy.RollingUpdate = &appsv1.RollingUpdateDeployment{MaxSurge: ptr.To(intstr.FromInt32(2)), MaxUnavailable: ptr.To(intstr.FromInt32(1))}
	e.createDeployment(ns, d)
	e.podsReady(ns, "app=share", 5)
	e.ctl("-n", ns, "set", "image", "deployment/share", "main="+none)
	shares := func(old, fresh, available int32) {
		e.t.Helper()
		e.eventually(fmt.Sprintf("%d old pods, %d new ones", old, fresh), func(ctx context.Context) error {
			list, err := e.api.AppsV1().ReplicaSets(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=share"})
			if err != nil {
				return err
			}
			var got [2]int32
			var running int32
			for _, r := range list.Items {
				i := 0
				if r.Spec.Template.Spec.Containers[0].Image == none {
					i = 1
				}
				got[i] += *r.Spec.Replicas
				running += r.Status.AvailableReplicas
			}
			if got != [2]int32{old, fresh} || running != available {
				return fmt.Errorf("they are %v, %d available", got, running)
			}
			return nil
		})
	}
	shares(4, 3, 4) // 7 in all: 5 and a surge of 2, of which 4 must be available
	e.ctl("-n", ns, "scale", "deployment/share", "--replicas=10")
	shares(7, 5, 7) // 12 in all: the 5 more go 4:3
	e.ctl("-n", ns, "scale", "deployment/share", "--replicas=5")
	shares(4, 3, 4)
	e.ctl("-n", ns, "delete", "deployment", "share", "--wait=false")
}

// well is a condition of pods that the test gives and takes.
const well = "example.com/well"

// orderCase takes a StatefulSet up and down, with a pause while its first pod is
// not well, and finds the order in what a watch tells.
func orderCase(e *env, ns string) {
	ctx := e.t.Context()
	pods := e.api.CoreV1().Pods(ns)
	list, err := pods.List(ctx, metav1.ListOptions{LabelSelector: "app=order"})
	e.must(err)
	w, err := pods.Watch(ctx, metav1.ListOptions{LabelSelector: "app=order", ResourceVersion: list.ResourceVersion})
	e.must(err)
	defer w.Stop()
	e.createStatefulSet(ns, "order", 3, func(s *appsv1.StatefulSetSpec) {
		s.Template.Spec.ReadinessGates = []corev1.PodReadinessGate{{ConditionType: well}}
	})
	be := func(name string, status corev1.ConditionStatus) {
		e.t.Helper()
		e.eventually(fmt.Sprintf("%s is well: %s", name, status), func(ctx context.Context) error {
			_, err := pods.Patch(ctx, name, types.StrategicMergePatchType, fmt.Appendf(nil, `{"status":{"conditions":[{"type":%q,"status":%q}]}}`, well, status), metav1.PatchOptions{}, "status")
			if err != nil {
				return err
			}
			p, err := pods.Get(ctx, name, metav1.GetOptions{})
			if err == nil && podReady(p) != (status == corev1.ConditionTrue) {
				err = errors.New(brief(p))
			}
			return err
		})
	}
	names := []string{"order-0", "order-1", "order-2"}
	for _, name := range names {
		be(name, corev1.ConditionTrue)
	}
	e.stsIs(ns, "order", "whole", func(s *appsv1.StatefulSet) bool { return s.Status.ReadyReplicas == 3 })
	be("order-0", corev1.ConditionFalse)
	e.stsIs(ns, "order", "short of one", func(s *appsv1.StatefulSet) bool { return s.Status.ReadyReplicas == 2 })
	e.ctl("-n", ns, "scale", "statefulset/order", "--replicas=1")
	e.stsIs(ns, "order", "seen to be smaller", func(s *appsv1.StatefulSet) bool { return s.Status.ObservedGeneration == s.Generation })
	be("order-0", corev1.ConditionTrue)
	e.ctl("-n", ns, "scale", "statefulset/order", "--replicas=0")

	var happened []string
	there, ready, leaving := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for !slices.Contains(happened, "-order-0") {
		what, p := e.next(w)
		i := slices.Index(names, p.Name)
		switch {
		case what == watch.Added:
			happened, there[p.Name] = append(happened, "+"+p.Name), true
			for _, before := range names[:i] {
				if !ready[before] {
					e.t.Errorf("%s was made while %s was not ready", p.Name, before)
				}
			}
		case what == watch.Deleted:
			happened = append(happened, "-"+p.Name)
			delete(there, p.Name)
		case p.DeletionTimestamp != nil && !leaving[p.Name]:
			leaving[p.Name] = true
			for _, before := range names[:i] {
				if !ready[before] {
					e.t.Errorf("%s was deleted while %s was not ready", p.Name, before)
				}
			}
			for _, after := range names[i+1:] {
				if there[after] {
					e.t.Errorf("%s was deleted while %s was there", p.Name, after)
				}
			}
		}
		ready[p.Name] = podReady(p) && p.DeletionTimestamp == nil
	}
	if got := strings.Join(happened, " "); got != "+order-0 +order-1 +order-2 -order-2 -order-1 -order-0" {
		e.t.Errorf("it happened: %s", got)
	}
	e.ctl("-n", ns, "delete", "statefulset", "order", "--wait=false")
}

// evictedCase gives a StatefulSet's pod a port of a node that another pod has.
func evictedCase(e *env, ns string) {
	ctx := e.t.Context()
	onPort := func(spec *corev1.PodSpec) {
		spec.NodeName = "n1" // past the scheduler, which would wait for the port
		spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 8080, HostPort: 21017}}
	}
	blocker := pod("blocker")
	onPort(&blocker.Spec)
	e.create(ns, blocker)
	e.podReady(ns, "blocker")
	list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=evicted"})
	e.must(err)
	w, err := e.api.CoreV1().Pods(ns).Watch(ctx, metav1.ListOptions{LabelSelector: "app=evicted", ResourceVersion: list.ResourceVersion})
	e.must(err)
	defer w.Stop()
	e.createStatefulSet(ns, "evicted", 1, func(s *appsv1.StatefulSetSpec) { onPort(&s.Template.Spec) })
	// One pod fails, goes, and another of its name comes.
	var failed, gone types.UID
	for again := types.UID(""); again == ""; {
		what, p := e.next(w)
		switch {
		case p.Name != "evicted-0":
			e.t.Errorf("there is %s", p.Name)
		case what == watch.Deleted && p.UID == failed:
			gone = p.UID
		case failed == "" && p.Status.Phase == corev1.PodFailed:
			failed = p.UID
			if p.Status.Reason != "NodePorts" {
				e.t.Errorf("it failed by %q: %s", p.Status.Reason, p.Status.Message)
			}
		case gone != "" && what == watch.Added:
			again = p.UID
		}
	}
	e.ctl("-n", ns, "delete", "pod", "blocker", "--wait=false")
	if now := e.renewed(ns, "app=evicted", failed); now.Name != "evicted-0" {
		e.t.Errorf("in its place is %s", now.Name)
	}
	e.ctl("-n", ns, "delete", "statefulset", "evicted", "--wait=false")
}
