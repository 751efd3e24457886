package pod_test

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

// TestUnconfirmedPods: pods that are started without an API are restarted as after a boot; the
// API's first list confirms those it has, in the same containers, and ends the others. Nothing of
// other pods is touched before.
func TestUnconfirmedPods(t *testing.T) {
	// One of them counts from the real clock, and would sleep for years in a bubble.
	handlers := utilruntime.ErrorHandlers
	utilruntime.ErrorHandlers = nil
	t.Cleanup(func() { utilruntime.ErrorHandlers = handlers })
	var away atomic.Bool
	away.Store(true)
	inBubbleOf(t, func(n *node) {
		n.alone = make(chan []*v1.Pod, 1)
		n.api.PrependReactor("*", "pods", func(a k8stesting.Action) (bool, kruntime.Object, error) {
			if away.Load() {
				return refuse(a)
			}
			return false, nil, nil
		})
	}, func(n *node) {
		ran := func(name string, policy v1.RestartPolicy) *v1.Pod {
			p := testPod(name, policy, ctr("a"))
			began := metav1.Now()
			p.Status = v1.PodStatus{Phase: v1.PodRunning, StartTime: &began, ContainerStatuses: []v1.ContainerStatus{{
				Name: "a", Image: "app:1", ContainerID: "clusterd://lost", State: v1.ContainerState{Running: &v1.ContainerStateRunning{StartedAt: began}},
			}}}
			return p
		}
		kept, gone, once := ran("kept", v1.RestartPolicyAlways), ran("gone", v1.RestartPolicyAlways), ran("once", v1.RestartPolicyNever)
		kept.Spec.Containers[0].ImagePullPolicy = v1.PullAlways // the registry is out of reach, too
		n.images.PullErr = func(context.Context, string) error { return errors.New("no route to the registry") }
		running := func() (ids []string) {
			_, list, err := n.runtime.List(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range list {
				if c.State == api.StateRunning {
					ids = append(ids, c.Container.ID)
				}
			}
			return ids
		}
		n.after(time.Minute)
		if got := running(); len(got) > 0 {
			t.Fatalf("%v run without a list and without being asked for", got)
		}
		n.alone <- []*v1.Pod{kept, gone, once}
		n.after(10 * time.Second)
		before := running()
		if len(before) != 2 {
			t.Fatalf("%v run without the API", before)
		}
		if seen := closed(n.pods.Seen()); seen {
			t.Error("the API's list has been seen")
		}
		away.Store(false)
		n.create(kept)
		n.create(once)
		n.after(2 * time.Minute)
		now := running()
		if len(now) != 1 || !slices.Contains(before, now[0]) {
			t.Errorf("%v run, and %v did before", now, before)
		}
		if v, ok := n.pods.Find("default", "gone", ""); ok {
			t.Errorf("the pod that the API does not have is here: %+v", v.Status)
		}
		if p := n.get("kept"); p.Status.Phase != v1.PodRunning || len(p.Status.ContainerStatuses) != 1 || p.Status.ContainerStatuses[0].RestartCount != 1 {
			t.Errorf("kept: %+v", p.Status)
		}
		if p := n.get("once"); p.Status.Phase != v1.PodFailed {
			t.Errorf("once: %+v", p.Status)
		}
		if got := n.events.count("StartedWithoutAPI"); got != 2 {
			t.Errorf("%d events that a pod was started without the API", got)
		}
	})
}

// TestReplacementsOfUnconfirmedPods: what the API has in place of a pod that was started without it,
// by name, claim or host port, starts when that one has ended, and not beside it. Others start at once.
func TestReplacementsOfUnconfirmedPods(t *testing.T) {
	handlers := utilruntime.ErrorHandlers
	utilruntime.ErrorHandlers = nil
	t.Cleanup(func() { utilruntime.ErrorHandlers = handlers })
	var away atomic.Bool
	away.Store(true)
	inBubbleOf(t, func(n *node) {
		n.alone = make(chan []*v1.Pod, 1)
		n.api.PrependReactor("*", "pods", func(a k8stesting.Action) (bool, kruntime.Object, error) {
			if away.Load() {
				return refuse(a)
			}
			if u, ok := a.(k8stesting.UpdateAction); ok { // the API takes no write to another pod of the name
				written := u.GetObject().(*v1.Pod)
				got, err := n.api.Tracker().Get(v1.SchemeGroupVersion.WithResource("pods"), written.Namespace, written.Name)
				if err == nil && got.(*v1.Pod).UID != written.UID {
					return true, nil, apierrors.NewConflict(v1.Resource("pods"), written.Name, errors.New("the UID in the precondition does not match"))
				}
			}
			return false, nil, nil
		})
	}, func(n *node) {
		const grace = 20
		make := func(name string, uid types.UID) *v1.Pod {
			p := testPod(name, v1.RestartPolicyAlways, ctr(string(uid)))
			p.UID = uid
			p.Spec.TerminationGracePeriodSeconds = ptr.To[int64](grace)
			return p
		}
		port := func(p *v1.Pod) *v1.Pod {
			p.Spec.Containers[0].Ports = []v1.ContainerPort{{ContainerPort: 80, HostPort: 8080}}
			return p
		}
		n.runtime.IgnoreTerm = func(api.Container) bool { return true }
		running := func() (names []string) {
			_, list, err := n.runtime.List(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range list {
				if c.State == api.StateRunning {
					names = append(names, c.Container.Name)
				}
			}
			slices.Sort(names)
			return names
		}
		n.alone <- []*v1.Pod{make("web-0", "old-name"), port(make("x", "old-port"))}
		n.after(10 * time.Second)
		if got := running(); !slices.Equal(got, []string{"old-name", "old-port"}) {
			t.Fatalf("%v run", got)
		}
		away.Store(false) // no time passes until all are there
		n.create(make("web-0", "new-name"))
		n.create(port(make("y", "new-port")))
		n.create(make("z", "other"))
		twice := false
		for range 4 * (grace + 60) {
			n.after(time.Second / 4)
			got := running()
			for _, what := range []string{"name", "port"} {
				twice = twice || slices.Contains(got, "old-"+what) && slices.Contains(got, "new-"+what)
			}
		}
		if got := running(); twice || !slices.Equal(got, []string{"new-name", "new-port", "other"}) {
			t.Errorf("%v run at last, an old one and a new one at a time: %v", got, twice)
		}
	})
}
