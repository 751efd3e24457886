package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/features"
)

// cases runs named parts that show rows of CONFORMANCE, one after the other.
func (e *env) cases(name string, rows []int, try func(e *env)) {
	e.t.Run(name, func(t *testing.T) {
		features.Conforms(t, rows...)
		mine := *e
		mine.t = t
		try(&mine)
	})
}

// must fails the test on an error.
func (e *env) must(err error) {
	e.t.Helper()
	if err != nil {
		e.t.Fatal(err)
	}
}

// rest asks the API for a part of an object of apps/v1: "" is the object itself.
func (e *env) rest(verb, ns, resource, name, part string, body []byte, kind types.PatchType) ([]byte, error) {
	req := e.api.AppsV1().RESTClient().Verb(verb).Namespace(ns).Resource(resource).Name(name).SubResource(part)
	if verb == "PATCH" {
		req = e.api.AppsV1().RESTClient().Patch(kind).Namespace(ns).Resource(resource).Name(name).SubResource(part)
	}
	if body != nil {
		req = req.Body(body)
	}
	return req.SetHeader("Content-Type", map[bool]string{true: string(kind), false: "application/json"}[verb == "PATCH"]).SetHeader("Accept", "application/json").Do(e.t.Context()).Raw()
}

// scales reads, updates and patches a scale subresource.
func (e *env) scales(ns, resource, name string) {
	e.t.Helper()
	read := func(b []byte, err error) (s autoscalingv1.Scale) {
		e.t.Helper()
		e.must(err)
		e.must(json.Unmarshal(b, &s))
		return s
	}
	now := read(e.rest("GET", ns, resource, name, "scale", nil, ""))
	if now.Spec.Replicas != 1 || now.Status.Selector == "" {
		e.t.Errorf("%s/%s: scale %+v", resource, name, now)
	}
	now.Spec.Replicas, now.ResourceVersion = 2, ""
	body, err := json.Marshal(now)
	e.must(err)
	if s := read(e.rest("PUT", ns, resource, name, "scale", body, "")); s.Spec.Replicas != 2 {
		e.t.Errorf("%s/%s: updated scale %+v", resource, name, s)
	}
	e.eventually("two replicas run", func(context.Context) error {
		if s := read(e.rest("GET", ns, resource, name, "scale", nil, "")); s.Status.Replicas != 2 {
			return fmt.Errorf("status %+v", s.Status)
		}
		return nil
	})
	if s := read(e.rest("PATCH", ns, resource, name, "scale", []byte(`{"spec":{"replicas":1}}`), types.MergePatchType)); s.Spec.Replicas != 1 {
		e.t.Errorf("%s/%s: patched scale %+v", resource, name, s)
	}
}

// keepsStatus writes a condition into a status, by update and by patch.
func (e *env) keepsStatus(ns, resource, name string) {
	e.t.Helper()
	has := func(b []byte, kind string) bool {
		var o struct {
			Status struct{ Conditions []metav1.Condition }
		}
		return json.Unmarshal(b, &o) == nil && slices.ContainsFunc(o.Status.Conditions, func(c metav1.Condition) bool { return c.Type == kind })
	}
	e.eventually("the status is updated", func(context.Context) error {
		b, err := e.rest("GET", ns, resource, name, "status", nil, "")
		if err != nil {
			return err
		}
		var o map[string]any
		e.must(json.Unmarshal(b, &o))
		status, _ := o["status"].(map[string]any)
		if status == nil {
			return errors.New("there is none yet")
		}
		conditions, _ := status["conditions"].([]any)
		status["conditions"] = append(conditions, map[string]any{"type": "Updated", "status": "True"})
		body, err := json.Marshal(o)
		e.must(err)
		b, err = e.rest("PUT", ns, resource, name, "status", body, "")
		if err == nil && !has(b, "Updated") {
			e.t.Errorf("%s/%s: the answer is %s", resource, name, b)
		}
		return err
	})
	var b []byte
	err := retry.RetryOnConflict(retry.DefaultBackoff, func() (err error) { // its controller writes, too
		b, err = e.rest("PATCH", ns, resource, name, "status", []byte(`{"status":{"conditions":[{"type":"Patched","status":"True"}]}}`), types.StrategicMergePatchType)
		return err
	})
	if err != nil || !has(b, "Patched") {
		e.t.Errorf("%s/%s: patch of the status: %v, %s", resource, name, err, b)
	}
}

func replicaSet(name string, n int32) *appsv1.ReplicaSet {
	d := deployment(name, n)
	return &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"suite": "sets", "app": name}},
		Spec: appsv1.ReplicaSetSpec{Replicas: &n, Selector: d.Spec.Selector, Template: d.Spec.Template}}
}

func (e *env) createStatefulSet(ns, name string, n int32, change func(*appsv1.StatefulSetSpec)) {
	e.t.Helper()
	d := deployment(name, n)
	s := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"suite": "sets"}},
		Spec: appsv1.StatefulSetSpec{Replicas: &n, Selector: d.Spec.Selector, Template: d.Spec.Template, ServiceName: name}}
	if change != nil {
		change(&s.Spec)
	}
	_, err := e.api.AppsV1().StatefulSets(ns).Create(e.t.Context(), s, metav1.CreateOptions{})
	e.must(err)
}

// stsIs waits for what is says of a StatefulSet, and returns it.
func (e *env) stsIs(ns, name, what string, is func(*appsv1.StatefulSet) bool) *appsv1.StatefulSet {
	e.t.Helper()
	var s *appsv1.StatefulSet
	e.eventually("statefulset "+name+" is "+what, func(ctx context.Context) (err error) {
		if s, err = e.api.AppsV1().StatefulSets(ns).Get(ctx, name, metav1.GetOptions{}); err == nil && !is(s) {
			err = fmt.Errorf("status %+v", s.Status)
		}
		return err
	})
	return s
}

// setCases are the rows of CONFORMANCE about ReplicaSets, Deployments, DaemonSets,
// StatefulSets and disruption budgets.
func setCases(e *env, ns string) {
	ctx := e.t.Context()
	e.cases("ReplicaSet", []int{141, 142, 143, 144, 145, 146}, func(e *env) {
		sets := e.api.AppsV1().ReplicaSets(ns)
		orphan := pod("orphan")
		orphan.Labels = map[string]string{"app": "rs"}
		e.create(ns, orphan)
		e.podReady(ns, "orphan") // the leader's loops have seen it then
		made, err := sets.Create(ctx, replicaSet("rs", 1), metav1.CreateOptions{})
		e.must(err)
		e.podIs(ns, "orphan", "adopted", func(p *corev1.Pod) error {
			if o := metav1.GetControllerOf(p); o == nil || o.UID != made.UID {
				return errors.New("it is not")
			}
			return nil
		})
		e.podsReady(ns, "app=rs", 1) // no other was made beside it
		e.scales(ns, "replicasets", "rs")
		e.keepsStatus(ns, "replicasets", "rs")
		_, err = sets.Patch(ctx, "rs", types.StrategicMergePatchType, []byte(`{"metadata":{"labels":{"patched":"yes"}},"spec":{"replicas":2}}`), metav1.PatchOptions{})
		e.must(err)
		pods := e.podsReady(ns, "app=rs", 2) // the adopted one may have gone when there was to be one less
		for _, p := range pods {
			e.eventually(p.Name+" answers", func(context.Context) error { // it has no probe: it may be Ready before it listens
				_, err := e.page("n1", p.Status.PodIP)
				return err
			})
		}
		e.ctl("-n", ns, "label", "pod", pods[0].Name, "app=free", "--overwrite")
		e.podIs(ns, pods[0].Name, "released", func(p *corev1.Pod) error {
			if o := metav1.GetControllerOf(p); o != nil {
				return fmt.Errorf("owner %s", o.Name)
			}
			return nil
		})
		e.podsReady(ns, "app=rs", 2)
		e.must(sets.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "suite=sets"}))
		e.eventually("the sets are gone", func(ctx context.Context) error {
			left, err := sets.List(ctx, metav1.ListOptions{LabelSelector: "suite=sets"})
			if err == nil && len(left.Items) > 0 {
				err = fmt.Errorf("%d", len(left.Items))
			}
			return err
		})
		e.ctl("-n", ns, "delete", "pod", pods[0].Name, "--grace-period=1", "--wait=false")
	})
	e.cases("Deployment", []int{114, 116, 117, 119, 121}, func(e *env) {
		old, err := e.api.AppsV1().ReplicaSets(ns).Create(ctx, replicaSet("deploy", 1), metav1.CreateOptions{})
		e.must(err)
		e.podsReady(ns, "app=deploy", 1)
		d := deployment("deploy", 1)
		d.Spec.RevisionHistoryLimit = ptr.To[int32](0)
		d.Spec.Template.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "MESSAGE", Value: "new"}}
		e.createDeployment(ns, d)
		e.rolledOut(ns, "deployment/deploy")
		only := func() {
			e.eventually("one ReplicaSet is left, and it is new", func(ctx context.Context) error {
				list, err := e.api.AppsV1().ReplicaSets(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=deploy"})
				if err == nil && (len(list.Items) != 1 || list.Items[0].UID == old.UID || list.Items[0].Status.ReadyReplicas != 1) {
					err = fmt.Errorf("%d ReplicaSets", len(list.Items))
				}
				return err
			})
			if _, err := e.api.AppsV1().ReplicaSets(ns).Get(ctx, "deploy", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				e.t.Errorf("the adopted one is beyond the history limit: %v", err)
			}
		}
		only()
		// A template that cannot run is overtaken by the next one.
		e.ctl("-n", ns, "set", "image", "deployment/deploy", "main=clusterd.local/none:1")
		e.ctl("-n", ns, "set", "image", "deployment/deploy", "main="+image)
		e.ctl("-n", ns, "set", "env", "deployment/deploy", "MESSAGE=newest")
		e.rolledOut(ns, "deployment/deploy")
		only()
		e.keepsStatus(ns, "deployments", "deploy")
		e.scales(ns, "deployments", "deploy")
		e.ctl("-n", ns, "delete", "deployment", "deploy", "--wait=false")
	})
	e.cases("Deployment that recreates", []int{115}, func(e *env) {
		d := deployment("again", 2)
		d.Spec.Strategy.Type = appsv1.RecreateDeploymentStrategyType
		e.createDeployment(ns, d)
		e.rolledOut(ns, "deployment/again")
		old := map[types.UID]bool{}
		for _, p := range e.podsReady(ns, "app=again", 2) {
			old[p.UID] = true
		}
		list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=again"})
		e.must(err)
		w, err := e.api.CoreV1().Pods(ns).Watch(ctx, metav1.ListOptions{LabelSelector: "app=again", ResourceVersion: list.ResourceVersion})
		e.must(err)
		defer w.Stop()
		e.ctl("-n", ns, "set", "env", "deployment/again", "MESSAGE=second")
		e.rolledOut(ns, "deployment/again")
		// In the watch's order: both old ones have ended before the first new one is there.
		known := map[types.UID]bool{}
		for uid := range old {
			known[uid] = true
		}
		for fresh := 0; fresh < 2; {
			ev, open := <-w.ResultChan()
			p, ok := ev.Object.(*corev1.Pod)
			if !open || !ok {
				e.t.Fatalf("the watch ended: %+v", ev.Object)
			}
			if known[p.UID] {
				if old[p.UID] && (ev.Type == watch.Deleted || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed) {
					delete(old, p.UID)
				}
				continue
			}
			known[p.UID] = true
			fresh++
			if len(old) > 0 {
				e.t.Errorf("%s was made while %d old pods ran", p.Name, len(old))
			}
		}
		e.ctl("-n", ns, "delete", "deployment", "again", "--wait=false")
	})
	e.cases("DaemonSet", []int{107, 108, 110, 111, 112, 113}, func(e *env) {
		sets := e.api.AppsV1().DaemonSets(ns)
		template := deployment("ds", 1).Spec.Template
		template.Spec.NodeSelector = map[string]string{"sets": "yes"}
		_, err := sets.Create(ctx, &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "ds", Labels: map[string]string{"suite": "sets"}},
			Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: template.Labels}, Template: template}}, metav1.CreateOptions{})
		e.must(err)
		e.ctl("label", "node", "n1", "n2", "sets=yes")
		e.podsReady(ns, "app=ds", 2)
		e.ctl("label", "node", "n2", "sets-")
		pods := e.podsReady(ns, "app=ds", 1)
		if pods[0].Spec.NodeName != "n1" {
			e.t.Errorf("it is on %s", pods[0].Spec.NodeName)
		}
		e.ctl("-n", ns, "delete", "pod", pods[0].Name, "--wait=false")
		second := e.renewed(ns, "app=ds", pods[0].UID)
		var third corev1.Pod
		e.eventually("a failed pod is replaced", func(ctx context.Context) error {
			list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=ds"})
			if err != nil {
				return err
			}
			for _, p := range list.Items {
				if p.UID != second.UID && p.DeletionTimestamp == nil && podReady(&p) {
					third = p
					return nil
				}
			}
			// Its agent may say that it runs after all: say it again.
			_, err = e.api.CoreV1().Pods(ns).Patch(ctx, second.Name, types.StrategicMergePatchType, []byte(`{"status":{"phase":"Failed"}}`), metav1.PatchOptions{}, "status")
			return fmt.Errorf("it is not: %w", err)
		})
		e.ctl("-n", ns, "set", "env", "daemonset/ds", "MESSAGE=second")
		e.rolledOut(ns, "daemonset/ds")
		fourth := e.renewed(ns, "app=ds", third.UID)
		hash := appsv1.ControllerRevisionHashLabelKey
		if fourth.Labels[hash] == third.Labels[hash] {
			e.t.Errorf("the revision is still %s", fourth.Labels[hash])
		}
		revisions, err := e.api.AppsV1().ControllerRevisions(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=ds"})
		e.must(err)
		var numbers []int64
		for _, r := range revisions.Items {
			numbers = append(numbers, r.Revision)
		}
		slices.Sort(numbers)
		if !slices.Equal(numbers, []int64{1, 2}) {
			e.t.Errorf("revisions %v", numbers)
		}
		e.keepsStatus(ns, "daemonsets", "ds")
		e.must(sets.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "suite=sets"}))
		e.podsReady(ns, "app=ds", 0)
		e.ctl("label", "node", "n1", "sets-")
	})
	e.cases("StatefulSet", []int{156, 157, 158, 159, 160}, func(e *env) {
		e.createStatefulSet(ns, "sts", 1, nil)
		e.rolledOut(ns, "statefulset/sts")
		e.keepsStatus(ns, "statefulsets", "sts")
		e.scales(ns, "statefulsets", "sts")
		sets := e.api.AppsV1().StatefulSets(ns)
		patch := func(body string) {
			_, err := sets.Patch(ctx, "sts", types.StrategicMergePatchType, []byte(body), metav1.PatchOptions{})
			e.must(err)
		}
		patch(`{"spec":{"replicas":3,"updateStrategy":{"rollingUpdate":{"partition":2}}}}`)
		e.rolledOut(ns, "statefulset/sts")
		first := e.stsIs(ns, "sts", "all of one revision", func(s *appsv1.StatefulSet) bool {
			return s.Status.CurrentRevision == s.Status.UpdateRevision && s.Status.ReadyReplicas == 3
		}).Status.CurrentRevision
		revisions := func(want ...string) {
			e.eventually(fmt.Sprintf("the pods are of %v", want), func(ctx context.Context) error {
				list, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=sts"})
				if err != nil {
					return err
				}
				got := make([]string, len(want))
				for _, p := range list.Items {
					if i := slices.Index([]string{"sts-0", "sts-1", "sts-2"}, p.Name); i >= 0 && podReady(&p) {
						got[i] = p.Labels[appsv1.StatefulSetRevisionLabel]
					}
				}
				if !slices.Equal(got, want) {
					return fmt.Errorf("they are of %v", got)
				}
				return nil
			})
		}
		e.ctl("-n", ns, "set", "env", "statefulset/sts", "MESSAGE=second")
		second := e.stsIs(ns, "sts", "to be updated", func(s *appsv1.StatefulSet) bool {
			return s.Status.ObservedGeneration == s.Generation && s.Status.UpdateRevision != first
		}).Status.UpdateRevision
		revisions(first, first, second)
		before := e.get(ns, "sts-0")
		e.ctl("-n", ns, "delete", "pod", "sts-0", "--wait=false")
		e.renewed(ns, "apps.kubernetes.io/pod-index=0,app=sts", before.UID)
		revisions(first, first, second) // a pod below the partition comes back as it was
		patch(`{"spec":{"updateStrategy":{"rollingUpdate":{"partition":0}}}}`)
		revisions(second, second, second)
		e.stsIs(ns, "sts", "updated", func(s *appsv1.StatefulSet) bool { return s.Status.CurrentRevision == second })
		e.ctl("-n", ns, "rollout", "undo", "statefulset/sts")
		revisions(first, first, first)
		e.must(sets.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "suite=sets"}))
		e.podsReady(ns, "app=sts", 0)
	})
	e.cases("StatefulSet in parallel", []int{153}, func(e *env) {
		e.createStatefulSet(ns, "burst", 3, func(s *appsv1.StatefulSetSpec) {
			s.PodManagementPolicy = appsv1.ParallelPodManagement
			s.Template.Spec.Containers[0].ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"/hello", "exit", "1"}}}}
		})
		e.stsIs(ns, "burst", "all there, none of them ready", func(s *appsv1.StatefulSet) bool { return s.Status.Replicas == 3 && s.Status.ReadyReplicas == 0 })
		e.ctl("-n", ns, "scale", "statefulset/burst", "--replicas=1")
		e.stsIs(ns, "burst", "smaller, though it is not well", func(s *appsv1.StatefulSet) bool { return s.Status.Replicas == 1 })
		e.ctl("-n", ns, "delete", "statefulset", "burst", "--wait=false")
	})
	e.cases("PodDisruptionBudget", []int{122, 123, 124, 125, 126}, func(e *env) {
		budgets := e.api.PolicyV1().PodDisruptionBudgets(ns)
		guarded := e.create(ns, pod("guarded"))
		e.podReady(ns, guarded.Name)
		_, err := budgets.Create(ctx, &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Name: "pdb", Labels: map[string]string{"suite": "sets"}},
			Spec: policyv1.PodDisruptionBudgetSpec{MinAvailable: ptr.To(intstr.FromInt32(1)), Selector: &metav1.LabelSelector{MatchLabels: guarded.Labels}}}, metav1.CreateOptions{})
		e.must(err)
		allows := func(n int32) {
			e.eventually(fmt.Sprintf("%d disruptions are allowed", n), func(ctx context.Context) error {
				b, err := budgets.Get(ctx, "pdb", metav1.GetOptions{})
				if err == nil && (b.Status.ObservedGeneration != b.Generation || b.Status.CurrentHealthy != 1 || b.Status.DisruptionsAllowed != n) {
					err = fmt.Errorf("status %+v", b.Status)
				}
				return err
			})
		}
		allows(0)
		evict := func() error {
			return e.api.CoreV1().Pods(ns).EvictV1(ctx, &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: guarded.Name}})
		}
		if err := evict(); !apierrors.IsTooManyRequests(err) {
			e.t.Errorf("an eviction that breaks the budget: %v", err)
		}
		b, err := budgets.Patch(ctx, "pdb", types.StrategicMergePatchType, []byte(`{"status":{"conditions":[{"type":"Patched","status":"True","reason":"Test","message":"","lastTransitionTime":"2030-01-01T00:00:00Z"}]}}`), metav1.PatchOptions{}, "status")
		if err != nil || !slices.ContainsFunc(b.Status.Conditions, func(c metav1.Condition) bool { return c.Type == "Patched" }) {
			e.t.Errorf("patch of the status: %v", err)
		}
		_, err = budgets.Patch(ctx, "pdb", types.MergePatchType, []byte(`{"spec":{"minAvailable":0}}`), metav1.PatchOptions{})
		e.must(err)
		allows(1)
		e.eventually("the eviction passes", func(context.Context) error { return evict() })
		all, err := e.api.PolicyV1().PodDisruptionBudgets("").List(ctx, metav1.ListOptions{LabelSelector: "suite=sets"})
		if err != nil || len(all.Items) != 1 {
			e.t.Errorf("list of all namespaces: %v", err)
		}
		e.must(budgets.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "suite=sets"}))
		left, err := budgets.List(ctx, metav1.ListOptions{})
		if err != nil || len(left.Items) != 0 {
			e.t.Errorf("left: %v", err)
		}
	})
}
