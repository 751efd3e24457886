package pod_test

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/cpuset"

	"github.com/clusterd/clusterd/agent/cpu"
)

// static starts the node again with four processors, of which the first is
// nobody's alone.
func (n *node) static() {
	n.t.Helper()
	n.stop()
	topology := cpu.Topology{}
	for id := range 4 {
		topology[id] = cpu.CPU{ID: id, Core: id}
	}
	cpus, err := cpu.New(cpu.Config{Topology: topology, Reserved: cpuset.New(0), File: filepath.Join(n.dir, "cpus.json")})
	if err != nil {
		n.t.Fatal(err)
	}
	n.cpus = cpus
	n.start()
}

// TestPinned: a Guaranteed container has its processors for itself, before it
// starts, across a restart of the agent and until it is gone.
func TestPinned(t *testing.T) {
	inBubble(t, func(n *node) {
		n.create(testPod("shared", v1.RestartPolicyAlways, ctr("app")))
		n.after(time.Second)
		n.static()
		n.after(time.Second)
		on := func(container, want string) {
			t.Helper()
			if got := n.runtime.Resources(container).CpusetCpus; got != want {
				t.Errorf("%s runs on %q, want %q", container, got, want)
			}
		}
		on("app", "0-3") // it was started before there was a policy

		p := testPod("own", v1.RestartPolicyAlways, sized(ctr("main"), "1", "64Mi"), sized(ctr("part"), "500m", "64Mi"))
		p.Spec.InitContainers = []v1.Container{sized(ctr("first"), "1", "64Mi")}
		n.create(p)
		n.after(time.Second)
		on("first", "1")
		n.runtime.Exit("first", 0)
		n.after(time.Second)
		on("main", "1")
		on("part", "0,2-3") // no whole processor: it shares
		on("app", "0,2-3")
		// The other one was moved to all processors, and away again before the
		// first container was started.
		moves := 0
		for _, call := range n.runtime.Calls() {
			if call == "update app" {
				moves++
			}
			if strings.HasPrefix(call, "start") && strings.Contains(call, "first") && moves != 2 {
				t.Errorf("started after %d moves of the other: %q", moves, n.runtime.Calls())
			}
		}

		n.static()
		n.after(time.Second)
		on("main", "1")
		n.create(testPod("late", v1.RestartPolicyAlways, ctr("other")))
		n.after(time.Second)
		on("other", "0,2-3")

		// Its number cannot change while it runs.
		p = n.get("own")
		p.Generation++
		p.Spec.Containers[0] = sized(p.Spec.Containers[0], "2", "64Mi")
		n.update(p)
		n.after(time.Second)
		if got := reasonOf(n.get("own"), v1.PodResizePending); !strings.HasPrefix(got, "Infeasible: containers have processors of their own") {
			t.Errorf("resize: %q", got)
		}

		n.delete("own", 1)
		n.after(40 * time.Second)
		on("app", "0-3")
		on("other", "0-3")
	})
}

// TestPinnedRefusal: what the scheduler let through but the processors do not
// hold is refused.
func TestPinnedRefusal(t *testing.T) {
	inBubble(t, func(n *node) {
		n.static()
		// The node counts two processors for pods; three can be somebody's own.
		n.create(testPod("a", v1.RestartPolicyAlways, sized(ctr("a"), "2", "64Mi")))
		n.after(time.Second)
		if got := n.runtime.Resources("a").CpusetCpus; got != "1-2" {
			t.Errorf("a runs on %q", got)
		}
		if err := n.cpus.Assign("ghost", map[string]int{"x": 1}); err != nil {
			t.Fatal(err)
		}
		n.delete("a", 1)
		n.after(40 * time.Second)
		if err := n.cpus.Assign("ghost2", map[string]int{"x": 1}); err != nil {
			t.Fatal(err)
		}
		n.create(testPod("b", v1.RestartPolicyAlways, sized(ctr("b"), "2", "64Mi")))
		n.after(time.Second)
		if p := n.get("b"); p.Status.Phase != v1.PodFailed || p.Status.Reason != "UnexpectedAdmissionError" || !strings.Contains(p.Status.Message, "not enough cpus available") {
			t.Errorf("status %+v", p.Status)
		}
		// Processors of pods that are no more are given back at the next start.
		n.static()
		n.after(time.Second)
		if pods := n.cpus.Pods(); len(pods) != 0 {
			t.Errorf("still held: %q", pods)
		}
	})
}
