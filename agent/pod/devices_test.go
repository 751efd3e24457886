package pod_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

// devices are drivers that do what the test says.
type devices struct {
	mu      sync.Mutex
	fault   error         // of every call
	hang    chan struct{} // prepare waits for it, or for the end of its context
	held    map[types.UID]bool
	changes []string
	look    func() string // what is noted beside each change
}

func (d *devices) note(what string, uid types.UID, held bool) {
	d.changes = append(d.changes, fmt.Sprintf("%s %s: %s", what, uid, d.look()))
	d.held[uid] = held
	if !held {
		delete(d.held, uid)
	}
}

func (d *devices) set(fault error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fault = fault
}

func (d *devices) log() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.changes)
}

func (d *devices) Prepare(ctx context.Context, pod *v1.Pod) error {
	d.mu.Lock()
	hang := d.hang
	d.mu.Unlock()
	if hang != nil {
		select {
		case <-hang:
		case <-ctx.Done():
			d.mu.Lock()
			defer d.mu.Unlock()
			d.held[pod.UID] = true
			return fmt.Errorf("driver: %w", ctx.Err())
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fault != nil {
		return d.fault
	}
	d.note("prepare", pod.UID, true)
	return nil
}

func (d *devices) Unprepare(_ context.Context, uid types.UID) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fault != nil {
		return d.fault
	}
	d.note("unprepare", uid, false)
	return nil
}

func (d *devices) Held(uid types.UID) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.held[uid]
}

func (d *devices) Pods() ([]types.UID, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []types.UID
	for uid := range d.held {
		out = append(out, uid)
	}
	return out, nil
}

func (d *devices) Inject(_ context.Context, _ *v1.Pod, c *v1.Container, to *api.Container) error {
	for _, use := range c.Resources.Claims {
		to.Env = append(to.Env, "DEVICE="+use.Name)
	}
	return nil
}

// withDevices runs a test on a node with drivers.
func withDevices(t *testing.T, held []types.UID, fn func(n *node, d *devices)) {
	d := &devices{held: map[types.UID]bool{}}
	for _, uid := range held {
		d.held[uid] = true
	}
	inBubbleOf(t, func(n *node) {
		n.devices = d
		d.look = func() string {
			sandboxes, containers := n.runtime.Counts()
			return fmt.Sprintf("%d sandboxes, %d containers", sandboxes, containers)
		}
	}, func(n *node) { fn(n, d) })
}

func claiming(name string, policy v1.RestartPolicy) *v1.Pod {
	c := ctr("app")
	c.Resources.Claims = []v1.ResourceClaim{{Name: "gpu"}}
	p := testPod(name, policy, c, ctr("plain"))
	p.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: ptr.To("t")}}
	p.Status.ResourceClaimStatuses = []v1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: ptr.To(name + "-gpu")}}
	return p
}

func TestDevicesBeforeTheSandboxAndAfterTheContainers(t *testing.T) {
	withDevices(t, nil, func(n *node, d *devices) {
		d.set(errors.New("ResourceClaim p-gpu: driver gpu.example.com is not registered on this node"))
		n.create(claiming("p", v1.RestartPolicyAlways))
		n.after(time.Second)
		p := n.get("p")
		if sandboxes, _ := n.runtime.Counts(); sandboxes != 0 || p.Status.Reason != "FailedPrepareDynamicResources" || !strings.Contains(p.Status.Message, "p-gpu") {
			t.Errorf("%d sandboxes, status %q %q", sandboxes, p.Status.Reason, p.Status.Message)
		}
		if w := p.Status.ContainerStatuses[0].State.Waiting; w == nil || !strings.Contains(w.Message, "gpu.example.com is not registered") {
			t.Errorf("the container's reason: %+v", w)
		}
		if !n.events.has("FailedPrepareDynamicResources") {
			t.Errorf("no event among %q", n.events.all())
		}
		n.after(time.Minute) // its back-off has grown
		d.set(nil)
		n.pods.DevicesChanged()
		n.after(500 * time.Millisecond)
		p = n.get("p")
		if p.Status.Phase != v1.PodRunning || p.Status.Reason != "" || len(p.Status.ResourceClaimStatuses) != 1 {
			t.Fatalf("%+v", p.Status)
		}
		_, containers, _ := n.runtime.List(t.Context())
		for _, c := range containers {
			if has := slices.Contains(c.Container.Env, "DEVICE=gpu"); has != (c.Container.Name == "app") {
				t.Errorf("container %s: %q", c.Container.Name, c.Container.Env)
			}
		}
		n.runtime.Exit("app", 1)
		n.after(time.Second)
		n.delete("p", 30)
		n.after(time.Minute)
		want := []string{"prepare uid-p: 0 sandboxes, 0 containers", "unprepare uid-p: "}
		got := d.log()
		if n.get("p") != nil || len(got) != 2 || got[0] != want[0] || !strings.HasPrefix(got[1], want[1]) {
			t.Errorf("%q, want %q", got, want)
		}
	})
}

// A claim is given to another as soon as the API says that its pod has ended.
func TestThePodHasNotEndedBeforeItsDevicesAreTakenBack(t *testing.T) {
	withDevices(t, nil, func(n *node, d *devices) {
		n.create(claiming("p", v1.RestartPolicyNever))
		n.after(time.Second)
		d.set(errors.New("driver gpu.example.com has gone"))
		n.runtime.Exit("app", 0)
		n.runtime.Exit("plain", 0)
		n.after(10 * time.Second)
		p := n.get("p")
		if p.Status.Phase != v1.PodRunning || !strings.Contains(p.Status.Message, "has gone") || !n.events.has("has gone") {
			t.Errorf("%s %q %q", p.Status.Phase, p.Status.Message, n.events.all())
		}
		d.set(nil)
		n.after(5 * time.Minute)
		if p := n.get("p"); p.Status.Phase != v1.PodSucceeded || p.Status.Reason != "" {
			t.Errorf("%s %q", p.Status.Phase, p.Status.Reason)
		}
	})
}

// A deletion does not wait for a driver that hangs; what it may have prepared is
// taken back.
func TestDeletedWhileADriverHangs(t *testing.T) {
	withDevices(t, nil, func(n *node, d *devices) {
		d.hang = make(chan struct{})
		n.create(claiming("p", v1.RestartPolicyAlways))
		n.after(5 * time.Second)
		if p := n.get("p"); !strings.Contains(p.Status.ContainerStatuses[0].State.Waiting.Message, "Having its devices prepared") {
			t.Errorf("%+v", p.Status.ContainerStatuses[0].State.Waiting)
		}
		n.delete("p", 30)
		n.after(time.Second)
		if got := d.log(); n.get("p") != nil || len(got) != 1 || !strings.HasPrefix(got[0], "unprepare") {
			t.Errorf("%q", got)
		}
	})
}

// An agent that comes back goes on with what is prepared, and has taken back what
// pods had that are no more.
func TestDevicesOfAFormerAgent(t *testing.T) {
	withDevices(t, []types.UID{"uid-gone"}, func(n *node, d *devices) {
		n.create(claiming("p", v1.RestartPolicyAlways))
		n.after(time.Second)
		if d.Held("uid-gone") || !d.Held("uid-p") {
			t.Errorf("held: %v", d.held)
		}
		n.stop()
		n.start()
		n.after(time.Second)
		if p := n.get("p"); p.Status.Phase != v1.PodRunning || p.Status.ContainerStatuses[0].RestartCount != 0 {
			t.Errorf("%+v", p.Status)
		}
		n.stop()
		n.api.ClearActions()
		if err := n.api.Tracker().Delete(v1.SchemeGroupVersion.WithResource("pods"), "default", "p"); err != nil {
			t.Fatal(err)
		}
		n.start()
		n.after(time.Minute)
		if d.Held("uid-p") {
			t.Errorf("%q", d.log())
		}
	})
}
