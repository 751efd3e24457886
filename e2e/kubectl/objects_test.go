package kubectl

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/features"
)

// must fails the test on an error.
func (k *kit) must(err error) {
	k.Helper()
	if err != nil {
		k.Fatal(err)
	}
}

// TestE2EXObjects goes through the lives of the objects that nodes and pods
// are told by, as a client of the API sees them.
func TestE2EXObjects(t *testing.T) {
	t.Parallel()
	k := start(t, "objects")
	ctx := k.Context()
	labelled := metav1.ObjectMeta{Name: "one", Labels: map[string]string{"set": "mine"}}
	mine := metav1.ListOptions{LabelSelector: "set=mine"}

	k.sub("ConfigMap", func(k *kit) {
		features.Conforms(k, 260, 261, 262)
		maps := k.api.CoreV1().ConfigMaps(k.ns)
		if _, err := maps.Create(ctx, &corev1.ConfigMap{ObjectMeta: labelled, Data: map[string]string{"": "x"}}, metav1.CreateOptions{}); !apierrors.IsInvalid(err) {
			k.Errorf("an empty key: %v", err)
		}
		m, err := maps.Create(ctx, &corev1.ConfigMap{ObjectMeta: labelled, Data: map[string]string{"a": "1"}}, metav1.CreateOptions{})
		k.must(err)
		m, err = maps.Patch(ctx, m.Name, types.StrategicMergePatchType, []byte(`{"data":{"b":"2"}}`), metav1.PatchOptions{})
		k.must(err)
		m.Data["c"] = "3"
		_, err = maps.Update(ctx, m, metav1.UpdateOptions{})
		k.must(err)
		list, err := maps.List(ctx, mine)
		k.must(err)
		if len(list.Items) != 1 || fmt.Sprint(list.Items[0].Data) != "map[a:1 b:2 c:3]" {
			k.Errorf("list: %+v", list.Items)
		}
		k.must(maps.DeleteCollection(ctx, metav1.DeleteOptions{}, mine))
		list, err = maps.List(ctx, mine)
		k.must(err)
		k.is("what is left", fmt.Sprint(len(list.Items)), "0")
	})
	k.sub("Secret", func(k *kit) {
		features.Conforms(k, 338, 339)
		secrets := k.api.CoreV1().Secrets(k.ns)
		if _, err := secrets.Create(ctx, &corev1.Secret{ObjectMeta: labelled, StringData: map[string]string{"": "x"}}, metav1.CreateOptions{}); !apierrors.IsInvalid(err) {
			k.Errorf("an empty key: %v", err)
		}
		_, err := secrets.Create(ctx, &corev1.Secret{ObjectMeta: labelled, StringData: map[string]string{"a": "1"}}, metav1.CreateOptions{})
		k.must(err)
		_, err = secrets.Patch(ctx, "one", types.StrategicMergePatchType, []byte(`{"data":{"a":"Mg=="},"metadata":{"labels":{"patched":"yes"}}}`), metav1.PatchOptions{})
		k.must(err)
		list, err := k.api.CoreV1().Secrets("").List(ctx, metav1.ListOptions{LabelSelector: "set=mine,patched=yes"})
		k.must(err)
		if len(list.Items) != 1 || string(list.Items[0].Data["a"]) != "2" {
			k.Errorf("list: %+v", list.Items)
		}
		k.must(secrets.DeleteCollection(ctx, metav1.DeleteOptions{}, mine))
		if _, err := secrets.Get(ctx, "one", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			k.Errorf("after its deletion: %v", err)
		}
	})
	k.sub("Lease", func(k *kit) {
		features.Conforms(k, 295)
		leases := k.api.CoordinationV1().Leases(k.ns)
		now := metav1.NewMicroTime(time.Now().Truncate(time.Microsecond))
		spec := coordinationv1.LeaseSpec{HolderIdentity: ptr.To("me"), LeaseDurationSeconds: ptr.To[int32](30), AcquireTime: &now, RenewTime: &now, LeaseTransitions: ptr.To[int32](0)}
		_, err := leases.Create(ctx, &coordinationv1.Lease{ObjectMeta: labelled, Spec: spec}, metav1.CreateOptions{})
		k.must(err)
		got, err := leases.Get(ctx, "one", metav1.GetOptions{})
		k.must(err)
		if *got.Spec.HolderIdentity != "me" || !got.Spec.RenewTime.Equal(&now) {
			k.Errorf("read back: %+v", got.Spec)
		}
		got.Spec.HolderIdentity, got.Spec.LeaseTransitions = ptr.To("you"), ptr.To[int32](1)
		_, err = leases.Update(ctx, got, metav1.UpdateOptions{})
		k.must(err)
		_, err = leases.Patch(ctx, "one", types.StrategicMergePatchType, []byte(`{"spec":{"leaseDurationSeconds":60}}`), metav1.PatchOptions{})
		k.must(err)
		second := labelled
		second.Name = "two"
		_, err = leases.Create(ctx, &coordinationv1.Lease{ObjectMeta: second}, metav1.CreateOptions{})
		k.must(err)
		list, err := leases.List(ctx, mine)
		k.must(err)
		if len(list.Items) != 2 || *list.Items[0].Spec.HolderIdentity != "you" || *list.Items[0].Spec.LeaseDurationSeconds != 60 {
			k.Errorf("list: %+v", list.Items)
		}
		k.must(leases.Delete(ctx, "one", metav1.DeleteOptions{}))
		k.must(leases.DeleteCollection(ctx, metav1.DeleteOptions{}, mine))
		list, err = leases.List(ctx, mine)
		k.must(err)
		k.is("what is left", fmt.Sprint(len(list.Items)), "0")
	})
	k.sub("Node", func(k *kit) {
		features.Conforms(k, 298)
		nodes := k.api.CoreV1().Nodes()
		paper := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "paper", Labels: map[string]string{"set": "mine"}}, Spec: corev1.NodeSpec{Unschedulable: true}}
		_, err := nodes.Create(ctx, paper, metav1.CreateOptions{})
		k.must(err)
		_, err = nodes.Patch(ctx, "paper", types.StrategicMergePatchType, []byte(`{"metadata":{"labels":{"patched":"yes"}}}`), metav1.PatchOptions{})
		k.must(err)
		k.eventually("the node is updated", func(ctx context.Context) error { // others write to it too
			n, err := nodes.Get(ctx, "paper", metav1.GetOptions{})
			if err != nil {
				return err
			}
			n.Labels["updated"] = "yes"
			_, err = nodes.Update(ctx, n, metav1.UpdateOptions{})
			return err
		})
		list, err := nodes.List(ctx, metav1.ListOptions{LabelSelector: "set=mine,patched=yes,updated=yes"})
		k.must(err)
		k.is("nodes of the labels", fmt.Sprint(len(list.Items)), "1")
		k.must(nodes.DeleteCollection(ctx, metav1.DeleteOptions{}, mine))
		if _, err := nodes.Get(ctx, "paper", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			k.Errorf("after its deletion: %v", err)
		}
	})
}

// TestE2EXPodLife goes through what can be done to a pod while it lives.
func TestE2EXPodLife(t *testing.T) {
	t.Parallel()
	k := start(t, "life")
	ctx := k.Context()
	pods := k.api.CoreV1().Pods(k.ns)
	patch := func(name, patch string, sub ...string) *corev1.Pod {
		k.Helper()
		p, err := pods.Patch(ctx, name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}, sub...)
		k.must(err)
		return p
	}
	stubborn := func(name string) string { // it takes its time to end
		return with(name, "sleep", "lifecycle: {preStop: {exec: {command: [/hello, sleep, '2']}}}")
	}
	k.applyAll(simple("counted", "sleep"), simple("often", "sleep"), simple("deadline", "sleep"), stubborn("watched"), simple("patched", "sleep"),
		with("tiny", "sleep", "resources: {requests: {cpu: 1m}, limits: {cpu: 5m}}"), simple("many-1", "sleep"), simple("many-2", "sleep"))

	k.sub("generation", func(k *kit) {
		features.Conforms(k, 306, 307)
		p := k.ready("counted")
		k.is("generation", fmt.Sprint(p.Generation), "1")
		if p = patch("counted", `{"metadata":{"annotations":{"no":"change"}}}`); p.Generation != 1 {
			k.Errorf("generation %d after a change of the metadata", p.Generation)
		}
		if p = patch("counted", `{"spec":{"activeDeadlineSeconds":10000}}`); p.Generation != 2 {
			k.Errorf("generation %d after a change of the spec", p.Generation)
		}
		k.podIs("counted", "observed", func(p *corev1.Pod) bool { return p.Status.ObservedGeneration == 2 })
		k.ready("often")
		for i := range 499 {
			patch("often", fmt.Sprintf(`{"spec":{"activeDeadlineSeconds":%d}}`, 10000-i))
		}
		p = k.podIs("often", "observed", func(p *corev1.Pod) bool { return p.Status.ObservedGeneration == 500 })
		k.is("generation", fmt.Sprint(p.Generation), "500")
	})
	k.sub("a deadline that comes later", func(k *kit) {
		features.Conforms(k, 309)
		k.ready("deadline")
		k.has(k.fails("patch", "pod", "deadline", "-p", `{"spec":{"activeDeadlineSeconds":0}}`), "activeDeadlineSeconds")
		patch("deadline", `{"spec":{"activeDeadlineSeconds":1}}`)
		k.is("reason", k.phase("deadline", corev1.PodFailed).Status.Reason, "DeadlineExceeded")
		// It holds for one whose containers never came to run, too.
		k.apply(with("stuck", "sleep", "env: [{name: X, valueFrom: {configMapKeyRef: {name: none, key: none}}}]", "activeDeadlineSeconds: 1"))
		k.is("reason", k.phase("stuck", corev1.PodFailed).Status.Reason, "DeadlineExceeded")
	})
	k.sub("from its creation to its end", func(k *kit) {
		features.Conforms(k, 310, 311, 314, 315, 316)
		p := k.ready("watched")
		if _, err := netip.ParseAddr(p.Status.HostIP); err != nil {
			k.Errorf("host's address: %v", err)
		}
		w, err := pods.Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=watched", ResourceVersion: p.ResourceVersion})
		k.must(err)
		defer w.Stop()
		patch("watched", `{"metadata":{"labels":{"time":"new"}}}`)
		list, err := pods.List(ctx, metav1.ListOptions{LabelSelector: "time=new"})
		k.must(err)
		k.is("pods of the label", fmt.Sprint(len(list.Items)), "1")
		if p = patch("watched", `{"status":{"conditions":[{"type":"example.com/Mine","status":"True","message":"patched"}]}}`, "status"); condition(p, "example.com/Mine") != corev1.ConditionTrue {
			k.Errorf("a condition of ours: %+v", p.Status.Conditions)
		}
		k.eventually("the status is replaced", func(ctx context.Context) error { // the node writes it too
			p, err := pods.Get(ctx, "watched", metav1.GetOptions{})
			if err != nil {
				return err
			}
			for i := range p.Status.Conditions {
				if p.Status.Conditions[i].Type == "example.com/Mine" {
					p.Status.Conditions[i].Status = corev1.ConditionFalse
				}
			}
			_, err = pods.UpdateStatus(ctx, p, metav1.UpdateOptions{})
			return err
		})
		k.is("the condition", string(condition(k.pod("watched"), "example.com/Mine")), "False")
		k.must(pods.Delete(ctx, "watched", metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](20)}))
		stamped, modified := false, false
		for ended := time.After(testTimeout); ; {
			var e watch.Event
			select {
			case e = <-w.ResultChan():
			case <-ended:
				k.Fatal("no event tells of the deletion")
			}
			p, ok := e.Object.(*corev1.Pod)
			if !ok {
				k.Fatalf("event %+v", e)
			}
			stamped = stamped || p.DeletionTimestamp != nil && *p.DeletionGracePeriodSeconds == 20 && e.Type == watch.Modified
			modified = modified || p.Labels["time"] == "new" && e.Type == watch.Modified
			if e.Type == watch.Deleted {
				break
			}
		}
		if !stamped || !modified {
			k.Errorf("no event of the label (%t) or of the coming end (%t)", modified, stamped)
		}
	})
	k.sub("resize through its own subresource", func(k *kit) {
		features.Conforms(k, 300, 301)
		p := k.ready("tiny")
		k.eventually("the resize is taken", func(ctx context.Context) error { // the node writes its status meanwhile
			var err error
			if p, err = pods.Get(ctx, "tiny", metav1.GetOptions{}); err != nil {
				return err
			}
			// Both are the least that a cgroup can hold.
			p.Spec.Containers[0].Resources.Requests[corev1.ResourceCPU] = resource.MustParse("2m")
			p.Spec.Containers[0].Resources.Limits[corev1.ResourceCPU] = resource.MustParse("10m")
			p, err = pods.UpdateResize(ctx, "tiny", p, metav1.UpdateOptions{})
			return err
		})
		if got := k.pod("tiny"); got.Spec.Containers[0].Resources.Limits.Cpu().String() != "10m" || p.UID != got.UID || got.Generation != p.Generation {
			k.Errorf("after the PUT: %+v", got.Spec.Containers[0].Resources)
		}
		k.podIs("tiny", "resized", func(p *corev1.Pod) bool {
			r := p.Status.ContainerStatuses[0].Resources
			return r != nil && r.Requests.Cpu().String() == "2m" && r.Limits.Cpu().String() == "10m" && condition(p, corev1.PodResizeInProgress) == "" && p.Status.ContainerStatuses[0].RestartCount == 0
		})
	})
	k.sub("many at once", func(k *kit) {
		features.Conforms(k, 313)
		patch("many-1", `{"metadata":{"labels":{"set":"many"}}}`)
		patch("many-2", `{"metadata":{"labels":{"set":"many"}}}`)
		k.must(pods.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "set=many"}))
		k.gone("many-1")
		k.gone("many-2")
		k.ready("patched")
	})
	k.ok("delete", "pod", "--all", "--wait=false")
}
